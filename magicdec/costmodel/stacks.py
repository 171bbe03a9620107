"""Software as the cost model sees it: implementations of decoding and speculation, by what they
move, launch and leave to the host.

Serving engines change from version to version: a switch that belongs to some versions says which.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from magicdec.errors import UserError

OWN_STACK = "magicdec"
REFERENCE_DRAFT_RANKS = 4  # of its 8 GPUs: TinyLlama has 4 KV heads


@dataclass(frozen=True)
class Host:
    """Microseconds of a speculative round that an engine spends outside its kernels, in addition to
    those of a decoding step.
    """

    draft_step_us: float = 0.0  # of each draft step: inputs, metadata, launches
    row_us: float = 0.0  # of each request: acceptance, bookkeeping, sampling parameters
    lookup_us: float = 0.0  # of a round of a lookup, which runs on the host
    round_us: float = 0.0  # of each round: accepting and committing


@dataclass(frozen=True)
class Stack:
    """An implementation of decoding and speculation, as far as bytes, rows and launches are
    concerned.
    """

    name: str
    # The output head's weights divided over the ranks, or read whole by each.
    sharded_head: bool = True
    # The number of times that a row's logits are moved to choose a token: written and read once by
    # a fused argmax.
    logit_passes: float = 2.0
    # T_V includes the choice of tokens; otherwise a round pays for it in addition to T_V.
    verify_chooses: bool = True
    # Policies whose self-draft takes the target's exact KV after each verification, and so feeds
    # one token in its first step. All others feed two, as independent drafts do: the last proposal
    # may never have been seen.
    exact_kv_policies: frozenset[str] | None = None  # None: all
    # Ranks that share an independent draft unless a configuration says how many; None: all of the
    # target's.
    draft_ranks: int | None = None
    # Where attention of several new tokens is split over the KV cache, as that of one token is.
    splits_verification: Literal["always", "hopper", "never"] = "always"
    # Rows of a batch may verify different numbers of tokens: a lookup without a match verifies one.
    is_ragged: bool = False
    # The matmuls of published tables (matmuls.py) and this overhead of a layer replace what a
    # machine was calibrated for, which belongs to another software; None: as calibrated.
    layer_us: float | None = None
    # A chunk of a prompt that is not its last computes logits as well, which are not read.
    discards_logits: bool = False
    # The first draft step of a round computes the logits of all tokens that it feeds, not those of
    # the last one alone.
    drafts_all_logits: bool = False
    # Matmuls of up to so many rows with quantized weights decode them for each row, on vector
    # units.
    vector_rows: int = 0
    host: Host = Host()

    def refed_tokens(self, is_exact: bool, policy: str) -> int:
        """Return the committed tokens that the first draft step of a round feeds."""
        keeps_exact = self.exact_kv_policies is None or policy in self.exact_kv_policies
        return 1 if is_exact and keeps_exact else 2

    def splits(self, device: str) -> bool:
        """Return whether verification is split over the KV cache on a device."""
        is_hopper = device.upper().startswith(("H100", "H200", "H20", "GH200"))
        return self.splits_verification == "always" or (
            self.splits_verification == "hopper" and is_hopper
        )


# Layers are replayed as CUDA graphs. Those of a layer, a draft step, a row and a round were chosen
# by one half of the sources of docs/results/refutation.md and backtest.md, and are judged on the
# other.
_SERVED_LAYER_US = 15.0
_SERVED = Host(draft_step_us=100.0, row_us=75.0, round_us=700.0)
# From v0.14 on (January 2026), vLLM schedules a step while the one before still runs, but not where
# lookups run on the host. The same lookups on a GPU (vllm-project/vllm#29184) save 1.3 to 2.3 ms a
# token, at one to two tokens a round.
_SYNCHRONOUS_LOOKUP = replace(_SERVED, lookup_us=3000.0)
# Their model.py applies the head to all tokens of every pass.
_REFERENCE: dict[str, Any] = {
    "draft_ranks": REFERENCE_DRAFT_RANKS,
    "discards_logits": True,
    "drafts_all_logits": True,
}
_VLLM: dict[str, Any] = {
    "splits_verification": "hopper",
    "is_ragged": True,
    "layer_us": _SERVED_LAYER_US,
    "discards_logits": True,
}
STACKS = {
    stack.name: stack
    for stack in (
        Stack(OWN_STACK),
        # github.com/Infini-AI-Lab/MagicDec at commit 5fb682c, the last before its A100 tables:
        # tp.py shards layers but not the head; logits are written, copied (2) and read by a radix
        # top-k (2 digits and the gather); selfspec_benchmark.py samples after the verification's
        # time was taken.
        Stack("reference-2024-08", False, 6.0, False, frozenset(), **_REFERENCE),
        # The same at commit 09cd671, which has SnapKV and Llama-3.2-1B as its H100 tables do: head
        # sharded, argmax inside the pass; SnapKV's draft takes the KV of verification,
        # StreamingLLM's does not.
        Stack("reference-2024-11", True, 2.0, True, frozenset({"snapkv"}), **_REFERENCE),
        # FlashAttention-2 splits paged attention of one token alone ("Only apply split-k for
        # decoding" in mha_varlen_fwd of its flash_api.cpp); FlashAttention-3, on Hopper, splits
        # that of several.
        Stack("vllm", **_VLLM, host=_SYNCHRONOUS_LOOKUP),
        Stack("vllm-2025", **_VLLM, host=_SERVED),
        # With attention in Triton, as on AMD: its split kernel takes one token alone, up to v0.28
        # at least (vllm-project/vllm#51995 and #53930, August 2026, both open).
        Stack("vllm-triton", **_VLLM | {"splits_verification": "never"}, host=_SYNCHRONOUS_LOOKUP),
        # FlashInfer and FlashAttention-3, the defaults on NVIDIA's cards, split all. Attention in
        # Triton does since sgl-project/sglang#27382 (June 2026).
        Stack(
            "sglang",
            is_ragged=True,
            layer_us=_SERVED_LAYER_US,
            discards_logits=True,
            host=_SERVED,
        ),
        Stack("llama.cpp", is_ragged=True, vector_rows=8),
        Stack("mlx", is_ragged=True, vector_rows=16),
    )
}


def stack_named(name: str) -> Stack:
    """Return the stack of that name. Raise UserError if there is none."""
    if name not in STACKS:
        raise UserError(f"scenario.stack={name} is not known; one of: {', '.join(STACKS)}")
    return STACKS[name]
