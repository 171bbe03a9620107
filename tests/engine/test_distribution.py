"""Sampling end to end: which random number each token is drawn with, and the distribution of what
is written.
"""

import functools
from collections import Counter

import pytest
import torch

from magicdec.config.registry import DRAFTS
from magicdec.models.kv_cache import KVCache
from magicdec.models.states_model import StatesModel
from magicdec.models.transformer import Transformer
from magicdec.verification.sampling import Sampling, Use, uniform_BT
from tests.chi_square import chisquare
from tests.small import (
    VOCAB,
    as_on_cpus,
    noisy_copy,
    open_batch,
    random_prompts,
    small_drafter,
    small_model,
)

V, ROWS, LENGTH = 5, 3000, 3  # sequences of so many tokens are counted
TARGET = as_on_cpus(small_model(vocab_size=V, spread=0.4))
PROMPT = tuple(random_prompts([9], vocab=V)[0])


@pytest.mark.parametrize(("draft", "gamma"), [("none", 0), ("self", 1), ("self", 3)])
def test_every_token_has_a_random_number_of_its_own(draft, gamma):
    """The distribution is flat, so that a number names its token. All proposals are accepted before
    the bonus token. Those of two rounds share no number, whatever their positions.
    """
    target = as_on_cpus(small_model(tie_word_embeddings=False))
    target.head.weight.data.zero_()
    prompts, sampling = random_prompts([7, 12]), Sampling(temperature=1.0, seed=3)
    batch = open_batch(
        target, prompts, draft_name=draft, gamma=gamma, policy="full", sampling=sampling
    )
    rows = batch.decoder.generate(batch.draft).tokens
    for at in range(24):
        begin = at - (at - 1) % (gamma + 1)  # of the round; the prefill decides the first token
        proposed = 0 < at < begin + gamma
        use = Use.PROPOSE if proposed else Use.DECIDE
        places = [
            (len(prompt) + begin << 32) + at - begin if proposed else len(prompt) + at
            for prompt in prompts
        ]
        expected_B = (uniform_BT(sampling, torch.tensor(places)[:, None], use)[:, 0] * VOCAB).long()
        assert [row[at] for row in rows] == expected_B.tolist()


def probabilities(
    model: Transformer, tokens: list[list[int]], sampling: Sampling
) -> list[list[float]]:
    """Return the distribution of each row's next token, by sorting in plain Python."""
    cache = KVCache(model.config, len(tokens), len(tokens[0]), torch.float32, "cpu")
    logits = model.logits(model(torch.tensor(tokens), cache)[:, -1])[..., :V] / sampling.temperature
    found = []
    for row in logits.double().softmax(-1).tolist():
        order = sorted(range(V), key=lambda token: -row[token])[: sampling.top_k]
        kept = [0.0] * V
        for token in order:
            if sum(kept) < (sampling.top_p or 2) * sum(row[t] for t in order):
                kept[token] = row[token]
        found.append([p / sum(kept) for p in kept])
    return found


@functools.cache
@torch.inference_mode()
def expected(
    sampling: Sampling,
    target: Transformer = TARGET,
    prompt: tuple[int, ...] = PROMPT,
    length: int = LENGTH,
) -> dict[tuple[int, ...], float]:
    """Return the probability of every sequence of `length` tokens behind the prompt."""
    known = {(): 1.0}
    for _ in range(length):
        rows = probabilities(target, [[*prompt, *before] for before in known], sampling)
        pairs = zip(known.items(), rows, strict=True)
        known = {(*before, t): q * p for (before, q), row in pairs for t, p in enumerate(row) if p}
    return known


@pytest.mark.parametrize(
    "sampling", [Sampling(1.0, seed=1), Sampling(1.4, 4, 0.85, seed=2)], ids=["plain", "truncated"]
)
@pytest.mark.parametrize(
    ("draft", "vocab"),
    [*((name, V) for name in ("none", *DRAFTS)), ("model", V - 1), ("model", V + 3)],
)
def test_what_is_written_has_the_targets_distribution(draft, vocab, sampling):
    """Count the tokens of 3,000 rows with one prompt. The draft's vocabulary may be padded to
    another size.
    """
    model = small_drafter(draft, TARGET, 0.0)
    if isinstance(model, Transformer) and not isinstance(model, StatesModel):
        model = as_on_cpus(small_model(1, vocab_size=vocab, spread=0.4))
    settings = {
        "policy": "streaming",
        "budget": 8,
        "num_sink": 2,
        "gamma": 2,
        "generate_len": LENGTH,
    }
    batch = open_batch(
        TARGET,
        [[*PROMPT]] * ROWS,
        draft_name=draft,
        draft_model=model,
        sampling=sampling,
        **settings,
    )
    assert p_value(batch.decoder.generate(batch.draft).tokens, expected(sampling)) > 1e-3


def p_value(rows: list[list[int]], known: dict[tuple[int, ...], float]) -> float:
    """Return chi-square's probability of these rows, rare sequences taken together."""
    written = Counter(map(tuple, rows))
    assert set(written) <= set(known)
    likely = [sequence for sequence, p in known.items() if p * len(rows) >= 8]
    counts = [written[sequence] for sequence in likely]
    shares = [known[sequence] * len(rows) for sequence in likely]
    counts, shares = (
        torch.tensor([*counts, len(rows) - sum(counts)]),
        torch.tensor([*shares, len(rows) - sum(shares)]),
    )
    return chisquare(counts, shares.clamp(min=1e-9))


@pytest.mark.parametrize(
    ("draft", "policy", "budget", "seed", "spread"),
    [
        ("hierarchical", "topk", 4, 2, 0.7),
        ("hierarchical", "quest", 4, 3, 0.4),
        ("self", "verify_guided", 5, 0, 0.7),
    ],
)
def test_what_a_policy_selects_for_proposals_leaves_the_distribution_as_it_is(
    draft, policy, budget, seed, spread
):
    """Count four tokens of 2,000 rows. Where an inner verification selects by all of its tokens,
    or a round draws with the random numbers of rejected proposals, the probability is below 1e-8.
    """
    target, sampling = as_on_cpus(small_model(seed, spread, vocab_size=V)), Sampling(1.0, seed=1)
    prompt = random_prompts([20], seed, vocab=V)[0]
    settings = {"policy": policy, "budget": budget, "page_size": 2, "gamma": 3, "generate_len": 4}
    model = noisy_copy(target, 0.3) if draft == "hierarchical" else None
    settings |= {"draft_model": model, "sampling": sampling}
    batch = open_batch(target, [prompt] * 2000, draft_name=draft, **settings)
    known = expected(sampling, target, tuple(prompt), 4)
    assert p_value(batch.decoder.generate(batch.draft).tokens, known) > 1e-3
