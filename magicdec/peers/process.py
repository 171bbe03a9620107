"""Peers in a worker process (worker.py), each in an environment of its own that `engine.python` names."""

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from abc import abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import torch

from magicdec.config.schema import Config
from magicdec.drafting import PromptLookup
from magicdec.errors import UserError, to_stderr
from magicdec.measure.metrics import RowTimes
from magicdec.models import checkpoint
from magicdec.peers.base import Counts, Peer, PeerGeneration, PeerSpec
from magicdec.registry import WorkerEngine

HERE = Path(__file__).parent
MAIN = HERE / "worker.py"
TAIL = 2000  # characters of the worker's stderr in an error
PROBE_S = 60


class WorkerPeer(Peer):
    """An engine in one worker at a time: each way of decoding, speculating or not, loads its own."""

    name: ClassVar[str]  # as in engine=vllm
    title: ClassVar[str]  # how messages call the engine
    worker: ClassVar[str]  # the file with its class Worker
    modules: ClassVar[tuple[str, ...]]  # that the environment must have
    packages: ClassVar[str]  # that pip installs
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
            f"make one with 'python -m venv {venv} && {venv}/bin/pip install {cls.packages}' (see docs/peers.md), "
            f"then set engine.python={venv}/bin/python or {cls.variable()}"
        )

    @classmethod
    def python(cls, engine: WorkerEngine) -> str:
        """Return the Python that the configuration or the variable names. Raise UserError if there is none."""
        chosen = engine.python or os.environ.get(cls.variable())
        if not chosen:
            raise UserError(f"engine.python=null: engine={cls.name} needs an environment of its own; {cls.install()}")
        path = os.path.abspath(os.path.expanduser(chosen))  # not resolved: a venv's Python is a link
        if not os.access(path, os.X_OK):
            raise UserError(f"engine.python={chosen}: no such program; {cls.install()}")
        return path

    @classmethod
    def check(cls, config: Config) -> None:
        """See Peer.check. An installation that cannot be imported fails in the worker."""
        assert isinstance(config.engine, WorkerEngine)
        engine, hardware = config.engine, config.hardware
        if cls.cpu_only and hardware.device != "cpu":
            raise UserError(f"hardware.device={hardware.device}: engine={cls.name} runs on CPUs here; use hardware=cpu")
        if hardware.dtype not in cls.dtypes:
            raise UserError(f"hardware.dtype={hardware.dtype}: engine={cls.name} takes {', '.join(cls.dtypes)} here")
        python = cls.python(engine)
        code = f"import sys, importlib.util; sys.exit(any(not importlib.util.find_spec(m) for m in {cls.modules}))"
        with suppress(subprocess.SubprocessError, OSError):
            if subprocess.run([python, "-I", "-c", code], capture_output=True, timeout=PROBE_S).returncode == 0:
                return
        missing = " or ".join((cls.title, *cls.modules[1:]))
        raise UserError(f"engine.python={python}: {missing} is not installed there; {cls.install()}")

    def __init__(self, spec: PeerSpec):
        assert isinstance(spec.engine, WorkerEngine)
        self.spec, self._python, self._time_limit_s = spec, self.python(spec.engine), spec.engine.time_limit_s
        self._worker: WorkerProcess | None = None
        self._speculative = False
        self._peak = 0

    @abstractmethod
    def options(self, speculative: bool) -> dict[str, Any]:
        """Return the arguments of the worker's class."""

    def converted_options(self, speculative: bool, suffix: str) -> dict[str, Any]:
        """Return the options that engines on CPUs share, with checkpoints in the engine's own format."""
        spec = self.spec
        options = {"target": str(self.converted(spec.target, suffix)), "rows": spec.num_rows, "max_len": spec.max_len}
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
        """Return environment variables for the worker: our number of threads. How they wait is inherited."""
        return {"OMP_NUM_THREADS": str(torch.get_num_threads())}

    def generate(
        self, prompts: list[list[int]], generate_len: int, speculative: bool, first: int = 0
    ) -> PeerGeneration:
        """See Peer.generate."""
        if self._worker is None or self._speculative != speculative:
            self.close()
            options = self.options(speculative)
            self._worker = WorkerProcess(self, self._python, self.environment(), self._time_limit_s)
            self._speculative = speculative
            self._version = self._worker.ask(options)["version"]
        seed = self.spec.sampling.seed + first
        request = {"prompts": prompts, "generate_len": generate_len, "seed": seed, "sampling": self.sampling()}
        answer = self._worker.ask(request)
        self._peak = max(self._peak, answer["peak_bytes"])
        rows = zip(answer["first"], answer["decode"], answer["tokens"], strict=True)
        accepted = tuple(answer["accepted"])
        return PeerGeneration(
            answer["tokens"],
            [RowTimes(first, decode, len(tokens) - 1) for first, decode, tokens in rows],
            Counts(answer["rounds"], answer["proposed"], accepted, answer.get("unplaced", 0)),
        )

    def converted(self, folder: str, suffix: str) -> Path:
        """Return a checkpoint in the engine's own format, which is kept for the next run."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "magicdec", "converted")
        kept = cache / f"{checkpoint.fingerprint(Path(folder))}-{self.spec.dtype}{suffix}"
        if kept.exists():
            return kept
        to_stderr(f"converting {folder} for {self.title} ({self.spec.dtype}), once, into {kept}")
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as temporary:
            made = Path(temporary, kept.name)
            environment = os.environ | {"HF_HUB_OFFLINE": "1"}
            command = [self._python, "-I", *self.conversion(folder, made)]
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
                raise UserError(f"engine.name={self.name}: {folder} cannot be converted: {reason}")
            made.replace(kept)
        return kept

    def conversion(self, folder: str, made: Path) -> list[str]:
        """Return the arguments of the environment's Python that convert a checkpoint."""
        raise NotImplementedError(f"{self.title} reads checkpoints as they are")

    @property
    def version(self) -> str:
        """See Peer.version."""
        return f"{self.modules[0]} {self._version}"

    @property
    def peak_bytes(self) -> int:
        """See Peer.peak_bytes."""
        return self._peak

    def close(self) -> None:
        """See Peer.close."""
        if self._worker is not None:
            self._worker.close()
        self._worker = None


