"""What is compiled before a run suffices for it: torch.compile, in the middle of a measurement, would take seconds."""

import pytest
import torch
from torch._dynamo.utils import counters

from magicdec.config.registry import DRAFTS, POLICIES
from magicdec.engine import decoder
from magicdec.engine.native import warm_up
from magicdec.verification.sampling import Sampling
from tests.engine.test_graphs import Rehearsed
from tests.small import open_batch, random_prompts, small_drafter, small_model

GREEDY, SAMPLED = Sampling(), Sampling(temperature=0.8, top_k=20, top_p=0.9)
CASES = [("self", policy, GREEDY) for policy in POLICIES]
CASES += [(draft, "streaming", sampling) for draft in DRAFTS for sampling in (GREEDY, SAMPLED)]


@pytest.mark.slow
@pytest.mark.parametrize(("draft", "policy", "sampling"), dict.fromkeys(CASES))
def test_nothing_is_compiled_after_rehearsals(draft, policy, sampling, monkeypatch):
    """Dynamo looks at shapes and guards as on a GPU; what it finds runs as it is."""
    compile_, counted = torch.compile, counters["stats"]
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile_(function, backend="eager"))
    monkeypatch.setattr(decoder, "Step", Rehearsed)
    torch._dynamo.reset()
    target = small_model()
    target.compile_layers()
    model = small_drafter(draft, small_model(), 0.15)
    if model is not None:
        model.compile_layers()
    spec = {"gamma": 5, "budget": 16, "num_sink": 2, "page_size": 4, "refresh": 4, "generate_len": 24}
    spec["sampling"] = sampling
    batch = open_batch(target, random_prompts([33, 41, 20]), draft_name=draft, draft_model=model, policy=policy, **spec)
    warm_up(batch)
    before = counted["unique_graphs"]
    assert before > 0
    batch.decoder.generate()
    if batch.draft is not None:
        batch.decoder.generate(batch.draft)
    assert counted["unique_graphs"] == before
