"""Peers in a worker process (worker.py), each in an environment of its own that `engine.python`
names.
"""

import os
import subprocess
import tempfile
from abc import abstractmethod
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from typing_extensions import override

from magicdec.config.choices import EngineConfig
from magicdec.config.schema import Config
from magicdec.drafts.ngram import PromptLookup
from magicdec.errors import UserError, exit_in_words, in_brief, to_stderr
from magicdec.inputs.fingerprint import of_files
from magicdec.inputs.rules import JSON, STRICT, Natural, must
from magicdec.measure.metrics import RowTimes
from magicdec.models import checkpoint
from magicdec.peers.base import AcceptanceCounts, Peer, PeerGeneration, PeerSpec
from magicdec.peers.pipe import ImportFailed, WorkerFailed, WorkerProcess, last_words

HERE = Path(__file__).parent
MAIN = HERE / "worker.py"
PROBE_S = 60
# Prints the packages of some modules with their versions; fails if a module is missing.
PROBE = """
import sys
from importlib import metadata, util
assert all(map(util.find_spec, sys.argv[1:]))
owners = metadata.packages_distributions()
packages = sorted({package for module in sys.argv[1:] for package in owners.get(module, [])})
print(", ".join(f"{package} {metadata.version(package)}" for package in packages))
"""
Seconds = Annotated[list[Annotated[float, Field(ge=0)]], must("must be a list of seconds")]


@dataclass(frozen=True, config=JSON)
class Loaded:
    """A worker's first answer (see worker.py)."""

    version: str


@dataclass(frozen=True, config=JSON)
class Decoded:
    """A worker's answer to a batch: lists of one value for each row, and the fields of
    `AcceptanceCounts`.
    """

    tokens: Annotated[list[list[Natural]], must("must be a list of lists of tokens")]
    first: Seconds
    decode: Seconds
    rounds: Natural
    proposed: Natural
    unplaced: Natural
    peak_bytes: Natural
    accepted: Annotated[list[Natural], must("must be a list of counts")]

    def __post_init__(self) -> None:
        for name in ("first", "decode"):
            if (count := len(getattr(self, name))) != len(self.tokens):
                raise UserError(f"{name} has {count} values for {len(self.tokens)} rows")


@dataclass(frozen=True, config=STRICT)
class StartedEngine(EngineConfig):
    """An engine that a run starts, and waits for."""

    time_limit_s: Annotated[float, Field(gt=0)] = 1800.0


@dataclass(frozen=True, config=STRICT)
class WorkerEngine(StartedEngine):
    """An engine in an environment of its own, that of another Python."""

    python: str | None = None
    drafts: ClassVar[tuple[str, ...]] = ("model", "ngram")