class WorkerProcess:
    """The worker's process, which answers each line of JSON with another within the time limit."""

    def __init__(self, peer: WorkerPeer, python: str, environment: dict[str, str], time_limit_s: float):
        self._peer, self._python, self._time_limit_s = peer, python, time_limit_s
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [python, "-I", str(MAIN), str(HERE / peer.worker)],  # -I: our path must not reach it
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=os.environ | environment,
            start_new_session=True,  # Ctrl-C is for this process, which ends the worker
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with suppress(ValueError):  # closed
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put("")

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer. Raise RuntimeError if there is none, UserError if the engine cannot be imported."""
        assert self._process.stdin is not None
        try:
            with suppress(BrokenPipeError):  # then reading the answer fails and says why
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
            answer = self._answer()
        except BaseException:  # an interrupt, too
            self.close()
            raise
        return answer

    def _answer(self) -> dict[str, Any]:
        title = self._peer.title
        try:
            line = self._lines.get(timeout=self._time_limit_s)
        except queue.Empty:
            limit = f"engine.time_limit_s={self._time_limit_s:g}"
            raise RuntimeError(f"{title}'s worker gave no answer within {limit} seconds{self._stderr_end()}") from None
        if not line:
            code = self._process.wait(PROBE_S)
            raise RuntimeError(f"{title}'s worker ended, exit code {code}{self._stderr_end()}")
        try:
            answer = json.loads(line)
        except ValueError:
            said = f"{title}'s worker answered {line[:80]!r}, which is not JSON"
            raise RuntimeError(f"{said}{self._stderr_end()}") from None
        if answer.get("kind") == "import":
            reason = f"{title} cannot be imported ({answer['error']})"
            raise UserError(f"engine.python={self._python}: {reason}; {self._peer.install()}")
        if "error" in answer:
            raise RuntimeError(f"{title}: {answer['error']}{self._stderr_end()}")
        return answer

    def _stderr_end(self) -> str:
        """Return the end of the worker's stderr."""
        self._stderr.seek(0)
        text = self._stderr.read().decode(errors="replace")[-TAIL:].strip()
        return f"; the end of its stderr:\n{text}" if text else ""

    def close(self) -> None:
        """Kill the worker and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            with suppress(BrokenPipeError):
                stream.close()  # type: ignore[union-attr]
