"""vLLM as a peer, with a PyTorch of its own."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic.dataclasses import dataclass
from typing_extensions import override

from magicdec.architectures.head_config import HeadConfig
from magicdec.config.registry import ENGINES
from magicdec.config.schema import Config
from magicdec.costmodel.engine_settings import vllm_lookup
from magicdec.drafts.ngram import PromptLookup
from magicdec.errors import UserError
from magicdec.inputs.rules import STRICT
from magicdec.peers.base import PeerSpec
from magicdec.peers.process import WorkerEngine, WorkerPeer
from magicdec.peers.started_server import StartedServer, as_arguments

BLOCK = 128  # tokens of a block of its KV cache, at most
# Libraries that its documentation recommends to preload on a CPU, where they are installed.
PRELOADED = ("lib/python*/site-packages/vllm/libs/libtcmalloc_minimal*.so*", "lib/libiomp5.so")


# Its methods of speculation, by the draft that stands for each: what proposes tokens, and where it
# comes from.
METHODS = {
    # A checkpoint: a model, or trained for the target.
    "model": ("draft_model", "eagle", "dflash", "dspark"),
    "eagle3": ("eagle3",),
    # The text so far; suffix also learns from earlier answers (arctic-inference).
    "ngram": ("ngram", "suffix"),
    "self": ("mtp",),  # layers of the target that were trained to propose
}


@dataclass(frozen=True, config=STRICT)
class VllmEngine(WorkerEngine):
    """vLLM."""

    name: str = "vllm"
    method: Literal[
        "auto", "draft_model", "eagle", "eagle3", "dflash", "dspark", "ngram", "suffix", "mtp"
    ] = "auto"
    drafts = tuple(METHODS)
    scenarios = ("compare", "serve", "profile")
    parallel = True

    def chosen(self, draft: str) -> str:
        """Return the method with this draft. Raise UserError for one that needs another draft."""
        if self.method == "auto":
            return METHODS[draft][0]
        needed = next(name for name, methods in METHODS.items() if self.method in methods)
        if needed != draft:
            raise UserError(
                f"engine.method={self.method} goes with draft={needed}, not with draft={draft}"
            )
        return self.method


def _check_reach(config: Config) -> None:
    """Raise UserError where rows outgrow a head: from then on vLLM proposes nothing, without a
    word.
    """
    head, batch = config.draft.own_model, config.batch
    if not isinstance(head, HeadConfig):
        return
    reach = head.max_position_embeddings - batch.generate_len - 2 * (max(config.gammas) + 1)
    if batch.context_len > reach:
        given = f"batch.context_len={batch.context_len}"
        limit = f"its max_position_embeddings={head.max_position_embeddings}"
        raise UserError(
            f"{given}: vLLM lets a head propose nothing beyond {limit}; with {batch.generate_len}"
            f" new tokens, choose batch.context_len={reach} or less"
        )


@ENGINES.register(VllmEngine)
class VllmPeer(WorkerPeer, StartedServer):
    """vLLM: its engine either speculates or does not, so that each way has its own worker or
    server.
    """

    name = "vllm"
    title = "vLLM"
    worker = "vllm_worker.py"
    modules = ("vllm",)
    packages = "vllm"

    @override
    def _with_free_draft(self) -> PeerSpec:
        """Choose the method for it, too: that of the settings may be for another draft."""
        spec = super()._with_free_draft()
        assert isinstance(spec.engine, VllmEngine)
        return replace(spec, engine=replace(spec.engine, method="ngram"))

    @property
    @override
    def draws_acceptance(self) -> bool:
        return self.spec.hardware.device != "cpu"  # whose sampler ends in an assertion, as of 0.32

    @classmethod
    @override
    def check(cls, config: Config) -> None:
        assert isinstance(config.engine, VllmEngine)
        if config.speculates:
            config.engine.chosen(config.draft.name)
            _check_reach(config)
        super().check(config)

    @override
    def server(self, speculative: bool, port: int) -> list[str]:
        options = self.options(speculative) | {
            "port": port,
            "host": "127.0.0.1",
            "generation_config": "vllm",
        }
        options |= {
            "tensor_parallel_size": self.spec.hardware.tensor_parallel,
            "no_enable_prefix_caching": True,
        }
        if speculative:  # since 0.28
            options["per_request_spec_decode_metrics"] = "summary"
        return [self._python, "-m", "vllm.entrypoints.openai.api_server", *as_arguments(options)]

    @override
    def options(self, speculative: bool) -> dict[str, Any]:
        """Return the arguments of vLLM's LLM class."""
        spec = self.spec
        assert isinstance(spec.engine, VllmEngine)
        # Two blocks to spare a row: the second pass must not evict what the first has left for it.
        ranks = spec.hardware.tensor_parallel
        tokens_per_row = (-(-spec.max_len // BLOCK) + 2) * BLOCK
        options = {
            "model": spec.target,
            "dtype": spec.hardware.dtype,
            "max_model_len": spec.max_len,
            "max_num_seqs": spec.num_rows,
            "kv_cache_memory_bytes": (
                (spec.num_rows * tokens_per_row + BLOCK) * spec.kv_bytes_per_token // ranks
            ),
            "seed": spec.sampling.seed,
            "enforce_eager": not (spec.hardware.compile or spec.hardware.captures),
        }
        if not speculative:
            return options
        method = spec.engine.chosen(spec.draft.name)
        drafts: dict[str, Any] = {"method": method, "num_speculative_tokens": spec.gamma}
        if method == "ngram" and isinstance(spec.draft, PromptLookup):
            drafts |= vllm_lookup(spec.draft)
        length = spec.draft.drawn_length(spec.gamma)
        if length is not None:
            drafts["rejection_sample_method"] = "synthetic"
            drafts["synthetic_acceptance_length"] = length
        if spec.draft_folder is not None:
            drafts["model"] = spec.draft_folder
        return options | {"speculative_config": drafts}

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
        """Return environment variables: no second process and, on a CPU, the libraries to
        preload.
        """
        variables = super().environment() | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        root = Path(self._python).parents[1]
        libraries = [str(path) for pattern in PRELOADED for path in sorted(root.glob(pattern))[:1]]
        return variables | (
            {"LD_PRELOAD": ":".join(libraries)}
            if libraries and self.spec.hardware.device == "cpu"
            else {}
        )
