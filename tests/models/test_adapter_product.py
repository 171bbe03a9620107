"""All families that run as transformers' modules with all drafts and cache policies, against
transformers' own `generate`, token for token in fp32.
"""

import itertools
import os

import pytest

from magicdec.config.groups import SamplingConfig
from magicdec.config.registry import DRAFTS
from magicdec.conformance.examine import both_ways
from magicdec.engine.output_audit import audit
from tests.models.adapter_cases import (
    FAMILIES,
    GAMMAS,
    drafter,
    expected_of,
    keys_of,
    prompts,
    target_of,
)
from tests.small import CROSS, PAIRS, open_batch

ALL_POLICIES = os.environ.get("MAGICDEC_TEST_ALL_POLICIES") == "1"
# Each draft and each policy on some family, and each family with some of both.
ONE_FAMILY_EACH = list(zip(CROSS, itertools.cycle(FAMILIES), itertools.cycle(GAMMAS), strict=False))


def check(family: str, draft: str, policy: str, gamma: int, folders) -> None:
    target = target_of(folders(family))
    model = drafter(draft, folders, family, target)
    batch = open_batch(target, prompts(), draft_model=model, **keys_of(draft, policy, gamma))
    fast, expected = batch.decoder.generate(batch.draft), expected_of(folders(family))
    assert fast.tokens == expected, (family, draft, policy, gamma)
    assert audit(batch.decoder, expected, fast.tokens).passed is True, (family, draft, policy)


@pytest.mark.parametrize(("pair", "family", "gamma"), ONE_FAMILY_EACH)
def test_every_draft_and_policy_writes_the_same_tokens(pair, family, gamma, folders):
    check(family, *pair, gamma, folders)


def test_a_block_of_one_token_has_one_step_to_score(folders):
    check(FAMILIES[0], "dflash", "h2o", 1, folders)


@pytest.mark.slow
@pytest.mark.parametrize("draft", list(DRAFTS))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_with_every_draft_writes_the_same_tokens(family, draft, folders):
    """Over two policies that change from family to family, or over all with
    MAGICDEC_TEST_ALL_POLICIES=1 (quarters of an hour).
    """
    policies = [policy for name, policy in PAIRS if name == draft]
    first = 2 * FAMILIES.index(family)
    numbers = range(first, first + (len(policies) if ALL_POLICIES else 2))
    for number in numbers:
        policy, gamma = policies[number % len(policies)], GAMMAS[number % len(GAMMAS)]
        check(family, draft, policy, gamma, folders)


@pytest.mark.soak
@pytest.mark.parametrize("draft", list(DRAFTS))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_with_every_draft_samples_from_the_target(family, draft, folders):
    """By its last policy in the list; each sampled token is the target's own, drawn again."""
    target = target_of(folders(family))
    policy = [policy for name, policy in PAIRS if name == draft][-1]
    keys = keys_of(draft, policy, 3, draft_model=drafter(draft, folders, family, target))
    batch = open_batch(target, prompts(), sampling=SamplingConfig(temperature=0.8), **keys)
    assert both_ways(batch)[0]
