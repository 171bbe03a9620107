"""Facts about an implementation that change what a step moves: read from its code, never fitted."""

from dataclasses import dataclass

REFERENCE_DRAFT_RANKS = 4  # of its 8 GPUs: TinyLlama has 4 KV heads


@dataclass(frozen=True)
class Stack:
    """An implementation of decoding and speculation, as far as bytes and rows are concerned."""

    name: str
    # The output head's weights divided over the ranks, or read whole by each.
    sharded_head: bool = True
    # The number of times that a row's logits are moved to choose a token: written and read once by a fused argmax.
    logit_passes: float = 2.0
    # T_V includes the choice of tokens; otherwise a round pays for it in addition to T_V.
    verify_chooses: bool = True
    # Policies whose self-draft takes the target's exact KV after each verification, and so feeds one token in its
    # first step. All others feed two, as independent drafts do: the last proposal may never have been seen.
    exact_kv_policies: frozenset[str] | None = None  # None: all
    # Ranks that share an independent draft unless a configuration says how many; None: all of the target's.
    draft_ranks: int | None = None

    def refed_tokens(self, shares_target: bool, policy: str) -> int:
        """Return the committed tokens that the first draft step of a round feeds."""
        exact = self.exact_kv_policies is None or policy in self.exact_kv_policies
        return 1 if shares_target and exact else 2


STACKS = {
    stack.name: stack
    for stack in (
        Stack("magicdec"),
        # github.com/Infini-AI-Lab/MagicDec at commit 5fb682c, the last before its A100 tables: tp.py shards layers but
        # not the head; logits are written, copied (2) and read by a radix top-k (2 digits and the gather);
        # selfspec_benchmark.py samples after the verification's time was taken.
        Stack("reference-2024-08", False, 6.0, False, frozenset(), REFERENCE_DRAFT_RANKS),
        # The same at commit 09cd671, which has SnapKV and Llama-3.2-1B as its H100 tables do: head sharded, argmax
        # inside the pass; SnapKV's draft takes the KV of verification, StreamingLLM's does not.
        Stack("reference-2024-11", True, 2.0, True, frozenset({"snapkv"}), REFERENCE_DRAFT_RANKS),
    )
}
