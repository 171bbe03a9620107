"""Describe in words what a target's steps read more of as the context grows, and what stays."""

from collections.abc import Iterator

from magicdec.architectures.layer_facts import TokenMemory
from magicdec.architectures.model_config import ModelConfig
from magicdec.costmodel.roofline import operators
from magicdec.costmodel.round import Setup


def growth(model: ModelConfig) -> str:
    """Return what grows with the context and what does not; "" where the entries of every layer
    grow alike.
    """
    memories = model.memories
    if all(memory.grows and not memory.selected for memory in memories):
        return ""
    parts = [part for memory in memories for part in _parts(memory)]
    growing = sum(memory.layers for memory in memories if memory.grows)
    most = f"with the context grow the entries of {growing} of {model.num_layers} layers"
    if not growing:
        most = "nothing that a step reads grows with the context"
    return "; ".join([most, *parts])


def _parts(memory: TokenMemory) -> Iterator[str]:
    """Yield what does not grow in equal layers."""
    if memory.window is not None:
        yield f"{memory.layers} layers stop at a window of {memory.window:,} tokens"
    if memory.state_bytes:
        yield f"{memory.layers} layers keep states of one size"
    if memory.selected is not None:
        index = "an index of all tokens" if memory.index_entry else "the index of a layer before"
        chosen = f"read at most {memory.selected:,} entries, chosen by {index}"
        yield f"{memory.layers} layers {chosen}"


def kv_share(setup: Setup) -> float:
    """Return the share of the KV cache in the bytes that one of the target's steps moves."""
    ops = operators(setup.target_pass, setup.hardware)
    moved = sum(op.number * op.bytes for op in ops)
    return sum(op.number * op.bytes for op in ops if op.reads == "kv") / moved


def experts_touched(setup: Setup, tokens: int) -> float | None:
    """Return the share of the experts that a pass of `tokens` tokens per row touches; None without
    experts.
    """
    for matrices in setup.target.matrices:
        if matrices.experts:
            touched = setup.routing.touched(
                matrices.experts, matrices.experts_per_token, setup.batch, tokens
            )
            return touched / matrices.experts
    return None


def differs(setup: Setup) -> bool:
    """Return whether the target is another case than the paper's: a dense model whose layers all
    keep an entry of every token.
    """
    return bool(growth(setup.target)) or experts_touched(setup, 1) is not None


def remarks(setup: Setup, gamma: int) -> list[str]:
    """Return sentences on what a prediction's target does otherwise than a dense one."""
    sentences = [growth(setup.target)]
    touched = experts_touched(setup, 1)
    if touched is not None:
        verified = experts_touched(setup, gamma + 1)
        sentences.append(
            f"a step touches {touched:.0%} of the experts, a verification {verified:.0%}, and S*"
            " counts that in"
        )
    if any(memory.selected for memory in setup.target.memories):
        sentences.append(
            "the target is its own sparse draft: its attention reads a selection already, so that"
            " the claim that speculation gains with the batch does not hold for it"
        )
    return [sentence for sentence in sentences if sentence]
