"""Small random models, and a batch opened on them: those that plugins are checked with."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

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
__all__ += ["accepted", "drafting"]


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
