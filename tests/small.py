"""Small random models, and a batch opened on them: those that plugins are checked with."""

from magicdec.conformance import (
    VOCAB,
    cache_config,
    machine,
    new_engine,
    noisy_copy,
    open_batch,
    random_prompts,
    small_drafter,
    small_head,
    small_model,
)

__all__ = ["VOCAB", "cache_config", "machine", "new_engine", "noisy_copy", "open_batch", "random_prompts"]
__all__ += ["small_drafter", "small_head", "small_model"]
