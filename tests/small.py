"""Small random models, and a batch opened on them: those that plugins are checked with."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from magicdec.attention.cpp import CppAttention
from magicdec.config.registry import DRAFTS, POLICIES
from magicdec.conformance.small_models import (
    VOCAB,
    cache_config,
    machine,
    new_engine,
    noisy_copy,
    open_batch,
    random_prompts,
    small_block,
    small_drafter,
    small_head,
    small_model,
    small_modules,
)
from magicdec.engine.decoder import Generation
from magicdec.engine.native import Batch
from magicdec.kernels.library import compiler
from magicdec.models.transformer import Transformer

__all__ = [
    "VOCAB",
    "cache_config",
    "machine",
    "new_engine",
    "noisy_copy",
    "open_batch",
    "random_prompts",
]
__all__ += ["small_block", "small_drafter", "small_head", "small_model", "small_modules"]
__all__ += ["CROSS", "PAIRS", "accepted", "as_on_cpus", "drafting"]

# Where a draft keeps no cache, the policy has no say; and some policies suit the target alone.
PAIRS = [
    (draft, policy)
    for draft in DRAFTS
    for policy in POLICIES
    if (DRAFTS[draft].facts.is_model or policy == "full")
    and not (POLICIES[policy].facts.needs_target and not DRAFTS[draft].facts.shares_target)
]
# Of these, every policy with one draft, and every draft with one policy.
CROSS = [
    (draft, policy)
    for draft, policy in PAIRS
    if draft == "self" or policy == "streaming" or not DRAFTS[draft].facts.is_model
]


def as_on_cpus(model: Transformer) -> Transformer:
    """Return a model with the attention that CPUs take where there is a compiler: a pass over all
    layers is one call, and takes a fraction of the time where the model is small.
    """
    if compiler() is not None:
        model.attention = CppAttention()
    return model


def drafting(
    draft: str,
    target: Transformer,
    lengths: Sequence[int],
    noise: float = 0.15,
    seed: int = 0,
    **settings: Any,
) -> Batch:
    """Open and prefill a batch of random prompts, with the model that the draft needs next to its
    target.
    """
    model = small_drafter(draft, target, noise)
    return open_batch(
        target, random_prompts(lengths, seed), draft_name=draft, draft_model=model, **settings
    )


def accepted(generation: Generation) -> Tensor:
    """Return how many proposals were accepted, of each row in each of its rounds."""
    return generation.accepted_RB[generation.accepted_RB >= 0]