class WorkerPeer(Peer):
    """An engine in one worker at a time: each way of decoding, speculating or not, loads its
    own.
    """

    name: ClassVar[str]  # as in engine=vllm
    title: ClassVar[str]  # how messages call the engine
    worker: ClassVar[str]  # the file with its class
    modules: ClassVar[tuple[str, ...]]  # that the environment must have
    packages: ClassVar[str]  # that pip installs
    converters: ClassVar[tuple[Path, ...]] = ()  # our own files that convert a checkpoint
    cpu_only: ClassVar[bool] = False
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float16", "bfloat16")

    @classmethod
    def variable(cls) -> str:
        """Return the environment variable that names the Python of the environment."""
        return f"MAGICDEC_{cls.name.upper()}_PYTHON"

    @classmethod
    def install(cls) -> str:
        """Return how to make the environment, for messages."""
        venv = f"{cls.name}-venv"
        return (
            f"make one with 'python -m venv {venv} && {venv}/bin/pip install {cls.packages}' (see"
            f" docs/peers.md), then set engine.python={venv}/bin/python or {cls.variable()}"
        )

    @classmethod
    def python(cls, engine: WorkerEngine) -> str:
        """Return the Python that the configuration or the variable names. Raise UserError if there
        is none.
        """
        chosen = engine.python or os.environ.get(cls.variable())
        if not chosen:
            raise UserError(
                f"engine.python=null: engine={cls.name} needs an environment of its own;"
                f" {cls.install()}"
            )
        # Not resolved: a venv's Python is a link.
        path = os.path.abspath(os.path.expanduser(chosen))
        if not (os.path.isfile(path) and os.access(path, os.X_OK)):
            raise UserError(f"{cls.setting(engine)}={chosen}: no such program; {cls.install()}")
        return path

    @classmethod
    def setting(cls, engine: WorkerEngine) -> str:
        """Return the name of what has chosen the Python: the key, or the variable."""
        return "engine.python" if engine.python else cls.variable()

    @classmethod
    @override
    def check(cls, config: Config) -> None:
        # An installation that cannot be imported fails in the worker.
        assert isinstance(config.engine, WorkerEngine)
        engine, hardware = config.engine, config.hardware
        if cls.cpu_only and hardware.device != "cpu":
            raise UserError(
                f"hardware.device={hardware.device}: engine={cls.name} runs on CPUs here; use"
                " hardware=cpu"
            )
        if hardware.dtype not in cls.dtypes:
            raise UserError(
                f"hardware.dtype={hardware.dtype}: engine={cls.name} takes {', '.join(cls.dtypes)}"
                " here"
            )
        cls.installed(engine)

    @classmethod
    @override
    def installed(cls, engine: EngineConfig) -> str:
        """Return the packages. Raise UserError for an environment without the engine."""
        assert isinstance(engine, WorkerEngine)
        python = cls.python(engine)
        with suppress(subprocess.SubprocessError, OSError):
            command = [python, "-I", "-c", PROBE, *cls.modules]
            return subprocess.run(
                command, capture_output=True, text=True, timeout=PROBE_S, check=True
            ).stdout.strip()
        missing = " or ".join((cls.title, *cls.modules[1:]))
        raise UserError(
            f"{cls.setting(engine)}={python}: {missing} is not installed there; {cls.install()}"
        )

    def __init__(self, spec: PeerSpec):
        assert isinstance(spec.engine, WorkerEngine)
        self.spec = spec
        self._python, self._setting = self.python(spec.engine), self.setting(spec.engine)
        self._time_limit_s = spec.engine.time_limit_s
        self._worker: WorkerProcess | None = None
        self._speculative = False
        self._peak = 0

    @abstractmethod
    def options(self, speculative: bool) -> dict[str, Any]:
        """Return the arguments of the worker's class."""

    def converted_options(self, speculative: bool, suffix: str) -> dict[str, Any]:
        """Return the options that engines on CPUs share, with checkpoints in the engine's own
        format.
        """
        spec = self.spec
        options = {
            "target": str(self.converted(spec.target, suffix)),
            "rows": spec.num_rows,
            "max_len": spec.max_len,
        }
        options["threads"] = torch.get_num_threads()
        if not speculative:
            return options
        options["gamma"] = spec.gamma
        if isinstance(spec.draft, PromptLookup):
            return options | {"ngram": spec.draft.max_ngram}
        return options | {"draft": str(self.converted(str(spec.draft_folder), suffix))}

    @abstractmethod
    def sampling(self) -> dict[str, Any]:
        """Return the worker's settings of a request."""

    def environment(self) -> dict[str, str]:
        """Return environment variables for the worker: our number of threads. How they wait is
        inherited.
        """
        return {"OMP_NUM_THREADS": str(torch.get_num_threads())}

    @override
    def generate(
        self, prompts: list[list[int]], generate_len: int, speculative: bool, first: int = 0
    ) -> PeerGeneration:
        if self._worker is None or self._speculative != speculative:
            self.close()
            options = self.options(speculative)
            # -I: our path must not reach it.
            command = [self._python, "-I", str(MAIN), str(HERE / self.worker)]
            self._worker = WorkerProcess(
                f"engine.name={self.name}", command, self.environment(), self._time_limit_s
            )
            self._speculative = speculative
            try:
                self._version = self._worker.ask(options, Loaded).version
            except ImportFailed as error:
                reason = f"{self.title} cannot be imported ({error})"
                raise UserError(
                    f"{self._setting}={self._python}: {reason}; {self.install()}"
                ) from None
        seed = self.spec.sampling.seed + first
        request = {
            "prompts": prompts,
            "generate_len": generate_len,
            "seed": seed,
            "sampling": self.sampling(),
        }
        answer = self._worker.ask(request, Decoded)
        if len(answer.tokens) != len(prompts):
            raise self._worker.failure(
                f"broke the protocol: it decoded {len(answer.tokens)} rows, not {len(prompts)}"
            )
        shortest = min(map(len, answer.tokens))
        if shortest < generate_len and not self.spec.eos_token_ids:
            cut_short = (
                f"it cut a row short, at {shortest} of {generate_len} tokens, and no token ends a"
                " sequence"
            )
            raise self._worker.failure(f"broke the protocol: {cut_short}")
        self._peak = max(self._peak, answer.peak_bytes)
        rows = zip(answer.first, answer.decode, answer.tokens, strict=True)
        return PeerGeneration(
            answer.tokens,
            [RowTimes(first, decode, len(tokens) - 1) for first, decode, tokens in rows],
            AcceptanceCounts(
                answer.rounds, answer.proposed, tuple(answer.accepted), answer.unplaced
            ),
        )

    def converted(self, folder: str, suffix: str) -> Path:
        """Return a checkpoint in the engine's own format. It is kept for the next run that converts
        the same weights in the same way: with the same packages and the same code of ours.
        """
        caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        if caches.startswith("~"):  # as it stays where the user has no home directory
            reason = "there is no home directory to keep it in; name a folder with XDG_CACHE_HOME"
            raise WorkerFailed(f"engine.name={self.name}: {folder} cannot be converted: {reason}")
        weights, dtype = checkpoint.fingerprint(Path(folder)), self.spec.hardware.dtype
        code = of_files({path.name: path for path in self.converters})
        made_by = sha256(f"{self.installed(self.spec.engine)} {code}".encode()).hexdigest()[:8]
        cache = Path(caches, "magicdec", "converted")
        kept = cache / f"{weights}-{made_by}-{dtype}{suffix}"
        if kept.exists():
            return kept
        to_stderr(f"converting {folder} for {self.title} ({dtype}), once, into {kept}")
        try:
            cache.mkdir(parents=True, exist_ok=True)
            folder_of_conversion = tempfile.TemporaryDirectory(dir=cache)
        except OSError as error:
            raise WorkerFailed(
                f"engine.name={self.name}: {cache} cannot be written: {error.strerror}; name a"
                " folder with XDG_CACHE_HOME"
            ) from None
        with folder_of_conversion as temporary:
            made = Path(temporary, kept.name)
            environment = os.environ | {"HF_HUB_OFFLINE": "1"}
            command = [self._python, "-I", *self.conversion(folder, made)]
            try:
                subprocess.run(
                    command,
                    capture_output=True,
                    env=environment,
                    timeout=self._time_limit_s,
                    check=True,
                )
            except subprocess.TimeoutExpired:
                reason = f"it took more than engine.time_limit_s={self._time_limit_s:g} seconds"
            except subprocess.CalledProcessError as error:
                reason = last_words(error.stderr) or exit_in_words(error.returncode)
            else:
                try:
                    made.replace(kept)
                except OSError:
                    if not kept.exists():  # otherwise another run has converted it meanwhile
                        raise
                return kept
        raise WorkerFailed(f"engine.name={self.name}: {folder} cannot be converted: {reason}")

    def conversion(self, folder: str, made: Path) -> list[str]:
        """Return the arguments of the environment's Python that convert a checkpoint."""
        raise NotImplementedError(f"{self.title} reads checkpoints as they are")

    @property
    @override
    def version(self) -> str:
        return in_brief(f"{self.modules[0]} {self._version}")

    @property
    @override
    def peak_bytes(self) -> int:
        return self._peak

    @override
    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._worker = None
