"""The prefill of rows of different lengths, in chunks of any size."""

import pytest
import torch

from magicdec.cache.full import Full, FullCache
from magicdec.config.choices import CacheSpec
from magicdec.decoding.prefill import prefill
from magicdec.models.kv_cache import KVCache
from tests.small import random_prompts, small_model

MODEL, LENGTHS = small_model(), [1, 30, 17]


def filled(
    prompts: list[list[int]], chunk: int, draft: bool
) -> tuple[KVCache, torch.Tensor, list[int]]:
    """A cache behind a prefill, each row's last hidden state, and the chunks that were reported."""
    longest = max(map(len, prompts))
    lengths = torch.tensor([*map(len, prompts)], dtype=torch.int32)
    chunks = []
    tokens = torch.tensor([prompt + [7] * (longest - len(prompt)) for prompt in prompts])
    size = (MODEL.config, len(prompts), longest + chunk, torch.float32, "cpu")
    cache = FullCache(CacheSpec(Full(), 1, longest), *size) if draft else KVCache(*size)
    return cache, prefill(MODEL, cache, tokens, lengths, longest, chunk, chunks.append), chunks


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("chunk", [1, 8, 30, 64])
@torch.inference_mode()
def test_a_prefill_leaves_each_row_as_it_is_alone(chunk, draft):
    prompts = random_prompts(LENGTHS)
    cache, last_BE, chunks = filled(prompts, chunk, draft)
    assert cache.seqlens_B.tolist() == LENGTHS
    assert sum(chunks) == 30
    assert max(chunks) == min(chunk, 30)
    for row, prompt in enumerate(prompts):
        alone, last_1E, _ = filled([prompt], len(prompt), draft)
        torch.testing.assert_close(last_BE[row], last_1E[0], atol=1e-5, rtol=1e-4)
        for ours, theirs in ((cache.k_LBKSD, alone.k_LBKSD), (cache.v_LBKSD, alone.v_LBKSD)):
            pair = (x[:, index, :, : len(prompt)] for x, index in ((ours, row), (theirs, 0)))
            torch.testing.assert_close(*pair, atol=1e-5, rtol=1e-4)
