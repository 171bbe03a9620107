"""Rounds as a CUDA graph would capture them: no host synchronisation, no CPU tensor, no dynamic
shape, few launches.

Serving's slots change hands between them, without a wait either.
"""

from contextlib import suppress

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from magicdec.cache.streaming import Streaming
from magicdec.config.registry import DRAFTS, POLICIES
from magicdec.drafts.base import Draft
from magicdec.serving.request import Params
from magicdec.serving.slots import Slots, SlotState
from magicdec.verification.sampling import Sampling
from tests.gpu_rehearsal.fake import engine, fake_cuda, prefilled, rounds

GREEDY, SAMPLED = Sampling(), Sampling(0.8, 50, 0.9)
PAIRS = [("self", policy) for policy in POLICIES] + [
    (draft, "streaming") for draft in DRAFTS if draft != "self"
]
SERVED = [pair for pair in PAIRS if DRAFTS[pair[0]].facts.serves]
# None on the host.
SERVED = [pair for pair in SERVED if DRAFTS[pair[0]].work.prepare is Draft.prepare]
ATTENTION = ("triton:attend_split", "triton:merge_splits")
INNER = Streaming(budget=256, num_sink=4)


def quick(pairs: list[tuple[str, str]], *some: tuple[str, str]) -> pytest.MarkDecorator:
    """Parametrise a test by pairs of a draft and a policy, of which all but some are a soak."""
    marked = [pytest.param(*pair, marks=() if pair in some else pytest.mark.soak) for pair in pairs]
    return pytest.mark.parametrize(("draft", "policy"), marked)


# Launches of a round beside its layers' halves, which a compiler fuses, and attention.
MOST = {"self-streaming": (300, 750), "hierarchical-streaming": (700, 1500)}  # greedy, sampled


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@quick(PAIRS, ("self", "streaming"))
def test_a_round_can_be_captured(draft, policy, sampling):
    with fake_cuda() as recording:
        batch = prefilled(engine(draft, policy, sampling=sampling, inner=INNER))
        for model in {batch.decoder.target, getattr(batch.draft, "model", batch.decoder.target)}:
            for layer in model.layers:
                recording.name_calls(layer, before_attention="layer", after_attention="layer")
        seen = rounds(batch, recording)
    assert not seen.faults
    assert seen.launches
    assert "sort" not in seen.count()  # of a vocabulary for each proposal: ms of a round
    beside = [op for op in seen.ops if op.where != "layer" and op.name not in ATTENTION]
    greedy, sampled = MOST.get(f"{draft}-{policy}", (600, 1100))
    assert len(beside) <= (greedy if sampling.greedy else sampled) * len(batch.draft.phases)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda x: x[torch.zeros(3, dtype=torch.int64)], "index of a tensor on the CPU"),
        (lambda x: x.copy_(torch.zeros(3)), "copy_ of a tensor on the CPU"),
        (lambda x: x.nonzero(), "nonzero synchronises"),
    ],
)
def test_what_cannot_be_captured_is_noticed(fault, said):
    with fake_cuda() as recording:
        x = torch.empty(3, device="cuda")
        with recording.of() as seen:
            x[1:] = 2.0
        assert not seen.faults
        with recording.of() as seen, suppress(DynamicOutputShapeException):
            fault(x)
    assert said in {kind for kind, _ in seen.faults}


@quick(SERVED, ("self", "streaming"), ("self", "quest"))
def test_the_host_never_waits_for_slots(draft, policy):
    """Neither for a round, nor for a seat, nor for a release."""
    with fake_cuda() as recording:
        slots = Slots(engine(draft, policy, inner=INNER), 4, 2048)
        request = SlotState(1, 2048, slots.engine.slack, 4, (2,), "cuda")
        slots.step(slots.gamma)  # the first one moves tables to the device
        for sampling in (GREEDY, SAMPLED):
            slots._prefilled = request, Params(max_tokens=8, sampling=sampling), True
            with recording.of() as seen:
                slots.seat(2)
                slots.step(slots.gamma)
                slots.release(2)
            assert not seen.faults
