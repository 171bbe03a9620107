"""Tests that need a GPU: captured rounds write what plain ones write, and memory is what was estimated."""

import pytest
import torch

from magicdec.config.registry import BACKENDS, DRAFTS, POLICIES
from magicdec.engine.native import NativeEngine, warm_up
from magicdec.measure.footprint import footprint
from magicdec.measure.memory import Peak, workspace_bytes
from magicdec.measure.profile import profile_round
from tests.small import new_engine, random_prompts, small_drafter, small_model

pytestmark = pytest.mark.gpu
CASES = [("self", policy) for policy in POLICIES] + [(draft, "streaming") for draft in DRAFTS]
SIZES = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512, "num_layers": 4, "max_position_embeddings": 8192}


def engine_for(draft, policy, graphs, device="cuda", attention="sdpa", **sizes) -> NativeEngine:
    target = small_model(**sizes)
    target.attention = BACKENDS[attention].work()
    drafter = small_drafter(draft, target, 0.15)
    drafter = drafter and drafter.to(device)
    options = {"gamma": 3, "budget": 16, "num_sink": 2, "page_size": 4, "refresh": 2, "graphs": graphs}
    return new_engine(target.to(device), draft_name=draft, draft_model=drafter, policy=policy, **options)


def opened(engine: NativeEngine, lengths):
    batch = engine.open(random_prompts(lengths))
    batch.decoder.prefill(16)
    warm_up(batch)
    return batch


@pytest.mark.parametrize(("draft", "policy"), CASES)
def test_captured_rounds_write_what_plain_ones_write(draft, policy):
    written = []
    for graphs in (False, True):
        batch = opened(engine_for(draft, policy, graphs), [50, 61, 70])
        plain, fast = batch.decoder.generate(), batch.decoder.generate(batch.draft)
        assert fast.tokens == plain.tokens
        assert profile_round(batch, 2)["verify_ms"] > 0
        assert batch.decoder.generate(batch.draft).tokens == plain.tokens  # captures share a pool of memory
        written.append((plain.tokens, fast.accepted_RB.tolist()))
    assert written[0] == written[1]


@pytest.mark.parametrize("policy", ["streaming", "pyramidkv"])
def test_compiled_layers_write_what_plain_ones_write(policy):
    written = []
    for compiled in (False, True):
        engine = engine_for("self", policy, True, attention="triton", **SIZES)
        if compiled:
            engine.target.compile_layers()
        batch = opened(engine, [50, 61, 70])
        written.append([batch.decoder.generate().tokens, batch.decoder.generate(batch.draft).tokens])
    assert written[0] == written[1]


@pytest.mark.parametrize("policy", ["streaming", "snapkv", "full"])
@pytest.mark.parametrize("attention", ["sdpa", "triton"])
def test_memory_is_what_was_foreseen(policy, attention):
    rows, context = 32, 4096
    estimated = footprint(engine_for("self", policy, True, "meta", attention, **SIZES), rows, context, False)
    device = torch.device("cuda")
    torch._C._cuda_clearCublasWorkspaces()  # of tests before this one
    torch.cuda.empty_cache()
    before, peak = torch.cuda.memory_allocated(), Peak(device)
    batch = opened(engine_for("self", policy, True, attention=attention, **SIZES), [context] * rows)
    batch.decoder.generate(batch.draft)
    weights = sum(p.nbytes for p in small_model(**SIZES).parameters())
    expected = weights + estimated.peak + workspace_bytes(device)
    assert peak.num_bytes - before == pytest.approx(expected, rel=0.05)
