"""A simulated prefill leaves a draft's cache as a prefill does, over noise: what selects has
something to tell apart.
"""

import pytest
import torch

from magicdec.cache.dynamic import DynamicCache
from magicdec.config.registry import POLICIES
from magicdec.engine.native import warm_up
from tests.small import drafting, small_model


def simulated(draft, policy, budget=24):
    batch = drafting(draft, small_model(), [90, 90], policy=policy, budget=budget, gamma=2)
    batch.simulate_prefill()
    batch.decoder.restart(batch.draft)
    return batch


@pytest.mark.parametrize(
    ("draft", "policy"),
    [("model", p) for p in POLICIES if not POLICIES[p].facts.needs_target]
    + [("self", p) for p in POLICIES],
)
def test_no_entry_of_a_simulated_context_is_zero(draft, policy):
    cache = simulated(draft, policy).draft.cache
    valid_BS = torch.arange(cache.capacity) < cache.committed_slots_B[:, None]
    size_LBKS = cache.k_LBKSD.abs().sum(-1)
    assert bool((size_LBKS.movedim(-1, 2)[:, valid_BS] > 0).all())
    prefilled = drafting(draft, small_model(), [90, 90], policy=policy, budget=24, gamma=2)
    prefilled.decoder.restart(prefilled.draft)
    assert cache.length_B.tolist() == prefilled.draft.cache.length_B.tolist()


@pytest.mark.parametrize("draft", ["self", "model"])
def test_pages_are_told_apart_and_selected_by_a_query(monkeypatch, draft):
    batch = simulated(draft, "quest", budget=48)
    cache, selected = batch.draft.cache, []
    select = cache.select

    def recorded(layer, q_BTHD, attention, plan):
        assert q_BTHD.abs().sum(-1).min() > 0
        selected.append(select(layer, q_BTHD, attention, plan))
        return selected[-1]

    monkeypatch.setattr(cache, "select", recorded)
    cache.reselect(batch.draft.model.attention)
    assert isinstance(cache, DynamicCache)
    pages = [
        sorted(set((row[row >= 0] // 16).tolist())) for row in torch.cat(selected).flatten(0, 1)
    ]
    assert len(pages) > 1
    assert len(set(map(tuple, pages))) > 1, "heads choose differently"
    warm_up(batch)
