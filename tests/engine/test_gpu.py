"""Tests that need a GPU: captured rounds write what plain ones write, and memory is what was
estimated.

They do not depend on the version of PyTorch: run them with each that is to be used.
"""

import pytest
import torch

from magicdec.config.registry import BACKENDS, DRAFTS, POLICIES
from magicdec.engine.native import NativeEngine, warm_up
from magicdec.measure import ceilings
from magicdec.measure.footprint import footprint
from magicdec.measure.memory_use import Peak, workspace_bytes
from magicdec.measure.round_profile import profile_round
from magicdec.models import quantize
from magicdec.scenarios.ranks import on_ranks
from magicdec.verification.sampling import Sampling
from tests.small import new_engine, random_prompts, small_drafter, small_model

pytestmark = pytest.mark.gpu
CASES = [("self", policy) for policy in POLICIES] + [(draft, "streaming") for draft in DRAFTS]
SAMPLED = Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=3)
# Values of a sum: of a draft step, and of a verification of 5 tokens.
DECODING = (24 * 4096, 24 * 5 * 4096)
SIZES = {
    "hidden_size": 256,
    "head_dim": 64,
    "intermediate_size": 512,
    "num_layers": 4,
    "max_position_embeddings": 8192,
}


def engine_for(
    draft, policy, graphs, device="cuda", attention="sdpa", sampling=None, **sizes
) -> NativeEngine:
    target = small_model(**sizes)
    target.attention = BACKENDS[attention].work()
    drafter = small_drafter(draft, target, 0.15)
    drafter = drafter and drafter.to(device)
    options = {
        "gamma": 3,
        "budget": 16,
        "num_sink": 2,
        "page_size": 4,
        "refresh": 2,
        "graphs": graphs,
    }
    options |= {"draft_name": draft, "draft_model": drafter, "policy": policy, "sampling": sampling}
    return new_engine(target.to(device), **options)


def opened(engine: NativeEngine, lengths, prefill_chunk=16):
    batch = engine.open(random_prompts(lengths))
    batch.decoder.prefill(prefill_chunk)
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
        # Captures share a pool of memory.
        assert batch.decoder.generate(batch.draft).tokens == plain.tokens
        written.append((plain.tokens, fast.accepted_RB.tolist()))
    assert written[0] == written[1]


@pytest.mark.parametrize(
    ("draft", "policy"), [("self", "streaming"), ("self", "quest"), ("ngram", "streaming")]
)
def test_captured_rounds_that_sample_write_what_plain_ones_write(draft, policy):
    """A sample depends on its position alone: a replay draws what a call draws, and so does the
    next generation.
    """
    written = []
    for graphs in (False, True):
        batch = opened(engine_for(draft, policy, graphs, sampling=SAMPLED), [50, 61, 70])
        plain, fast = batch.decoder.generate(), batch.decoder.generate(batch.draft)
        assert batch.decoder.generate(batch.draft).tokens == fast.tokens
        written.append((plain.tokens, fast.tokens, fast.accepted_RB.tolist()))
    assert written[0] == written[1]
    greedy = opened(engine_for(draft, policy, False), [50, 61, 70]).decoder.generate().tokens
    assert written[0][0] != greedy


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_captured_rounds_of_a_quantized_draft_are_lossless(quantization, compiled):
    pytest.importorskip("torchao")
    engine = engine_for("self", "streaming", True, attention="triton", **SIZES)
    engine.draft_model = quantize.quantized(engine.target, quantization, "cuda")
    for model in (engine.target, engine.draft_model) if compiled else ():
        model.compile_layers()
    batch = opened(engine, [50, 61, 70])
    plain, fast = batch.decoder.generate(), batch.decoder.generate(batch.draft)
    assert fast.tokens == plain.tokens
    assert fast.accepted_RB.max() > 0


def test_captured_rounds_over_codes_of_32k_tokens_are_lossless():
    sizes = SIZES | {"max_position_embeddings": 33_000, "num_layers": 2}
    written = []
    for graphs in (False, True):
        batch = opened(
            engine_for("self", "quantized", graphs, attention="triton", **sizes),
            [32_768, 20_001],
            2048,
        )
        plain, fast = batch.decoder.generate(), batch.decoder.generate(batch.draft)
        assert fast.tokens == plain.tokens
        written.append((plain.tokens, fast.accepted_RB.tolist()))
    assert written[0] == written[1]


@pytest.mark.parametrize("num_values", DECODING)
@pytest.mark.parametrize("way", ["nccl", "symmetric"])
def test_ranks_sum_inside_a_captured_graph(way, num_values):
    """The measurement checks the sums of two replays."""
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs two GPUs")
    assert on_ranks(count, "cuda", ceilings.captured_sum_s, way, num_values, time_limit_s=120) > 0


@pytest.mark.parametrize("policy", ["streaming", "pyramidkv"])
def test_compiled_layers_write_what_plain_ones_write(policy):
    written = []
    for compiled in (False, True):
        engine = engine_for("self", policy, True, attention="triton", **SIZES)
        if compiled:
            engine.target.compile_layers()
        batch = opened(engine, [50, 61, 70])
        written.append(
            [batch.decoder.generate().tokens, batch.decoder.generate(batch.draft).tokens]
        )
    assert written[0] == written[1]


@pytest.mark.parametrize("policy", ["streaming", "snapkv", "full"])
@pytest.mark.parametrize("attention", ["sdpa", "triton"])
def test_memory_is_what_was_foreseen(policy, attention):
    rows, context = 32, 4096
    estimated = footprint(
        engine_for("self", policy, True, "meta", attention, **SIZES), rows, context, False
    )
    device = torch.device("cuda")
    torch._C._cuda_clearCublasWorkspaces()  # of tests before this one
    torch.cuda.empty_cache()
    before, peak = torch.cuda.memory_allocated(), Peak(device)
    batch = opened(engine_for("self", policy, True, attention=attention, **SIZES), [context] * rows)
    batch.decoder.generate(batch.draft)
    weights = sum(p.nbytes for p in small_model(**SIZES).parameters())
    expected = weights + estimated.peak + workspace_bytes(device)
    assert peak.num_bytes - before == pytest.approx(expected, rel=0.05)
