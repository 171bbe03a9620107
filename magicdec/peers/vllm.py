"""vLLM as a peer, with a PyTorch of its own."""

from pathlib import Path
from typing import Any, Literal

from pydantic.dataclasses import dataclass
from typing_extensions import override

from magicdec.config.registry import ENGINES
from magicdec.drafts.ngram import PromptLookup
from magicdec.peers.process import WorkerEngine, WorkerPeer
from magicdec.rules import STRICT

BLOCK = 128  # tokens of a block of its KV cache, at most
# Libraries that its documentation recommends to preload on a CPU, where they are installed.
PRELOADED = ("lib/python*/site-packages/vllm/libs/libtcmalloc_minimal*.so*", "lib/libiomp5.so")


@dataclass(frozen=True, config=STRICT)
class VllmEngine(WorkerEngine):
    """vLLM."""

    name: str = "vllm"
    method: Literal["draft_model", "eagle", "eagle3"] = "draft_model"


@ENGINES.register(VllmEngine)
class VllmPeer(WorkerPeer):
    """vLLM: its engine either speculates or does not, so that each way has its own worker."""

    name, title, worker, modules, packages = "vllm", "vLLM", "vllm_worker.py", ("vllm",), "vllm"

    @override
    def options(self, speculative: bool) -> dict[str, Any]:
        """Return the arguments of vLLM's LLM class."""
        spec = self.spec
        assert isinstance(spec.engine, VllmEngine)
        # Two blocks to spare a row: the second pass must not evict what the first has left for it.
        tokens_per_row = (-(-spec.max_len // BLOCK) + 2) * BLOCK
        options = {
            "model": spec.target,
            "dtype": spec.hardware.dtype,
            "max_model_len": spec.max_len,
            "max_num_seqs": spec.num_rows,
            "kv_cache_memory_bytes": (spec.num_rows * tokens_per_row + BLOCK) * spec.kv_bytes_per_token,
            "seed": spec.sampling.seed,
            "enforce_eager": not (spec.hardware.compile or spec.hardware.captures),
        }
        if not speculative:
            return options
        if isinstance(spec.draft, PromptLookup):
            drafts = {"method": "ngram", "prompt_lookup_max": spec.draft.max_ngram, "prompt_lookup_min": 1}
        else:
            drafts = {"method": spec.engine.method, "model": spec.draft_folder}
        return options | {"speculative_config": drafts | {"num_speculative_tokens": spec.gamma}}

    @override
    def sampling(self) -> dict[str, Any]:
        """Return arguments of vLLM's SamplingParams."""
        sampling, ends = self.spec.sampling, self.spec.eos_token_ids
        options: dict[str, Any] = {"temperature": sampling.temperature, "ignore_eos": not ends}
        if ends:  # without a tokenizer vLLM has none
            options["stop_token_ids"] = ends
        if not sampling.greedy:
            options |= {"top_k": sampling.top_k or 0, "top_p": sampling.top_p or 1.0}
        return options

    @override
    def environment(self) -> dict[str, str]:
        """Return environment variables: no second process and, on a CPU, the libraries to preload."""
        found = super().environment() | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        root = Path(self._python).parents[1]
        libraries = [str(path) for pattern in PRELOADED for path in sorted(root.glob(pattern))[:1]]
        return found | ({"LD_PRELOAD": ":".join(libraries)} if libraries and self.spec.hardware.device == "cpu" else {})
