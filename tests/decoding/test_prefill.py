"""The prefill of rows of different lengths, in chunks of any size."""

import pytest
import torch

from magicdec.cache.full import Full, FullCache
from magicdec.config.choices import CacheSpec
from magicdec.decoding.prefill import prefill, simulate
from magicdec.models.kv_cache import KVCache
from magicdec.models.taps import Taps
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


class Counting:
    """The model, which notes how many tokens of each pass the rows have."""

    attention = MODEL.attention

    def __init__(self):
        self.counts = []

    def __call__(self, tokens_BT, cache, taps):
        self.counts.append(cache.count_B.tolist())
        return MODEL(tokens_BT, cache, taps)


@torch.inference_mode()
def test_each_chunk_says_which_tokens_are_padding_and_is_heard_at_once():
    model, taps, heard = Counting(), Taps((1,)), []
    tokens = torch.tensor([prompt + [7] * (30 - len(prompt)) for prompt in random_prompts(LENGTHS)])
    cache = KVCache(MODEL.config, 3, 30, torch.float32, "cpu")
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)

    def hear(start: int) -> None:
        heard.append((start, taps.hidden_BTN.shape[1], cache.count_B))

    prefill(model, cache, tokens, lengths, 30, 8, taps=taps, hear=hear)
    assert model.counts == [[1, 8, 8], [0, 8, 8], [0, 8, 1], [0, 6, 0]]
    assert heard == [(0, 8, None), (8, 8, None), (16, 8, None), (24, 6, None)]


@pytest.mark.parametrize("num_queries", [0, 4])
def test_a_simulated_prefill_leaves_noise(num_queries):
    """And queries, if the cache was asked to keep some: those of each row's last tokens."""
    cache = KVCache(MODEL.config, 2, 20, torch.float32, "cpu")
    cache.keep_queries(num_queries)
    simulate(MODEL, cache, torch.tensor([9, 2], dtype=torch.int32))
    tensors = [cache.k_LBKSD, cache.v_LBKSD]
    if num_queries:
        assert cache.last_queries.first_B1.tolist() == [[5], [0]]
        tensors.append(cache.last_queries.q_LBWHD)
    else:
        assert cache.last_queries is None
    for noise in tensors:
        assert (noise != 0).all()
        assert float(noise.std()) == pytest.approx(1, abs=0.2)
