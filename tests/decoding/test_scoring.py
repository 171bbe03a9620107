"""Scores by the queries that a prefill has kept, against those of the same tokens run again."""

import pytest
import torch

from magicdec.attention.sdpa import SdpaAttention
from magicdec.decoding.prefill import prefill
from magicdec.decoding.scoring import score, score_by_queries
from magicdec.errors import UserError
from magicdec.kernels.library import compiler
from magicdec.models.kv_cache import KVCache
from magicdec.models.last_queries import MOST_KEPT
from tests.small import drafting, random_prompts, small_model

LENGTHS = [1, 30, 17, 9]
LONGEST = max(LENGTHS)
CLOSE = {"atol": 1e-5, "rtol": 1e-4}


def tokens_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([p + [7] * (LONGEST - len(p)) for p in random_prompts(lengths)])


@pytest.mark.parametrize("sizes", [{}, {"sliding_window": 5, "sliding_layers": (1,)}])
@pytest.mark.parametrize("last", [1, 6, 12, 40])
@pytest.mark.parametrize("chunk", [1, 8, 30, 64])
@torch.inference_mode()
def test_scores_by_kept_queries_are_those_of_running_the_model_again(chunk, last, sizes):
    """Chunks end within the tokens that are kept, rows are shorter than these, and more are kept
    than score.
    """
    model, tokens_BS = small_model(**sizes), tokens_of(LENGTHS)
    cache = KVCache(model.config, len(LENGTHS), LONGEST + chunk, torch.float32, "cpu")
    cache.keep_queries(last)
    cache.keep_queries(9)
    prefill(model, cache, tokens_BS, torch.tensor(LENGTHS, dtype=torch.int32), LONGEST, chunk)
    assert cache.last_queries.num_tokens == max(9, last)
    ours = score_by_queries(cache.last_queries, cache, LONGEST, last)
    right = score(
        model, cache, lambda index, view: model(tokens_BS.gather(1, index), view), LONGEST, last
    )
    torch.testing.assert_close(ours, right, **CLOSE)
    total = ours.sum(-1) / model.config.group_size
    assert torch.allclose(total, torch.tensor(LENGTHS).clamp(max=last).float()[:, None], atol=1e-3)


@torch.inference_mode()
def test_only_a_prefill_changes_what_is_kept():
    model, tokens_BS = small_model(), tokens_of(LENGTHS)
    cache = KVCache(model.config, len(LENGTHS), LONGEST + 8, torch.float32, "cpu")
    cache.keep_queries(4)
    prefill(model, cache, tokens_BS, torch.tensor(LENGTHS, dtype=torch.int32), LONGEST, 8)
    before = cache.last_queries.q_LBWHD.clone()
    model(tokens_BS[:, :3], cache)
    assert torch.equal(cache.last_queries.q_LBWHD, before)
    cache.keep_queries(MOST_KEPT + 1)
    assert not cache.lacks_queries, "so many would take as much memory as entries"
    cache.keep_queries(5)
    assert cache.lacks_queries


@pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")
@torch.inference_mode()
def test_a_pass_in_one_call_keeps_the_queries_of_a_pass_layer_by_layer(monkeypatch):
    """Bit for bit: what jobs share does not depend on who was first."""
    from magicdec.attention.cpp import CppAttention
    from magicdec.models import passes

    model, kept = small_model(), []
    model.attention = CppAttention()
    one_call = passes.run
    for run in (one_call, lambda *_: None):
        monkeypatch.setattr(passes, "run", run)
        cache = KVCache(model.config, len(LENGTHS), LONGEST + 8, torch.float32, "cpu")
        cache.keep_queries(12)
        lengths_B = torch.tensor(LENGTHS, dtype=torch.int32)
        prefill(model, cache, tokens_of(LENGTHS), lengths_B, LONGEST, 8)
        kept.append(cache.last_queries.q_LBWHD)
    assert kept[0].std() > 0.1
    assert torch.equal(*kept)


@pytest.mark.parametrize("draft", ["self", "layer_skip", "model", "hierarchical"])
@pytest.mark.parametrize("policy", ["snapkv", "pyramidkv"])
def test_a_policy_that_scores_the_prompt_does_not_run_the_model_for_it(draft, policy, monkeypatch):
    batch = drafting(draft, small_model(), [40, 9], policy=policy, gamma=2, budget=16)
    ran = []
    monkeypatch.setattr(
        type(batch.draft), "replay", lambda self, index_BT, *_: ran.append(index_BT.shape)
    )
    batch.restart()
    assert not ran
    assert batch.draft.cache.length_B.tolist() == ([39, 8] if draft == "model" else [40, 9])


@torch.inference_mode()
def test_keys_and_queries_alone_give_the_scores_of_attention():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 5, 8, 16, generator=generator)
    k, v = torch.randn(2, 2, 2, 40, 16, generator=generator)
    model = small_model(num_heads=8)
    cache = KVCache(model.config, 2, 40, torch.float32, "cpu")
    cache.rollback(torch.tensor([35, 9], dtype=torch.int32))
    attention, counted_BT = SdpaAttention(), torch.tensor([[True] * 5, [True, False] * 2 + [True]])
    (plan, *_) = cache.plan(attention, 5, torch.float32)
    _, right = attention.attend_scored(q, k, v, plan, counted_BT)
    assert torch.equal(attention.score_keys(q, k, plan, counted_BT), right)


@pytest.mark.parametrize(
    ("last", "chunks"), [(3, [3]), (4, [4]), (10, [4, 4, 2]), (40, [*[4] * 7, 2])]
)
@torch.inference_mode()
def test_tokens_are_scored_some_at_a_time(last, chunks, monkeypatch):
    """As many as the attention says, which is told how many scores one of them has. The chunks are
    reported, and change nothing.
    """
    model, tokens_BS, capacity = small_model(), tokens_of(LENGTHS), LONGEST + 8
    cache = KVCache(model.config, len(LENGTHS), capacity, torch.float32, "cpu")
    cache.keep_queries(last)
    prefill(model, cache, tokens_BS, torch.tensor(LENGTHS, dtype=torch.int32), LONGEST, 8)

    def both(progress) -> list[torch.Tensor]:
        def feed(index_BT, view):
            model(tokens_BS.gather(1, index_BT), view)

        by_queries = score_by_queries(cache.last_queries, cache, LONGEST, last, progress)
        return [by_queries, score(model, cache, feed, LONGEST, last, progress)]

    at_once, asked, reported = both(None), [], []

    def scored_tokens(attention, *facts):
        asked.append(facts)
        return 4

    monkeypatch.setattr(SdpaAttention, "scored_tokens", scored_tokens)
    for ours, expected in zip(both(reported.append), at_once, strict=True):
        torch.testing.assert_close(ours, expected, **CLOSE)
    assert reported == chunks * 2
    assert asked == [(len(LENGTHS) * 4 * capacity, torch.float32, 8)] * 2


def test_recurrent_layers_cannot_score_a_context_again():
    model = small_model()
    cache = KVCache(model.config, 1, 8, torch.float32, "cpu", states=object())
    words = "running its last 300 tokens again, .* one that scores by at most 256 tokens"
    with pytest.raises(UserError, match=words):
        score(model, cache, print, 8, 300)
