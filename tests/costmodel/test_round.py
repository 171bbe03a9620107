from dataclasses import replace

import pytest

from magicdec.architectures.mtp_config import MtpConfig
from magicdec.config.choices import CODE_ROWS, ModelChoice
from magicdec.config.registry import POLICIES
from magicdec.costmodel.hardware import configured, hardware_named
from magicdec.costmodel.memory_estimate import memory
from magicdec.costmodel.roofline import BF16, Pass, step_time
from magicdec.costmodel.round import Setup, prefill_s, round_times
from magicdec.drafts.hierarchical import Hierarchical
from magicdec.drafts.layer_skip import LayerSkip
from magicdec.drafts.model import IndependentModel
from magicdec.drafts.mtp import MultiTokenPrediction
from magicdec.drafts.ngram import PromptLookup
from magicdec.drafts.self import SelfSpeculation
from magicdec.errors import UserError
from tests.costmodel.conftest import changed

REFERENCE = "reference-2024-11"


@pytest.fixture
def setup(ideal, model):
    def make(stack="magicdec", count=8, **changes):
        machine = ideal(count, stack=stack, layer_overhead_us=50.0, round_overhead_us=700.0)
        return changed(Setup(model("llama-3.1-8b"), machine, 32, 32_000), **changes)

    return make


def test_the_parts_of_a_round_add_up(setup):
    """And verification costs a little more than decoding."""
    times = round_times(setup(), 4)
    parts = 4 * (times.draft.total + times.select.total) + times.verify.total + times.overhead.total
    assert times.round_s == pytest.approx(parts)
    assert times.overhead.total == pytest.approx(700e-6)
    assert times.target.total < times.verify.total < 1.5 * times.target.total


def test_a_prefill_computes_the_logits_of_its_last_token_alone(setup):
    at = setup(count=1)
    small, large = (replace(at.target, vocab_size=size) for size in (1_000, 128_000))
    added = prefill_s(at, large, 1, 2_000) - prefill_s(at, small, 1, 2_000)
    reading = 127_000 * at.target.hidden_size * BF16 / at.hardware.bandwidth
    assert added == pytest.approx(reading, rel=0.01)


@pytest.mark.parametrize(
    ("stack", "heads_read"), [("magicdec", 1), ("vllm-2025", 4), ("reference-2024-11", 4)]
)
def test_a_prefill_in_chunks_reads_the_head_once_and_discarded_logits_in_each(
    setup, stack, heads_read
):
    """2,000 tokens in 4 chunks: our engine decides once, vLLM computes logits in each chunk."""
    at = setup(stack, count=1).at(prefill_chunk=500)
    small, large = (replace(at.target, vocab_size=size) for size in (1_000, 128_000))
    added = prefill_s(at, large, 1, 2_000) - prefill_s(at, small, 1, 2_000)
    reading = 127_000 * at.target.hidden_size * BF16 / at.hardware.bandwidth
    assert added == pytest.approx(heads_read * reading, rel=0.01)


def test_a_step_of_modules_is_a_layer_behind_a_matrix(setup):
    """However many modules there are: a step runs one of them."""
    one, two = (
        MultiTokenPrediction(gamma=3, model=ModelChoice("mtp", architecture=config))
        for layers in (1, 2)
        for config in [replace(MtpConfig.like(setup().target), num_layers=layers)]
    )
    times = round_times(setup(draft=one), 3)
    assert times.draft == round_times(setup(draft=two), 3).draft
    layer = Pass(setup().target.layers(0, 1), 32, 1, setup(draft=one).tokens_read, 8)
    alone = step_time(layer, setup().hardware)
    joined = 2 * setup().target.hidden_size ** 2 * BF16 / setup().hardware.bandwidth
    assert times.draft.total - alone.total == pytest.approx(joined, rel=0.1)


def test_a_self_draft_over_everything_decodes_like_the_target(setup):
    at = setup(policy="full")
    times = round_times(at, 3)
    assert times.draft.total == pytest.approx(times.target.total)
    assert times.target == step_time(Pass(at.target, 32, 1, 32_000, 8), at.hardware), "one pass"


def test_weights_that_are_kept_in_fewer_bytes_take_less_to_read(setup):
    wide, narrow = (
        setup(batch=1, context=1, element_bytes=4.0, stored_weight_bytes=size)
        for size in (None, 2.0)
    )
    for step in ("target", "draft", "verify"):
        ratio = (
            getattr(round_times(narrow, 3), step).weights
            / getattr(round_times(wide, 3), step).weights
        )
        assert ratio == pytest.approx(0.5, rel=0.01)  # activations stay as they are
    weights = [memory(one, 3).target_weights for one in (wide, narrow)]
    assert weights[1] == weights[0] / 2
    assert round_times(wide, 3).target.kv == round_times(narrow, 3).target.kv


