"""A tentative pass of a dynamic policy against attention written out: which token selects, and what
is read.
"""

import math
from contextlib import nullcontext

import pytest
import torch

from magicdec.attention.sdpa import SdpaAttention
from magicdec.cache.topk import TopK, TopKCache
from magicdec.config.choices import CacheSpec
from magicdec.models.kv_cache import KVCache
from tests.cache.test_dynamic import B, D, H, K, random_target


def attended(
    target: KVCache, q_THD: torch.Tensor, row: int, selecting: int, budget: int, window: int | None
) -> torch.Tensor:
    """Attention (T, H, D) in the second layer: the first `selecting` new tokens choose the
    committed entries that all of them read, next to the new ones.
    """
    length, out = int(target.seqlens_B[row]), []
    for head in range(K):
        keys, values = target.k_LBKSD[1, row, head], target.v_LBKSD[1, row, head]
        scores_TJS = q_THD.view(len(q_THD), K, -1, D)[:, head] @ keys.T / D**0.5
        for t, scores_JS in enumerate(scores_TJS):
            scores_JS[:, length + t + 1 :] = -math.inf
            if window is not None:
                scores_JS[:, : max(0, length + t + 1 - window)] = -math.inf
        mass_S = scores_TJS[:selecting].softmax(-1).sum((0, 1))
        chosen = mass_S[:length].topk(min(budget, length)).indices
        slots = [*chosen.tolist(), *range(length, length + len(q_THD))]
        out.append(scores_TJS[..., slots].softmax(-1) @ values[slots])
    return torch.cat(out, dim=1)


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("seed", range(3))
def test_a_tentative_pass_selects_by_its_first_token_and_any_other_by_all(seed, window):
    """Passes of a whole round, one of them behind the longest sequence."""
    generator, gamma, budget = torch.Generator().manual_seed(seed), 3, 6
    target = random_target([40, 11], generator, window, 40 + gamma + 1)
    spec = CacheSpec(TopK(budget=budget), gamma, 40)
    cache = TopKCache.build(spec, target.config, B, torch.float32, "cpu", target)
    cache.load(target)
    q, attention = torch.randn(B, gamma + 1, H, D, generator=generator), SdpaAttention()
    outputs = []
    for is_tentative in (False, True, False):
        with cache.tentative() if is_tentative else nullcontext():
            plan = cache.plan(attention, gamma + 1, torch.float32)[1]
            outputs.append(cache.attend(1, q, attention, plan))
        selecting = 1 if is_tentative else gamma + 1
        for row in range(B):
            expected = attended(target, q[row], row, selecting, budget, window)
            torch.testing.assert_close(outputs[-1][row], expected)
    assert not torch.allclose(*outputs[:2])
