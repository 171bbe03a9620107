"""Nothing is compiled during a run: torch.compile would take seconds, in the middle of a
measurement.
"""

from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from magicdec.config import choices
from magicdec.config.registry import DRAFTS, POLICIES
from magicdec.engine import decoder
from magicdec.engine.adaptive import AdaptiveCycle
from magicdec.engine.native import warm_up
from magicdec.models.parallel import share
from magicdec.models.quantize import quantized
from magicdec.scenarios.ranks import on_ranks
from magicdec.serving import slots
from magicdec.serving.request import Params
from magicdec.serving.slots import Slots
from magicdec.verification.sampling import Sampling
from tests.checkpoints import make_checkpoint
from tests.engine.test_adaptive import Scripted
from tests.engine.test_graphs import Rehearsed
from tests.models.test_parallel import model as part_of
from tests.small import new_engine, open_batch, random_prompts, small_drafter, small_model

pytestmark = pytest.mark.slow
GREEDY, SAMPLED = Sampling(), Sampling(temperature=0.8, top_k=20, top_p=0.9)
CASES = [("self", policy) for policy in POLICIES] + [(draft, "streaming") for draft in DRAFTS]
# One of each kind of draft step and of selection; the others are a soak.
SOME = [("self", "streaming"), ("self", "quest"), ("hierarchical", "streaming")]
SOME += [("eagle3", "streaming"), ("dflash", "streaming")]
KEYS = {"budget": 16, "num_sink": 2, "page_size": 4, "refresh": 4, "generate_len": 24}


@pytest.fixture
def compiled(monkeypatch):
    compile_as_on_a_gpu(monkeypatch)


def compile_as_on_a_gpu(monkeypatch) -> None:
    """Dynamo looks at shapes and guards as on a GPU; what it finds runs as it is."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile_(function, backend="eager"))
    monkeypatch.setattr(decoder, "Step", Rehearsed)
    monkeypatch.setattr(slots, "Step", Rehearsed)
    torch._dynamo.reset()


def compiled_models(draft, model=None):
    """A target and a draft's model, whose layers are compiled."""
    models = small_model(), model or small_drafter(draft, small_model(), 0.15)
    for one in filter(None, models):
        one.compile_layers()
    return models


def batch_of(models, draft, **keys):
    target, model = models
    return open_batch(
        target, random_prompts([33, 41, 20]), draft_name=draft, draft_model=model, **KEYS, **keys
    )


@contextmanager
def compiling_nothing():
    counted = counters["stats"]
    before = counted["unique_graphs"]
    assert before > 0
    yield
    assert counted["unique_graphs"] == before


def decode(batch) -> None:
    warm_up(batch)
    with compiling_nothing():
        batch.decoder.generate()
        if batch.draft is not None:
            batch.decoder.generate(batch.draft)


@pytest.mark.parametrize(
    ("draft", "policy"),
    [
        pytest.param(*pair, marks=() if pair in SOME else pytest.mark.soak)
        for pair in dict.fromkeys(CASES)
    ],
)
def test_nothing_is_compiled_after_rehearsals(draft, policy, compiled):
    """Of a greedy batch, and of one by the same models that samples."""
    models = compiled_models(draft)
    for sampling in (GREEDY, SAMPLED):
        decode(batch_of(models, draft, gamma=5, policy=policy, sampling=sampling))


@pytest.mark.parametrize("draft", ["self", "model", "eagle3"])
def test_nothing_is_compiled_when_gamma_changes(draft, compiled, monkeypatch):
    monkeypatch.setattr("magicdec.engine.adaptive.AdaptiveCycle", Scripted)
    monkeypatch.setattr(choices, "AUTO_GAMMAS", (1, 2, 5))
    batch = batch_of(compiled_models(draft), draft, gamma="auto", policy="streaming")
    decode(batch)
    cycle = batch.decoder.cycle_for(batch.draft)
    assert isinstance(cycle, AdaptiveCycle)
    assert {1, 2, 5} <= set(cycle.gammas)


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_nothing_is_compiled_after_rehearsals_of_a_quantized_draft(bits, compiled):
    pytest.importorskip("torchao")
    models = compiled_models("self", quantized(small_model(), bits, "cpu"))
    decode(batch_of(models, "self", gamma=5, policy="streaming"))


@pytest.mark.parametrize("draft", ["none", "self", "model"])
def test_nothing_is_compiled_while_requests_come_and_go(draft, compiled):
    """Prompts of several lengths, greedy and sampled, together and alone, with and without the
    draft.
    """
    target, model = compiled_models(draft)
    keys = KEYS | {"gamma": 3, "policy": "streaming", "draft_name": draft, "draft_model": model}
    served = Slots(new_engine(target, **keys), 2, 80)
    prompts = random_prompts([33, 48, 20, 37])
    with torch.inference_mode():
        serve(served, prompts[:2], draft != "none")
        with compiling_nothing():
            serve(served, prompts[2:], draft != "none")


def serve(served, prompts, speculates) -> None:
    """Seat both requests, the second one sampled, take rounds, and release them one after the
    other.
    """
    for slot, (prompt, sampling) in enumerate(zip(prompts, (GREEDY, SAMPLED), strict=True)):
        served.prefill(prompt, Params(16, sampling), speculates, lambda _: None)
        served.seat(slot)
        for gamma in {None, served.gamma if speculates else None}:
            served.step(gamma)
    for slot in (1, 0):
        served.release(slot)
        served.step(served.gamma if speculates else None)


def decode_on(rank: int, folder: Path) -> None:
    """Decode with a draft on two ranks; an exception of any of them is raised in the test."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        compile_as_on_a_gpu(monkeypatch)
        target, model = (part_of(folder, share(2)) for _ in range(2))
        target.compile_layers()
        model.compile_layers()
        prompts = random_prompts([33, 41, 20], vocab=97)
        decode(
            open_batch(
                target,
                prompts,
                draft_name="model",
                draft_model=model,
                **KEYS,
                gamma=3,
                policy="streaming",
            )
        )


@pytest.mark.soak
@pytest.mark.usefixtures("forked_ranks")
def test_nothing_is_compiled_after_rehearsals_on_ranks(tmp_path):
    on_ranks(2, "cpu", decode_on, make_checkpoint(tmp_path, "llama-mqa", vocab_size=97))
