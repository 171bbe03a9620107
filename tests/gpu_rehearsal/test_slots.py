"""Serving's slots on a CUDA device that is not there: neither a round, nor a seat, nor a release blocks the host."""

import pytest

from magicdec.cache.streaming import Streaming
from magicdec.config.registry import DRAFTS, POLICIES
from magicdec.drafts.base import Draft
from magicdec.serving.request import Params
from magicdec.serving.slots import Slots, SlotState
from magicdec.verification.sampling import Sampling
from tests.gpu_rehearsal.fake import engine, fake_cuda

PAIRS = [("self", policy) for policy in POLICIES]
PAIRS += [
    (name, "streaming")
    for name in DRAFTS
    if DRAFTS[name].facts.serves and name != "self" and DRAFTS[name].work.prepare is Draft.prepare  # none on the host
]
QUICK = (("self", "streaming"), ("self", "quest"))


@pytest.mark.parametrize(
    ("draft", "policy"), [pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow) for pair in PAIRS]
)
def test_the_host_never_waits(draft, policy):
    with fake_cuda() as recording:
        slots = Slots(engine(draft, policy, inner=Streaming(budget=256, num_sink=4)), 4, 2048)
        request = SlotState(1, 2048, slots.engine.slack, 4, (2,), "cuda")
        slots.step(slots.gamma)  # the first one moves tables to the device
        for sampling in (Sampling(), Sampling(0.8, 50, 0.9)):
            slots._prefilled = request, Params(max_tokens=8, sampling=sampling), True
            with recording.of() as seen:
                slots.seat(2)
                slots.step(slots.gamma)
                slots.release(2)
            assert not seen.faults
