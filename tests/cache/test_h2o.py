"""H2O's scores from the draft's own steps, against a softmax written out."""

import pytest
import torch

from magicdec.attention.sdpa import SdpaAttention
from magicdec.cache.h2o import H2O, H2OCache
from magicdec.config.choices import CacheSpec
from tests.cache.test_scored import CONFIG, B, K, L, filled

H, D, GAMMA = 4, 2, 3


def received(q_HD: torch.Tensor, k_KSD: torch.Tensor) -> torch.Tensor:
    """Return the attention (K, S) of one token's query heads, summed over those of a KV head."""
    return torch.stack(
        [
            sum((k_SD @ q_D / D**0.5).softmax(0) for q_D in q_JD)
            for q_JD, k_SD in zip(q_HD.view(K, -1, D), k_KSD, strict=True)
        ]
    )


@pytest.mark.parametrize("counted", ["after", "before", "around"])
def test_the_last_token_of_each_committed_step_adds_its_attention(counted):
    """The first step feeds two tokens. Tokens are counted after the layers, before them, or both,
    as those of a block are.
    """
    generator = torch.Generator().manual_seed(7)
    lengths, target, attention = [14, 9], filled([14, 9]), SdpaAttention()
    target.k_LBKSD.normal_(generator=generator)
    spec = CacheSpec(H2O(budget=30), GAMMA, 58)
    cache = H2OCache.build(spec, CONFIG, B, torch.float32, "cpu", None)
    expected = torch.rand(L, B, K, cache.capacity, generator=generator)
    cache.load(target, expected)
    for row, length in enumerate(lengths):
        expected[:, row, :, length:] = 0.0
    for counts in ([2, 0], [4, 1], [3, 2]):
        steps = []
        for num_new in (2, 1, 1):
            steps.append(torch.zeros(L, B, K, cache.capacity))
            slots_BT = cache.slots_BT(num_new)
            plans = cache.plan(attention, num_new, torch.float32)
            if counted != "after":
                cache.advance(num_new if counted == "before" else 1)
            for layer in range(L):
                new = torch.randn(B, num_new, K, D, generator=generator)
                cache.place(layer, slots_BT).write(new, new)
                q = torch.randn(B, num_new, H, D, generator=generator)
                cache.attend(layer, q, attention, plans[layer])
                for row, end in enumerate((slots_BT[:, -1] + 1).tolist()):
                    k_KSD = cache.k_LBKSD[layer, row, :, :end]
                    steps[-1][layer, row, :, :end] = received(q[row, -1], k_KSD)
            if counted != "before":
                cache.advance(num_new if counted == "after" else num_new - 1)
        cache.take(cache, cache.committed_slots_B, torch.tensor(counts, dtype=torch.int32), 4)
        for row, count in enumerate(counts):
            lengths[row] += count
            expected[:, row] += sum(step[:, row] for step in steps[:count])
            expected[:, row, :, lengths[row] :] = 0.0
        assert cache.length_B.tolist() == lengths
        torch.testing.assert_close(cache.scores_LBKC, expected)
