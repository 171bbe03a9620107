"""Small targets of the families that run as transformers' modules, the drafts and policies that
apply to them, and what transformers' own `generate` writes.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from magicdec.attention.base import Attention
from magicdec.config.registry import DRAFTS
from magicdec.conformance.small_models import small_drafter
from magicdec.models.transformer import Transformer
from tests.checkpoints import MODULES, load_modules, load_reference, written
from tests.small import random_prompts

LENGTHS, NEW_TOKENS, VOCABULARY = [37, 9, 50], 12, 96
FAMILIES = [family for family in MODULES if family != "phi3-long"]  # which has its own test
GAMMAS = (1, 2, 3, 5, 8)
SMALL_BUDGET = {"budget": 16, "num_sink": 2, "generate_len": NEW_TOKENS}
Folders = Callable[..., Path]  # of a family's checkpoint, which is made at its first use


@cache
def target_of(folder: Path, attention: type[Attention] | None = None) -> Transformer:
    return load_modules(folder, attention=attention() if attention else None)


@cache
def expected_of(folder: Path) -> list[list[int]]:
    return written(load_reference(folder), prompts(), NEW_TOKENS)


def prompts() -> list[list[int]]:
    return random_prompts(LENGTHS, vocab=VOCABULARY)


def drafter(draft: str, folders: Folders, family: str, target: Transformer) -> Transformer | None:
    """Return the model that a draft needs next to a target of a family."""
    facts = DRAFTS[draft].facts
    if not facts.needs_model:
        return None
    if facts.listens:
        return small_drafter(draft, target, 0.0)
    return target_of(folders(family, seed=1))


def keys_of(draft: str, policy: str, gamma: int, **others: Any) -> dict[str, Any]:
    """Return the settings of a small batch."""
    return SMALL_BUDGET | {"draft_name": draft, "policy": policy, "gamma": gamma} | others
