"""Rounds as a CUDA graph would capture them: no host synchronisation, no CPU tensor, no dynamic shape, few launches."""

from contextlib import suppress

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from magicdec.cache.streaming import Streaming
from magicdec.config.registry import DRAFTS, POLICIES
from magicdec.verification.sampling import Sampling
from tests.gpu_rehearsal.fake import engine, fake_cuda, prefilled, rounds

GREEDY, SAMPLED = Sampling(), Sampling(0.8, 50, 0.9)
PAIRS = [("self", policy) for policy in POLICIES] + [(draft, "streaming") for draft in DRAFTS if draft != "self"]
ATTENTION = ("triton:attend_split", "triton:merge_splits")
INNER = Streaming(budget=256, num_sink=4)


# Launches of a round beside its layers' halves, which a compiler fuses, and attention.
MOST = {"self-streaming": (300, 750), "hierarchical-streaming": (700, 1500)}  # greedy, sampled


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("draft", "policy"),
    [pytest.param(*pair, marks=() if pair == ("self", "streaming") else pytest.mark.slow) for pair in PAIRS],
)
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
    assert len(beside) <= (greedy if sampling.greedy else sampled) * batch.draft.phases


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
