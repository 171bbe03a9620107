"""Conditions of a capture, on any machine: its rehearsals must stay within the buffers, and leave
no trace.

A CPU raises for an index that a GPU would only assert on, long after the call.
"""

import functools
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from magicdec.config.registry import DRAFTS, POLICIES
from magicdec.engine import decoder, graphs
from magicdec.engine.native import warm_up
from magicdec.measure import round_profile
from tests.small import drafting, new_engine, open_batch, random_prompts, small_model

TARGET = small_model()
CASES = (
    [("self", policy) for policy in POLICIES]
    + [(draft, "streaming") for draft in DRAFTS]
    + [("model", "full")]
)


def opened(draft="none", policy="full", generate_len=12):
    keys = {
        "gamma": 5,
        "budget": 16,
        "num_sink": 2,
        "page_size": 4,
        "refresh": 4,
        "generate_len": generate_len,
    }
    return drafting(draft, TARGET, [33, 41, 20], policy=policy, **keys)


@functools.cache
def plain_tokens(generate_len):
    """What the target writes alone."""
    return opened(generate_len=generate_len).decoder.generate().tokens


class Rehearsed(graphs.Step):
    """A step that is rehearsed as for a capture, and then called as it is."""

    def __init__(self, function, captures=None, undo=None, before=None):
        super().__init__(function, before=before)
        graphs.rehearse(function, undo)


@pytest.mark.parametrize(
    ("draft", "policy", "generate_len"),
    [*((*case, 12) for case in CASES), *((draft, "streaming", 2) for draft in DRAFTS)],
)
def test_rehearsals_stay_within_the_buffers_and_leave_no_trace(
    draft, policy, generate_len, monkeypatch
):
    expected = plain_tokens(generate_len)
    for module in (decoder, round_profile):
        monkeypatch.setattr(module, "Step", Rehearsed)
    batch = opened(draft, policy, generate_len)
    warm_up(batch)
    assert batch.decoder.generate().tokens == expected
    assert batch.decoder.generate(batch.draft).tokens == expected
    assert round_profile.profile_round(batch, 1)["verify_ms"] > 0


def test_a_rehearsed_prefill_makes_passes_of_the_same_widths_and_leaves_no_trace(monkeypatch):
    batch = new_engine(TARGET).open(random_prompts([50, 61, 70]))
    widths, forward = [], type(TARGET).forward

    def recorded(model, tokens_BT, cache, taps=None):
        widths.append(tokens_BT.shape[1])
        return forward(model, tokens_BT, cache, taps)

    monkeypatch.setattr(type(TARGET), "forward", recorded)
    batch.decoder.rehearse_prefill(16)
    rehearsed = set(widths)
    widths.clear()
    batch.decoder.prefill(16)
    assert rehearsed == set(widths) == {16, 70 % 16}
    tokens = batch.decoder.generate().tokens
    assert tokens == open_batch(TARGET, random_prompts([50, 61, 70])).decoder.generate().tokens


def test_what_spoils_a_capture_is_what_is_told(monkeypatch):
    """PyTorch ends a capture that has failed with an error of its own, and does not come to restore
    the stream.
    """

    @contextmanager
    def graph(*_, **__):
        try:
            yield
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    def spoil():
        raise ValueError("a list was read on the host")

    before, own = (SimpleNamespace(wait_stream=lambda other: None) for _ in range(2))
    restored: list = []
    stand_ins = {
        "graph": graph,
        "stream": nullcontext,
        "CUDAGraph": object,
        "set_stream": restored.append,
    }
    stand_ins |= {"Stream": lambda device: own, "current_stream": lambda device: before}
    for name, stand_in in (stand_ins | {"graph_pool_handle": lambda: None}).items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(graphs, "rehearse", lambda function, undo: None)
    with pytest.raises(ValueError, match="read on the host"):
        graphs.Captures(torch.device("cuda", 7)).capture(spoil, lambda: None)
    assert restored == [before]
    graphs._stream.cache_clear()
