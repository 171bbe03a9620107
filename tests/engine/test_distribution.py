"""Sampling end to end: which random number each token is drawn with, and the distribution of what
is written.
"""

import functools
import itertools
from collections import Counter

import pytest
import torch

from magicdec.config.registry import DRAFTS
from magicdec.models.kv_cache import KVCache
from magicdec.models.states_model import StatesModel
from magicdec.models.transformer import Transformer
from magicdec.verification.sampling import Sampling, Use, uniform_BT
from tests.chi_square import chisquare
from tests.small import VOCAB, open_batch, random_prompts, small_drafter, small_model

V, ROWS, LENGTH = 5, 3000, 3  # sequences of so many tokens are counted
TARGET = small_model(vocab_size=V, spread=0.4)
PROMPT = random_prompts([9], vocab=V)[0]


@pytest.mark.parametrize(("draft", "gamma"), [("none", 0), ("self", 1), ("self", 3)])
def test_every_token_has_a_random_number_of_its_own(draft, gamma):
    """The distribution is flat, so that a number names its token. All proposals are accepted before
    the bonus token.
    """
    target = small_model(tie_word_embeddings=False)
    target.head.weight.data.zero_()
    prompts, sampling = random_prompts([7, 12]), Sampling(temperature=1.0, seed=3)
    batch = open_batch(
        target, prompts, draft_name=draft, gamma=gamma, policy="full", sampling=sampling
    )
    rows = batch.decoder.generate(batch.draft).tokens
    uses = itertools.chain([Use.DECIDE], itertools.cycle([*[Use.PROPOSE] * gamma, Use.DECIDE]))
    for at, use in zip(range(24), uses, strict=False):
        positions_B1 = torch.tensor([[len(prompt) + at] for prompt in prompts])
        expected_B = (uniform_BT(sampling, positions_B1, use)[:, 0] * VOCAB).long()
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
def expected(sampling: Sampling) -> dict[tuple[int, ...], float]:
    """Return the probability of every sequence of LENGTH tokens behind the prompt."""
    known = {(): 1.0}
    for _ in range(LENGTH):
        rows = probabilities(TARGET, [PROMPT + list(before) for before in known], sampling)
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
        model = small_model(1, vocab_size=vocab, spread=0.4)
    settings = {
        "policy": "streaming",
        "budget": 8,
        "num_sink": 2,
        "gamma": 2,
        "generate_len": LENGTH,
    }
    batch = open_batch(
        TARGET, [PROMPT] * ROWS, draft_name=draft, draft_model=model, sampling=sampling, **settings
    )
    written = Counter(map(tuple, batch.decoder.generate(batch.draft).tokens))
    known = expected(sampling)
    assert set(written) <= set(known)
    likely = [sequence for sequence, p in known.items() if p * ROWS >= 8]
    counts = [written[sequence] for sequence in likely]
    shares = [known[sequence] * ROWS for sequence in likely]
    counts, shares = (
        torch.tensor([*counts, ROWS - sum(counts)]),
        torch.tensor([*shares, ROWS - sum(shares)]),
    )
    assert chisquare(counts, shares.clamp(min=1e-9)) > 1e-3