def test_the_draft_reads_its_budget_not_the_context(setup):
    assert round_times(setup(), 3).draft == round_times(setup(context=100_000), 3).draft
    assert round_times(setup(budget=2048), 3).draft.kv == pytest.approx(
        4 * round_times(setup(), 3).draft.kv
    )
    short, few = setup(budget=512, context=256), setup(budget=256)
    assert round_times(short, 3).draft.kv == pytest.approx(round_times(few, 3).draft.kv)


def test_drafts_without_exact_kv_feed_two_tokens_first(setup):
    reference, ours = (
        round_times(setup(stack=s, batch=256), 2).draft for s in ("reference-2024-11", "magicdec")
    )
    assert reference.total > ours.total
    snapkv = setup(stack="reference-2024-11", batch=256, policy="snapkv")
    assert round_times(snapkv, 2).draft == ours


def test_the_first_step_of_an_independent_draft_computes_the_logits_of_one_token(setup, model):
    """A vocabulary that is twice as large costs every draft step the same, but not those of the
    reference, which computes the logits of both tokens.
    """
    ours, references = (_more_of_first_steps(setup, model, s) for s in ("magicdec", REFERENCE))
    assert ours[0] == pytest.approx(ours[1])
    assert references[1] > 1.01 * references[0]


def _more_of_first_steps(setup, model, stack):
    """The seconds of a first draft step beyond those of another, with two vocabularies."""
    extra = []
    for size in (100_000, 200_000):
        config = replace(model("llama-3.2-1b"), vocab_size=size)
        draft = IndependentModel(model=ModelChoice("small", architecture=config))
        target = replace(model("llama-3.1-8b"), vocab_size=size)
        first, later = setup(stack, target=target, draft=draft, count=1).draft_step_times
        assert first.total > later.total
        extra.append(first.total - later.total)
    return extra


def test_independent_drafts_run_on_all_ranks_and_the_references_on_at_most_four(setup, model):
    def ranks(name, count, tensor_parallel=None, stack="reference-2024-11"):
        draft = IndependentModel(
            model=ModelChoice(name, architecture=model(name)), tensor_parallel=tensor_parallel
        )
        return setup(count=count, draft=draft, stack=stack).draft_ranks

    assert ranks("llama-3.2-1b", 8, stack="magicdec") == 8
    assert ranks("llama-3.2-1b", 8) == 4  # 8 KV heads
    assert ranks("llama-3.2-1b", 2) == 2
    assert ranks("llama-3.2-1b", 8, tensor_parallel=8) == 8
    assert setup().draft_ranks == 8  # self


def test_late_choice_of_tokens_is_paid_by_the_round(setup):
    late = round_times(setup(stack="reference-2024-08"), 2)
    assert late.overhead.activations == pytest.approx(6 * 32 * 3 * 128256 * 2 / 3350e9)
    assert round_times(setup(), 2).overhead.activations == 0.0


def test_ngram_drafts_take_no_time(setup):
    times = round_times(setup(draft=PromptLookup()), 3)
    assert times.draft.total == times.select.total == 0.0


@pytest.mark.parametrize(("name", "size"), [("int8", 1.0625), ("int4", 0.5625)])
def test_quantized_drafts_read_fewer_bytes(setup, name, size):
    """Codes and a scale of two bytes for 32 weights, in the layers of Llama-3.1-8B; its head
    stays.
    """
    plain, small = (
        round_times(setup(batch=1, draft=SelfSpeculation(quantization=q)), 3).draft
        for q in ("none", name)
    )
    layers, head = 32 * 4096 * (6144 + 4096 + 3 * 14336), 4096 * 128256
    expected = (layers * size + head * 2) / (layers * 2 + head * 2)
    assert small.weights == pytest.approx(plain.weights * expected, rel=0.01)
    # A copy next to the target's weights, which share embedding and head.
    assert memory(
        setup(draft=SelfSpeculation(quantization=name)), 3
    ).draft_weights == pytest.approx(layers * size / 8)
    assert memory(setup(), 3).draft_weights == 0


MOVED = [
    ("cpu", "int8", 1, 5.0625),
    ("cpu", "int4", CODE_ROWS + 1, 0.5625),
    ("8xH100", "int8", CODE_ROWS, 1.0625),
]
MOVED += [("8xH100", "int8", CODE_ROWS + 1, 5.0625), ("8xH100", "int4", CODE_ROWS + 1, 4.5625)]


