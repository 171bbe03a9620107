"""Estimated memory against counted memory: every allocation of PyTorch's allocator, as its profiler
records them.
"""

import gc

import pytest
import torch
from torch import Tensor
from torch._C._autograd import _disable_profiler, _enable_profiler, _prepare_profiler
from torch._C._profiler import ProfilerActivity, RecordScope
from torch.autograd.profiler import profile

from magicdec.attention.sdpa import SdpaAttention
from magicdec.config.load import compose
from magicdec.config.registry import DRAFTS, POLICIES
from magicdec.engine.decoder import Decoder
from magicdec.engine.output_audit import audit
from magicdec.measure.footprint import (
    Allocations,
    UniformAttention,
    footprint,
    largest_batch,
    stored,
)
from magicdec.models.quantize import quantized
from magicdec.models.transformer import Transformer
from magicdec.planning import build, fits
from magicdec.planning.resolve import resolve
from magicdec.serving.request import Params
from magicdec.serving.slots import Slots
from magicdec.tracking.progress import progress
from magicdec.verification.sampling import Sampling
from tests.checkpoints import make_checkpoint
from tests.small import new_engine, open_batch, random_prompts, small_drafter, small_model

SIZES = {
    "hidden_size": 64,
    "head_dim": 16,
    "intermediate_size": 160,
    "num_layers": 2,
    "max_position_embeddings": 2048,
}
TARGET = small_model(**SIZES)
ROWS, CONTEXT = 3, 300
SAMPLED = Sampling(temperature=0.7, top_p=0.9)
CASES = [("self", policy, 64, Sampling()) for policy in POLICIES]
CASES += [("model", policy, 100, Sampling()) for policy in ("full", "snapkv", "h2o")]
CASES += [(draft, "streaming", 200, SAMPLED) for draft in DRAFTS] + [("none", "full", 300, SAMPLED)]


