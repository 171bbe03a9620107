"""Families that run as transformers' modules over our caches, against transformers' own `generate`,
token for token in fp32.
"""

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from magicdec.attention.base import Attention
from magicdec.config.registry import DRAFTS, POLICIES
from magicdec.conformance import both_ways, small_head
from magicdec.models.transformer import Transformer
from tests.checkpoints import MODULES, load_modules, load_reference, make_checkpoint, written
from tests.small import open_batch, random_prompts

LENGTHS, NEW_TOKENS, VOCABULARY = [37, 9, 50], 12, 96
PAIRS = [
    (draft, policy)
    for draft in DRAFTS
    for policy in POLICIES
    if (DRAFTS[draft].facts.is_model or policy == "full")
    and not (POLICIES[policy].facts.needs_target and not DRAFTS[draft].facts.shares_target)
]
GAMMAS = (1, 2, 3, 5, 8)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that makes a family's checkpoint at its first use."""

    @cache
    def folder(family: str, seed: int = 0) -> Path:
        path = tmp_path_factory.mktemp(family)
        return make_checkpoint(path, family, seed=seed, eos_token_id=None)

    return folder


@cache
def target_of(folder: Path, attention: type[Attention] | None = None) -> Transformer:
    return load_modules(folder, attention=attention() if attention else None)


@cache
def expected_of(folder: Path) -> list[list[int]]:
    return written(load_reference(folder), prompts(), NEW_TOKENS)


def prompts() -> list[list[int]]:
    return random_prompts(LENGTHS, vocab=VOCABULARY)


def drafter(draft: str, folders: Any, family: str, target: Transformer) -> Transformer | None:
    facts = DRAFTS[draft].facts
    if not facts.needs_model:
        return None
    return small_head(target) if facts.listens else target_of(folders(family, seed=1))


@pytest.mark.parametrize("family", MODULES)
def test_autoregressive_tokens_are_those_of_generate(family, folders):
    folder = folders(family)
    batch = open_batch(target_of(folder), prompts(), generate_len=NEW_TOKENS)
    assert batch.decoder.generate().tokens == expected_of(folder)


@pytest.mark.parametrize(
    ("family", "draft", "policy", "gamma"),
    [
        (family, draft, policy, gamma)
        for (draft, policy), family, gamma in zip(
            PAIRS, itertools.cycle(MODULES), itertools.cycle(GAMMAS), strict=False
        )
    ],
)
def test_every_draft_and_policy_writes_the_same_tokens(family, draft, policy, gamma, folders):
    target = target_of(folders(family))
    keys = {
        "gamma": gamma,
        "policy": policy,
        "budget": 16,
        "num_sink": 2,
        "generate_len": NEW_TOKENS,
    }
    model = drafter(draft, folders, family, target)
    batch = open_batch(target, prompts(), draft_name=draft, draft_model=model, **keys)
    passed, plain, fast = both_ways(batch)
    assert passed
    assert plain.tokens == fast.tokens == expected_of(folders(family))
