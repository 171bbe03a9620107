"""A head that drafts from the target's hidden states: what it proposes, what it keeps, what its
prefill costs.
"""

import copy

import pytest
import torch
from torch import Tensor

from magicdec.config.load import compose
from magicdec.conformance.examine import both_ways
from magicdec.drafts.eagle3 import Eagle3
from magicdec.errors import UserError
from magicdec.models.kv_cache import KVCache
from magicdec.models.taps import Taps
from magicdec.models.transformer import Transformer
from magicdec.planning import build
from magicdec.planning.resolve import resolve
from magicdec.tracking.progress import progress
from magicdec.verification.sampling import Sampling
from tests.small import open_batch, random_prompts, small_head, small_model

LENGTHS = [20, 33, 27]
TARGET = small_model(num_kv_heads=4)


def without_layers() -> Transformer:
    """A target whose layers add nothing: its next token depends on the last one alone."""
    target = copy.deepcopy(TARGET)
    for layer in target.layers:
        layer.output.weight.zero_()
        layer.down.weight.zero_()
    return target


def opened(target: Transformer, head=None, lengths=LENGTHS, **settings):
    settings = {"policy": "full", "gamma": 3, "budget": 24, "num_sink": 2} | settings
    head = head or small_head(target)
    return open_batch(
        target, random_prompts(lengths), draft_name="eagle3", draft_model=head, **settings
    )


@pytest.mark.parametrize("policy", ["full", "streaming", "snapkv", "topk"])
def test_a_head_that_knows_the_target_is_always_right(policy):
    """But for the tokens that it cannot propose, because they are not in its vocabulary."""
    batch = opened(without_layers(), policy=policy)
    ids_V = batch.draft.model.target_ids_V
    passed, _, fast = both_ways(batch)
    assert passed
    for row, accepted_R in zip(fast.tokens, fast.accepted_RB.T, strict=True):
        at = 1
        for accepted in (count for count in accepted_R.tolist() if count >= 0):
            ended = [i for i, token in enumerate(row[at : at + 3]) if token not in ids_V]
            if len(row) - at >= 3:
                assert accepted == (ended[0] if ended else 3)
            at += accepted + 1
    assert fast.accepted_RB.max() == 3


def over_whole_text(batch, tokens_BS: Tensor) -> tuple[KVCache, Tensor]:
    """The head's entries and its outputs, from the target's hidden states of one pass over a
    text.
    """
    target, head, (rows, count) = batch.decoder.target, batch.draft.model, tokens_BS.shape
    taps = Taps(batch.draft.taps.layers)
    entries = KVCache(head.config, rows, count + 1, torch.float32, "cpu")
    target(tokens_BS, KVCache(target.config, rows, count, torch.float32, "cpu"), taps)
    return entries, head(tokens_BS[:, 1:], entries, head.fused(taps.hidden_BTN[:, :-1]))


@pytest.mark.parametrize("chunk", [64, 7])
@pytest.mark.parametrize("sampling", [None, Sampling(1.0, seed=3)])
@torch.inference_mode()
def test_entries_of_committed_tokens_are_exact(chunk, sampling):
    """After rounds in which rows have accepted different numbers of proposals, of prompts prefilled
    in any chunks.
    """
    batch = opened(TARGET, prefill_chunk=chunk, sampling=sampling)
    batch.restart()
    for _ in range(4):
        batch.decoder.cycle_for(batch.draft)()
    state, entries = batch.decoder.state, batch.draft.entries
    assert torch.equal(entries.seqlens_B, state.num_tokens_B - 2)
    assert torch.equal(batch.draft.cache.length_B, entries.seqlens_B)
    known, _ = over_whole_text(batch, state.tokens_BS[:, : int(entries.seqlens_B.max()) + 1])
    for row, count in enumerate(entries.seqlens_B.tolist()):
        for ours, theirs in ((entries.k_LBKSD, known.k_LBKSD), (entries.v_LBKSD, known.v_LBKSD)):
            torch.testing.assert_close(
                ours[:, row, :, :count], theirs[:, row, :, :count], rtol=1e-4, atol=1e-4
            )


@torch.inference_mode()
def test_proposals_are_those_of_the_head_over_the_whole_text():
    """Steps over the cache against one pass over all tokens, without a cache that rounds have
    written to.
    """
    batch = opened(TARGET, gamma=2)
    batch.restart()
    for _ in range(3):
        batch.decoder.cycle_for(batch.draft)()
    state, head = batch.decoder.state, batch.draft.model
    proposed_BG = batch.draft.propose(state, 2).tokens_BG
    for row, count in enumerate(state.num_tokens_B.tolist()):
        entries, output = over_whole_text(batch, state.tokens_BS[row : row + 1, :count])
        first = head.target_ids_V[head.logits(output[:, -1:]).argmax(-1)]
        second = head.target_ids_V[head.logits(head(first, entries, output[:, -1:])).argmax(-1)]
        assert proposed_BG[row].tolist() == [int(first), int(second)]


def test_the_prefill_of_the_head_counts_towards_the_speculative_one():
    batch = opened(TARGET)
    fast, plain = batch.decoder.generate(batch.draft), batch.decoder.generate()
    assert batch.draft.heard_seconds > 0
    assert fast.setup_seconds > batch.draft.heard_seconds
    assert plain.setup_seconds == 0


def test_its_memory_is_that_of_all_entries_and_of_the_selected_ones():
    batch = opened(TARGET, policy="streaming", generate_len=24)
    per_slot = 2 * TARGET.config.num_kv_heads * TARGET.config.head_dim * 4
    num_slots = (max(LENGTHS) + 24 + 4) + (24 + 4)
    # The target's states of the prompt's last two tokens, and a place for those of all others.
    states = 3 * TARGET.config.hidden_size * 4
    assert batch.draft.cache_bytes == 3 * (num_slots * per_slot + states)


def test_a_head_of_another_target_is_refused():
    model = small_head(small_model(hidden_size=64)).config
    with pytest.raises(
        UserError, match="made for another target: a hidden size of 64 against the target's 32"
    ):
        model.check(TARGET.config)
    Eagle3().check(TARGET.config)


def test_the_tokens_of_a_random_head_are_the_targets_first():
    """They are not left as memory happens to be."""
    keys = [
        "hardware=cpu",
        "draft=eagle3",
        "draft.model.weights=random",
        "draft.synthetic_acceptance=0.7",
    ]
    with progress() as bars:
        head = build.engine(resolve(compose(keys)), bars).draft_model
    assert torch.equal(head.target_ids_V, torch.arange(head.config.draft_vocab_size))
