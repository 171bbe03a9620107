"""The distribution that sampling draws from, slowly, by its definition; and logits that are hard to
cut.
"""

import torch

from magicdec.verification.sampling import Sampling


def sorted_probabilities(logits, sampling):
    """Return a row's distribution (V,), and how far the nearest decision of top-p was from another
    one.
    """
    logits = logits.float() / sampling.temperature
    tokens = range(len(logits))
    if sampling.top_k is not None:
        least = sorted(logits.tolist(), reverse=True)[min(sampling.top_k, len(logits)) - 1]
        logits = torch.where(logits >= least, logits, float("-inf"))
    p, margin = logits.softmax(-1).tolist(), 1.0
    if sampling.top_p is not None and sampling.top_p < 1.0:
        mass, kept = 0.0, set()
        for token in sorted(tokens, key=lambda token: (-p[token], token)):
            margin = min(margin, abs(mass - sampling.top_p))
            if mass < sampling.top_p:
                kept.add(token)
            mass += p[token]
        p = [p[token] if token in kept else 0.0 for token in tokens]
    return torch.tensor(p, dtype=torch.float64) / sum(p), margin


def hard_logits(vocab):
    """Return rows (N, V): random, flat, peaked, rounded to many ties, powers of two, and with
    tokens ruled out.
    """
    generator = torch.Generator().manual_seed(vocab)
    normal = torch.randn(vocab, generator=generator)
    halves = -torch.arange(vocab).clamp(max=20) * torch.tensor(2.0).log()
    ruled_out = normal.clone().masked_fill(torch.arange(vocab) % 3 == 0, float("-inf"))
    rows = [
        normal,
        normal * 8,
        torch.zeros(vocab),
        normal.round(),
        normal.bfloat16().float() * 3,
        halves,
        ruled_out,
    ]
    return torch.stack(
        [*rows, torch.where(torch.arange(vocab) < vocab // 2, 1.0, -1e4), -normal.abs() - 50]
    )


SETTINGS = [
    *(Sampling(0.8, top_p=p) for p in (0.95, 0.5, 1e-30)),
    *(Sampling(1.0, top_k=k) for k in (1, 4, 5000)),
    *(Sampling(1.0, 4, p) for p in (0.5, 0.75)),
    Sampling(0.6, 50, 0.9),
    Sampling(1.3, top_p=1.0),
]


def check(
    distribution, vocab, settings=SETTINGS, rows=slice(None), tolerance=1e-6, dtype=torch.float32
):
    """Compare `distribution(logits_NV, sampling)` with the slow one: the same tokens, the same
    probabilities.
    """
    logits = hard_logits(vocab)[rows].to(dtype)
    for sampling in settings:
        found = distribution(logits, sampling)
        for row, ours in zip(logits, found, strict=True):
            right, margin = sorted_probabilities(row, sampling)
            if margin > 1e-5:  # else the order of a sum decides
                assert torch.equal(ours > 0, right.float() > 0), (sampling, row)
                torch.testing.assert_close(ours.double(), right, atol=tolerance, rtol=1e-5)