@pytest.mark.parametrize(("machine", "name", "batch", "size"), MOVED)
def test_weights_that_are_decoded_first_are_written_and_read_in_addition(
    setup, machine, name, batch, size
):
    hardware = (
        hardware_named(machine)
        if machine != "cpu"
        else configured("cpu", bandwidth_gbs=35, tflops=0.13)
    )
    quantized = setup(batch=batch, hardware=hardware, draft=SelfSpeculation(quantization=name))
    assert quantized.moved_weight_bytes(batch) == size


@pytest.mark.parametrize("policy", list(POLICIES))
def test_every_policy_predicts(setup, policy):
    times = round_times(setup(policy=policy), 3)
    assert times.draft.total > 0
    assert (times.select.total > 0) == (policy in ("quest", "topk", "verify_guided"))


def test_selection_costs_what_it_moves(setup, model):
    config = model("llama-3.1-8b")
    # Half an entry of every row, over 8 ranks.
    key = 32 * config.kv_elements_per_token / 2 * 2 / 8 / 3350e9
    assert round_times(setup(policy="topk"), 3).select.total == pytest.approx(32_000 * key)
    pages = 2001  # of 16 entries, with room for a round's own
    assert round_times(setup(policy="quest"), 3).select.total == pytest.approx(2 * pages * key)
    wide = setup(policy="topk", element_bytes=4.0)
    assert round_times(wide, 3).select.total == pytest.approx(2 * 32_000 * key)


def test_the_settings_of_a_policy_count(setup):
    def select(**settings):
        policy = "quest" if "page_size" in settings else "verify_guided"
        return round_times(setup(policy=policy, **settings), 3).select.total

    assert select(page_size=8) == pytest.approx(2 * select(page_size=16), rel=1e-3)
    assert select(refresh=1) == pytest.approx(4 * select(refresh=4))
    exact = round_times(setup(policy="full"), 3).draft.kv
    for bits in (8, 4):  # and 32 elements share four bytes of scales
        read = round_times(setup(policy="quantized", bits=bits), 3).draft.kv
        assert read == pytest.approx(exact * (bits / 8 + 4 / 32) / 2)


def test_skipped_layers_cost_nothing(setup):
    whole, half = setup(), setup(draft=LayerSkip(num_layers=16))
    times = [round_times(one, 3).draft for one in (whole, half)]
    assert times[1].kv == pytest.approx(times[0].kv / 2)
    assert memory(half, 3).draft_weights == 0
    assert memory(half, 3).draft_kv == pytest.approx(memory(whole, 3).draft_kv / 2)


def test_memory_counts_weights_and_both_caches(setup, model):
    config = model("llama-3.1-8b")
    held = memory(setup(), 4, generate_len=96)
    assert held.target_weights == config.num_parameters * 2 / 8
    assert held.target_kv == 32 * (32_000 + 96 + 5) * config.kv_elements_per_token * 2 / 8
    assert held.draft_kv == 32 * (512 + 5) * config.kv_elements_per_token * 2 / 8
    assert memory(setup(policy="full"), 4).draft_kv == 0  # reads the target's own
    assert memory(setup(policy="topk"), 4).draft_kv == 0  # likewise, through indices
    draft = model("llama-3.2-1b")
    independent = memory(
        setup(draft=IndependentModel(model=ModelChoice("llama-3.2-1b", architecture=draft))), 4
    )
    assert independent.draft_weights == draft.num_parameters * 2 / 8


@pytest.mark.parametrize("policy", ["full", "quest", "topk"])
def test_an_independent_draft_that_keeps_everything_must_fit_as_well(setup, model, policy):
    draft = IndependentModel(model=ModelChoice("llama-3.1-8b", architecture=model("llama-3.1-8b")))
    at = setup(target=model("llama-3.1-70b"), draft=draft, policy=policy, batch=40)
    held = memory(at, 3, generate_len=128)
    entries = 40 * (32_000 + 128 + 4) * draft.own_model.kv_elements_per_token * 2 / 8
    assert held.draft_kv >= entries
    assert held.total > at.hardware.device.memory >= held.total - entries


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"budget": 0}, "cache.budget=0"),
        ({"policy": "nosuch"}, "cache.policy=nosuch: must be one of full"),
        ({"draft": Hierarchical()}, "draft=hierarchical"),
        ({"draft": LayerSkip(num_layers=32)}, "draft.num_layers=32: must be from 1 to 31"),
    ],
)
def test_mistakes_are_named(setup, change, names):
    with pytest.raises(UserError, match=names):
        round_times(setup(**change), 3)
