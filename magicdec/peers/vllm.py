"""vLLM as a peer: a worker process (vllm_worker.py) in an environment of its own, with a PyTorch of its own."""

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from magicdec.config.schema import Config
from magicdec.drafting import PromptLookup
from magicdec.errors import UserError
from magicdec.measure.metrics import RowTimes
from magicdec.peers.base import Counts, Peer, PeerGeneration, PeerSpec
from magicdec.registry import VllmEngine

WORKER = Path(__file__).with_name("vllm_worker.py")
PYTHON_VARIABLE = "MAGICDEC_VLLM_PYTHON"
INSTALL = (
    "make one with 'python -m venv vllm-venv && vllm-venv/bin/pip install vllm' (on a CPU see docs/peers.md), "
    f"then set engine.python=vllm-venv/bin/python or {PYTHON_VARIABLE}"
)
BLOCK = 128  # tokens of a block of its KV cache, at most
TAIL = 2000  # characters of the worker's stderr in an error
PROBE_S = 60


def python(configured: str | None) -> str:
    """Return the Python of vLLM's environment, from the configuration or the environment variable. Raise UserError if
    there is none.
    """
    chosen = configured or os.environ.get(PYTHON_VARIABLE)
    if not chosen:
        raise UserError(f"engine.python=null: engine=vllm needs an environment of its own; {INSTALL}")
    path = os.path.abspath(os.path.expanduser(chosen))  # not resolved: a venv's Python is a link
    if not os.access(path, os.X_OK):
        raise UserError(f"engine.python={chosen}: no such program; {INSTALL}")
    return path


def check(python: str) -> None:
    """Raise UserError if vLLM is not installed there. An installation that cannot be imported fails in the worker."""
    code = "import sys, importlib.util; sys.exit(importlib.util.find_spec('vllm') is None)"
    with suppress(subprocess.SubprocessError, OSError):
        if subprocess.run([python, "-I", "-c", code], capture_output=True, timeout=PROBE_S).returncode == 0:
            return
    raise UserError(f"engine.python={python}: vLLM is not installed there; {INSTALL}")


class VllmPeer(Peer):
    """vLLM in one worker at a time: a vLLM engine either speculates or does not, so each way has its own worker."""

    @classmethod
    def check(cls, config: Config) -> None:
        """See Peer.check."""
        assert isinstance(config.engine, VllmEngine)
        check(python(config.engine.python))

    def __init__(self, spec: PeerSpec):
        assert isinstance(spec.engine, VllmEngine)
        self.spec, self._engine, self._python = spec, spec.engine, python(spec.engine.python)
        # Two blocks to spare a row: the second pass must not evict what the first has left for it.
        tokens_per_row = (-(-spec.max_len // BLOCK) + 2) * BLOCK
        self._kv_bytes = (spec.num_rows * tokens_per_row + BLOCK) * spec.kv_bytes_per_token
        self._worker: WorkerProcess | None = None
        self._speculative = False
        self._peak = 0

    def generate(
        self, prompts: list[list[int]], generate_len: int, speculative: bool, first: int = 0
    ) -> PeerGeneration:
        """See Peer.generate."""
        if self._worker is None or self._speculative != speculative:
            self.close()
            self._worker = WorkerProcess(self._python, self.spec.device, self._engine.time_limit_s)
            self._speculative = speculative
            self._version = self._worker.ask(self._options(speculative))["version"]
        sampling = self.spec.sampling
        options: dict[str, Any] = {"temperature": sampling.temperature, "ignore_eos": not self.spec.eos_token_ids}
        if self.spec.eos_token_ids:  # without a tokenizer vLLM has none
            options["stop_token_ids"] = self.spec.eos_token_ids
        if not sampling.greedy:
            options |= {"top_k": sampling.top_k or 0, "top_p": sampling.top_p or 1.0}
        seed = sampling.seed + first
        request = {"prompts": prompts, "generate_len": generate_len, "seed": seed, "sampling": options}
        answer = self._worker.ask(request)
        self._peak = max(self._peak, answer["peak_bytes"])
        rows = zip(answer["first"], answer["decode"], answer["tokens"], strict=True)
        return PeerGeneration(
            answer["tokens"],
            [RowTimes(first, decode, len(tokens) - 1) for first, decode, tokens in rows],
            Counts(answer["rounds"], answer["proposed"], tuple(answer["accepted"])),
        )

    def _options(self, speculative: bool) -> dict[str, Any]:
        """Return the arguments of vLLM's LLM class."""
        spec = self.spec
        options = {
            "model": spec.target,
            "dtype": spec.dtype,
            "max_model_len": spec.max_len,
            "max_num_seqs": spec.num_rows,
            "kv_cache_memory_bytes": self._kv_bytes,
            "seed": spec.sampling.seed,
            "enforce_eager": not (spec.compile or spec.graphs),
        }
        if not speculative:
            return options
        if isinstance(spec.draft, PromptLookup):
            drafts = {"method": "ngram", "prompt_lookup_max": spec.draft.max_ngram, "prompt_lookup_min": 1}
        else:
            drafts = {"method": self._engine.method, "model": spec.draft_folder}
        return options | {"speculative_config": drafts | {"num_speculative_tokens": spec.gamma}}

    @property
    def version(self) -> str:
        """See Peer.version."""
        return f"vllm {self._version}"

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

    def __init__(self, python: str, device: str, time_limit_s: float):
        self._python, self._time_limit_s = python, time_limit_s
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [python, "-I", str(WORKER)],  # -I: our path must not reach it
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=os.environ | environment(python, device),
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
        """Return the answer. Raise RuntimeError if there is none, UserError if vLLM cannot be imported."""
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
        try:
            line = self._lines.get(timeout=self._time_limit_s)
        except queue.Empty:
            limit = f"engine.time_limit_s={self._time_limit_s:g}"
            raise RuntimeError(f"vLLM's worker gave no answer within {limit} seconds{self._stderr_end()}") from None
        if not line:
            raise RuntimeError(f"vLLM's worker ended, exit code {self._process.wait(PROBE_S)}{self._stderr_end()}")
        try:
            answer = json.loads(line)
        except ValueError:
            raise RuntimeError(f"vLLM's worker answered {line[:80]!r}, which is not JSON{self._stderr_end()}") from None
        if answer.get("kind") == "import":
            raise UserError(f"engine.python={self._python}: vLLM cannot be imported ({answer['error']}); {INSTALL}")
        if "error" in answer:
            raise RuntimeError(f"vLLM: {answer['error']}{self._stderr_end()}")
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


def environment(python: str, device: str) -> dict[str, str]:
    """Return environment variables for vLLM: no second process, our number of threads and, on a CPU, the libraries that
    its documentation recommends to preload, if they are installed there.
    """
    found = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }
    if device == "cpu":
        root = Path(python).parents[1]
        wanted = ("lib/python*/site-packages/vllm/libs/libtcmalloc_minimal*.so*", "lib/libiomp5.so")
        libraries = [str(path) for pattern in wanted for path in sorted(root.glob(pattern))[:1]]
        found |= {"LD_PRELOAD": ":".join(libraries)} if libraries else {}
    return found
