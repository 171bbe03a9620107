"""The facts of every policy against what its cache really allocates, counted as PyTorch hands it
out.
"""

import pytest
import torch

from magicdec.architectures.model_config import ModelConfig
from magicdec.cache.quantized import Quantized, QuantizedCache
from magicdec.config.choices import CacheSpec, ModelChoice
from magicdec.config.registry import DRAFTS, POLICIES
from magicdec.conformance.examine import wrong_bytes
from magicdec.costmodel.hardware import hardware_named
from magicdec.costmodel.memory_estimate import memory
from magicdec.costmodel.round import Setup
from magicdec.drafts.layer_skip import LayerSkip
from magicdec.drafts.model import IndependentModel
from magicdec.drafts.self import SelfSpeculation
from magicdec.measure.footprint import Allocations
from magicdec.models.kv_cache import KVCache
from tests.small import cache_config

SIZES = {
    "num_layers": 4,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}
TARGET = ModelConfig(100, 64, 160, **SIZES, sliding_window=50, sliding_layers=(0, 3))
SMALLER = ModelConfig(
    100, 64, 160, num_layers=3, num_heads=4, num_kv_heads=4, head_dim=8, max_position_embeddings=512
)
ROWS, GAMMA, CONTEXT, NEW_TOKENS = 2, 3, 1000, 24
SETTINGS = {"num_sink": 4, "observation_window": 16, "page_size": 8, "bits": 4, "group_size": 16}
LENGTHS = 64  # bytes of a row's lengths, which no fact counts, in each cache of a layer
CONFIGS = {"self": SelfSpeculation(), "layer_skip": LayerSkip(num_layers=2)}
CONFIGS["model"] = IndependentModel(model=ModelChoice("smaller", architecture=SMALLER))
CASES = [
    (d, p) for p in POLICIES for d in CONFIGS if d != "model" or not POLICIES[p].facts.needs_target
]


def case(draft: str, policy: str, budget: int) -> tuple[Setup, CacheSpec, KVCache | None]:
    """A setup, what its draft's cache is asked for, and the target's entries where the draft uses
    them.
    """
    machine = hardware_named("h100")
    cache = cache_config(policy, budget=budget, **SETTINGS)
    setup = Setup(TARGET, machine, ROWS, CONTEXT, CONFIGS[draft], cache, element_bytes=4)
    spec = CacheSpec(
        cache, GAMMA, CONTEXT + NEW_TOKENS, setup.draft_model.max_position_embeddings < CONTEXT
    )
    whole = KVCache(TARGET, ROWS, CONTEXT + NEW_TOKENS + GAMMA + 1, torch.float32, "meta")
    return setup, spec, None if draft == "model" else whole


@pytest.mark.parametrize("budget", [71, 903, 5000])
@pytest.mark.parametrize(("draft", "policy"), CASES)
def test_what_is_predicted_is_what_is_allocated(draft, policy, budget):
    setup, spec, whole = case(draft, policy, budget)
    config = setup.draft_model
    shared = whole.view(0, config.num_layers) if whole is not None else None
    known = [] if whole is None else [whole.k_LBKSD, whole.v_LBKSD, whole.seqlens_B]
    with Allocations(known) as allocations:
        cache = POLICIES[policy].work.build(spec, config, ROWS, torch.float32, "meta", shared)
        if whole is not None:
            cache.watch(whole, 0)
        held = allocations.live
    predicted = memory(setup, GAMMA, NEW_TOKENS)
    assert whole is None or predicted.target_kv == whole.num_bytes
    assert predicted.draft_kv == cache.num_bytes
    assert 0 <= held - predicted.draft_kv <= ROWS * config.num_layers * LENGTHS
    assert (predicted.draft_kv == 0) == (policy in ("full", "topk") and draft != "model")


@pytest.mark.parametrize("chunk", [GAMMA + 1, 300])
@pytest.mark.parametrize("policy", [policy for draft, policy in CASES if draft == "model"])
def test_what_a_prefill_holds_is_predicted(policy, chunk):
    setup, spec, _ = case("model", policy, 71)
    cache = POLICIES[policy].work.build(spec, SMALLER, ROWS, torch.float32, "meta", None)
    with Allocations() as allocations:
        prefilled = cache.for_prefill(chunk)
        held = allocations.live
    assert prefilled is not None
    predicted = memory(setup.at(prefill_chunk=chunk), GAMMA, NEW_TOKENS).transient
    assert 0 <= held - predicted <= ROWS * SMALLER.num_layers * LENGTHS


@pytest.mark.parametrize(("bits", "group_size"), [(8, 16), (4, 24), (8, 24), (4, 12)])
def test_codes_take_what_is_predicted_whatever_their_groups(bits, group_size):
    """Groups of 24 and 12 divide neither the slots nor the head dim of 16."""
    spec = CacheSpec(Quantized(budget=64, bits=bits, group_size=group_size), GAMMA, CONTEXT)
    whole = KVCache(TARGET, ROWS, spec.capacity, torch.float32, "meta")
    cache = QuantizedCache.build(spec, TARGET, ROWS, torch.float32, "meta", whole)
    predicted = ROWS * spec.stored_bytes(TARGET, 4, shares_target=True)
    assert predicted == pytest.approx(cache.num_bytes, rel=1e-12)


LISTENING = [name for name in DRAFTS if DRAFTS[name].facts.listens]


@pytest.mark.parametrize("policy", ["snapkv", "h2o", "streaming"])
@pytest.mark.parametrize("draft", LISTENING)
def test_hidden_states_that_a_draft_keeps_of_the_prompts_are_declared(draft, policy):
    assert list(wrong_bytes(draft, policy, {})) == []
