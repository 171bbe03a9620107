"""What drafts over a target's hidden states keep of a prefill: entries, scores, states, times."""

from itertools import count

import pytest
import torch
from torch import Tensor

from magicdec.attention.sdpa import SdpaAttention
from magicdec.decoding import timers
from magicdec.models.kv_cache import KVCache
from magicdec.models.taps import Taps
from tests.small import drafting, open_batch, random_prompts, small_model, small_modules

TARGET = small_model(num_kv_heads=4)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
LENGTHS = [20, 1, 33, 4]


class Recorder(KVCache):
    """A cache that notes the attention from the tokens that count (L, K, S). Nothing is written to
    a full one.
    """

    is_full = False

    def place(self, layer, slots_BT):
        return None if self.is_full else super().place(layer, slots_BT)

    def attend(self, layer, q_BTHD, attention, plan):
        entries = self.k_LBKSD[layer], self.v_LBKSD[layer]
        out, scores_BKS = attention.attend_scored(q_BTHD, *entries, plan, self.counted_BT)
        self.scores_LKS[layer] = scores_BKS[0]
        return out


def scores_of(batch, prompt: list[int], last: int) -> Tensor:
    """Return the attention (L, K, S) from a prompt's last places to all, in one pass over them."""
    target, model, tokens = batch.decoder.target, batch.draft.model, torch.tensor([prompt])
    num_modules, taps = batch.draft.num_modules, Taps(batch.draft.taps.layers)
    target(tokens, KVCache(target.config, 1, len(prompt), torch.float32, "cpu"), taps)
    size = len(prompt) - num_modules
    hidden = model.fused(taps.hidden_BTN)[:, :size]
    cache = Recorder(model.config, 1, size, torch.float32, "cpu")
    cache.counted_BT = torch.arange(size)[None] >= size - last
    cache.scores_LKS = torch.zeros(model.config.num_layers, model.config.num_kv_heads, size)
    if num_modules == 0:  # a draft of blocks: entries need no tokens, and each token asks for them
        model.enter(tokens, cache, hidden)
        cache.is_full = True
        model(tokens, cache, is_block=False)
    for module in range(num_modules):
        hidden = model(tokens[:, module + 1 : module + 1 + size], cache, hidden, module)
    return cache.scores_LKS


@pytest.mark.parametrize(("policy", "last"), [("snapkv", 6), ("h2o", 1000)])
@pytest.mark.parametrize("draft", ["eagle3", "mtp", "dflash"])
@torch.inference_mode()
def test_a_prompt_is_scored_as_in_one_pass_over_it(draft, policy, last, monkeypatch):
    """Each row by the last places of its own, or by all of a shorter one, of prompts that were read
    in chunks of 7, and scored 5 tokens at a time.
    """
    settings = {"policy": policy, "budget": 16, "observation_window": last, "prefill_chunk": 7}
    batch, loaded = drafting(draft, TARGET, LENGTHS, gamma=3, **settings), []
    monkeypatch.setattr(SdpaAttention, "scored_tokens", lambda *_: 5)
    monkeypatch.setattr(batch.draft.cache, "load", lambda source, scores: loaded.append(scores))
    batch.restart()
    (scores_LBKS,) = loaded
    for row, prompt in enumerate(random_prompts(LENGTHS)):
        size = len(prompt) - batch.draft.num_modules
        if size > 0:
            expected = scores_of(batch, prompt, last)
            torch.testing.assert_close(scores_LBKS[:, row, :, :size], expected, **CLOSE)
            assert (scores_LBKS[:, row, :, size:] == 0).all()


@pytest.mark.parametrize(("modules", "gamma"), [(1, 3), (3, 3), (3, 2)])
@torch.inference_mode()
def test_a_prefill_keeps_the_states_of_each_prompts_last_tokens(modules, gamma):
    """In front of a shorter prompt are zeros, whatever an earlier prefill has left there. A round
    uses no more modules than it proposes tokens.
    """
    model, used, lengths = small_modules(TARGET, modules), min(modules, gamma), [1, 2, 40, 3]
    settings = {"policy": "snapkv", "budget": 16, "observation_window": 6, "gamma": gamma}
    prompts = random_prompts(lengths)
    batch = open_batch(TARGET, prompts, draft_name="mtp", draft_model=model, **settings)
    draft, kept = batch.draft, 6 + used
    assert draft.num_modules == draft.refed == used
    assert draft.heard_BWE.shape == (4, kept + 1, TARGET.config.hidden_size)
    draft.heard_BWE.fill_(100.0)
    batch.decoder.prefill(16)
    batch.restart()
    assert draft.entries.seqlens_B.tolist() == [max(0, length - used) for length in lengths]
    assert torch.equal(draft.cache.length_B, draft.entries.seqlens_B)
    for row, prompt in enumerate(prompts):
        taps, known = Taps(draft.taps.layers), min(kept, len(prompt))
        cache = KVCache(TARGET.config, 1, len(prompt), torch.float32, "cpu")
        TARGET(torch.tensor([prompt]), cache, taps)
        expected_WE = torch.zeros(kept, TARGET.config.hidden_size)
        expected_WE[kept - known :] = taps.hidden_BTN[0, len(prompt) - known :]
        torch.testing.assert_close(draft.heard_BWE[row, :kept], expected_WE, **CLOSE)
        torch.testing.assert_close(draft.last_BKE[row], expected_WE[kept - used :], **CLOSE)


def test_the_time_of_hearing_is_that_of_all_chunks_of_the_last_prefill(monkeypatch):
    """And no part of the target's. Between two readings of the clock it is half a second."""
    batch = drafting("eagle3", TARGET, [20, 3], gamma=3, policy="full", prefill_chunk=7)
    monkeypatch.setattr(timers.time, "perf_counter", count(10.0, 0.5).__next__)
    seconds = [(batch.decoder.prefill(7), batch.draft.heard_seconds) for _ in range(2)]
    monkeypatch.undo()
    assert seconds == [(2.0, 1.5)] * 2


@pytest.mark.parametrize("draft", ["eagle3", "mtp", "dflash"])
def test_a_simulated_prefill_leaves_entries_as_a_prefill_does(draft):
    lengths = []
    for is_simulated in (False, True):
        batch = drafting(draft, TARGET, [20, 1, 33], gamma=3, policy="streaming", budget=16)
        batch.draft.entries.k_LBKSD.zero_()
        if is_simulated:
            batch.simulate_prefill()
        else:
            batch.decoder.prefill(16)
        batch.restart()
        lengths.append(
            (batch.draft.entries.seqlens_B.tolist(), batch.draft.cache.length_B.tolist())
        )
        valid_BS = torch.arange(16) < batch.draft.cache.committed_slots_B[:, None]
        size_LBKS = batch.draft.cache.k_LBKSD[..., :16, :].abs().sum(-1)
        assert (size_LBKS.movedim(-1, 2)[:, valid_BS] > 0).all()
    assert lengths[0] == lengths[1]