def counted_peak(function) -> int:
    """The most bytes that are handed out at a time."""
    gc.collect()
    activities = {ProfilerActivity.CPU}
    settings = profile(use_cpu=True, profile_memory=True).config(create_trace_id=True)
    _prepare_profiler(settings, activities)
    _enable_profiler(settings, activities, {RecordScope.USER_SCOPE})  # of operators, it keeps none
    try:
        function()
    finally:
        results = _disable_profiler()
    events = [e for e in results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def without_storage(model: Transformer) -> Transformer:
    with torch.device("meta"):
        return type(model)(model.config, UniformAttention())


@pytest.mark.parametrize(("draft", "policy", "chunk", "sampling"), CASES)
def test_what_is_foreseen_is_what_is_allocated(draft, policy, chunk, sampling):
    settings = {
        "gamma": 3,
        "budget": 40,
        "num_sink": 4,
        "page_size": 8,
        "generate_len": 4,
        "sampling": sampling,
    }
    settings |= {"draft_name": draft, "policy": policy, "prefill_chunk": chunk}
    drafter = small_drafter(draft, TARGET, 0.1)
    prompts = random_prompts([CONTEXT] * ROWS)
    audited = draft != "none"

    def run():
        batch = open_batch(TARGET, prompts, draft_model=drafter, **settings)
        plain = batch.decoder.generate().tokens
        if audited:
            audit(batch.decoder, plain, batch.decoder.generate(batch.draft).tokens)

    models = without_storage(TARGET), without_storage(drafter) if drafter else None
    engine = new_engine(models[0], draft_model=models[1], **settings)
    assert footprint(engine, ROWS, CONTEXT, audited).peak == pytest.approx(
        counted_peak(run), rel=0.05
    )


@torch.inference_mode()
def test_what_is_made_again_counts_again_and_views_and_changes_do_not():
    with torch.device("meta"), Allocations() as allocations:
        whole = torch.empty(100, dtype=torch.int32)
        kept = [whole]
        for _ in range(2):
            kept += [whole[:50], whole.add_(1), whole.to(torch.int32)]
            kept += [torch.dropout(whole, 0.5, train=False)]
        assert allocations.live == 400
        kept += [whole * 2, whole * 2.0, whole * 2, whole[:50] * 2]
        assert [tensor.dtype for tensor in kept[-4:-1]] == [torch.int32, torch.float32, torch.int32]
        assert allocations.live == 4 * 400 + 200
        del kept[-1]
        assert (allocations.live, allocations.peak) == (1600, 1800)


@pytest.mark.parametrize("rollback", ["keep", "replay"])
def test_states_are_foreseen_for_every_gamma_that_a_run_may_choose(tmp_path, rollback):
    """Their notes are the larger part: of 2 to 9 tokens, for each of five gammas."""
    sizes = ["batch.size=8", "batch.context_len=20", "batch.generate_len=24"]
    sizes += ["batch.prefill_chunk=4"]
    keys = ["draft.gamma=auto", f"target.rollback={rollback}", "attention=sdpa", *sizes]
    folder = make_checkpoint(tmp_path, "qwen3.5", eos_token_id=None)
    given = [f"target.path={folder}", "target=custom", "data=random", "hardware=cpu"]
    plan = resolve(compose([*given, "cache.budget=16", "draft.synthetic_acceptance=0.7", *keys]))
    with progress() as bars:
        engine = build.engine(plan, bars)

    def run():
        batch = engine.open(random_prompts([20] * 8))
        batch.decoder.prefill(engine.prefill_chunk)
        batch.decoder.generate(batch.draft)

    estimated = fits.estimate(plan, 8, 20)
    assert estimated.total - estimated.weights == pytest.approx(counted_peak(run), rel=0.05)


@pytest.mark.parametrize(
    ("draft", "policy"), [("self", "streaming"), ("self", "snapkv"), ("model", "snapkv")]
)
def test_slots_are_foreseen_with_the_row_that_is_prefilled(draft, policy):
    sizes = [
        "batch.size=2",
        "batch.context_len=200",
        "batch.generate_len=16",
        "batch.prefill_chunk=100",
    ]
    plan = resolve(
        compose(["scenario=serve", f"draft={draft}", f"cache={policy}", "attention=sdpa", *sizes])
    )
    with progress() as bars:
        engine = build.engine(plan, bars)
    prompt = random_prompts([200])[0]

    def run():
        slots = Slots(engine, 2, 216)
        for slot in range(2):
            slots.prefill(prompt, Params(16), True, lambda _: slots.step(slots.gamma))
            slots.seat(slot)

    estimated = fits.estimate(plan, 2, 200)
    assert estimated.total - estimated.weights == pytest.approx(counted_peak(run), rel=0.05)


@pytest.mark.parametrize("policy", list(POLICIES))
def test_a_gpu_is_foreseen_with_the_backend_that_it_uses(policy):
    """Whatever the policy, no kernel is called; and the masks of sdpa count only where a pass goes
    its way.
    """
    pytest.importorskip("triton")
    from magicdec.attention.cuda.triton import TritonAttention

    settings = {
        "draft_name": "self",
        "policy": policy,
        "gamma": 3,
        "budget": 40,
        "page_size": 8,
        "prefill_chunk": 200,
    }
    totals = []
    for backend in (TritonAttention(), SdpaAttention()):
        with torch.device("meta"):
            engine = new_engine(Transformer(TARGET.config, backend), **settings)
        totals.append(footprint(engine, ROWS, CONTEXT, True).peak)
    assert 0 < totals[0] <= totals[1]


@pytest.mark.parametrize(
    ("name", "least", "most"), [("int8", 1 / 4, 1 / 3), ("int4", 1 / 8, 1 / 6)]
)
def test_a_quantized_draft_counts_its_codes_and_scales_and_shares_the_rest(name, least, most):
    pytest.importorskip("torchao")
    drafter, prompts = quantized(TARGET, name, "cpu"), random_prompts([CONTEXT] * ROWS)
    settings = {
        "gamma": 3,
        "draft_name": "self",
        "policy": "streaming",
        "budget": 40,
        "generate_len": 6,
    }

    def run():
        batch = open_batch(TARGET, prompts, draft_model=drafter, **settings)
        batch.decoder.generate(batch.draft)

    meta = without_storage(TARGET)
    engine = new_engine(meta, draft_model=quantized(meta, name, "cpu"), **settings)
    ours, theirs = (
        {
            one._cdata: one.nbytes()
            for p in model.parameters()
            for one in map(Tensor.untyped_storage, stored(p))
        }
        for model in (engine.draft_model, meta)
    )
    codes = sum(ours[key] for key in ours.keys() - theirs.keys())
    matrices = sum(p.nbytes for p in TARGET.layers.parameters() if p.dim() == 2)
    assert matrices * least < codes < matrices * most
    assert footprint(engine, ROWS, CONTEXT, False).peak == pytest.approx(
        counted_peak(run), rel=0.05
    )


def test_a_quantized_draft_of_the_first_layers_holds_no_codes_of_others():
    pytest.importorskip("torchao")
    keys = ["draft=layer_skip", "draft.num_layers=2", "draft.quantization=int8", "attention=sdpa"]
    plan = resolve(compose([*keys, "hardware=cpu"]))
    with progress() as bars:
        engine = build.engine(plan, bars)
    codes = sum(
        tensor.nbytes
        for parameter in engine.draft_model.layers.parameters()
        for tensor in stored(parameter)
        if parameter.dim() == 2
    )
    assert len(engine.draft_model.layers) == 2
    assert codes == pytest.approx(fits.held(plan, 1, 100).draft_weights, rel=0.1)


@pytest.mark.parametrize("available", [0, 99, 100, 333, 5000])
def test_the_largest_batch_is_the_largest(available):
    def total(rows: int) -> int:
        return 90 + 10 * rows + (rows > 20) * 70

    fits = [rows for rows in range(1, 100) if total(rows) <= available]
    assert largest_batch(total, 100, available) == max(fits, default=0)


def test_a_batch_beyond_all_memory_is_extrapolated(monkeypatch):
    """Nothing is allocated for each of a billion rows, and the estimate is that of a batch that is
    run.
    """

    def total(rows):
        engine = new_engine(
            without_storage(TARGET), "self", policy="streaming", gamma=3, budget=40, num_sink=4
        )
        return footprint(engine, rows, CONTEXT, audited=True)

    expected = total(512)
    monkeypatch.setattr("magicdec.measure.footprint.MOST_ROWS", 128)
    assert total(512).peak == pytest.approx(expected.peak, rel=0.01)
    assert total(10**9).peak == pytest.approx(expected.peak / 512 * 10**9, rel=0.01)


@pytest.mark.timeout(60)
def test_rounds_between_two_selections_are_of_one_kind_and_rehearsed_once(monkeypatch):
    phases, round_ = [], Decoder.round

    def recorded(decoder, draft, gamma, phase):
        phases.append(phase)
        round_(decoder, draft, gamma, phase)

    monkeypatch.setattr(Decoder, "round", recorded)
    keys = {"policy": "verify_guided", "gamma": 2, "budget": 16, "refresh": 10**9}
    engine = new_engine(without_storage(TARGET), draft_name="self", **keys)
    footprint(engine, ROWS, CONTEXT, audited=False)
    assert phases == [0, 1]
