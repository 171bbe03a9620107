"""Engines: published shares of matmuls, lookups that verify where they match, verification that is
not split, and what the host adds.
"""

import csv
from dataclasses import replace
from itertools import product

import pytest

from magicdec.costmodel.hardware import DEVICES, configured, hardware_named
from magicdec.costmodel.matmuls import TABLE, VECTOR_SHARE, shares_of
from magicdec.costmodel.roofline import Pass, step_time, tile_stretch
from magicdec.costmodel.round import Setup, round_times
from magicdec.costmodel.stacks import STACKS, Host
from magicdec.drafts.ngram import PromptLookup
from magicdec.drafts.self import SelfSpeculation
from magicdec.errors import UserError


@pytest.fixture
def served(model):
    """A factory of Llama-3.1-8B on one GPU as an engine runs it."""

    def make(stack="vllm", hardware="h100", batch=1, context=1000, **changes):
        machine = configured(hardware, stack=stack)
        return Setup(model("llama-3.1-8b"), machine, batch, context, **changes)

    return make


def lookup(served, share, batch, gamma=3, stack="vllm"):
    """T_V of a lookup of which this share of rounds has a match, in seconds."""
    setup = served(stack, batch=batch, draft=PromptLookup(), match_share=share)
    return round_times(setup, gamma).verify.total


def test_a_matmul_takes_its_roofline_over_the_published_share():
    cells = list(csv.DictReader(TABLE.open(newline="")))
    assert {row["device"] for row in cells} == {"A100", "H100", "H200", "L40S"}
    for row in cells[::7]:
        shares = shares_of(row["device"])
        at = float(row["rows"]), float(row["elements"])
        assert shares.of(*at) == pytest.approx(min(1.0, float(row["share"])))
        seconds = shares.seconds(*at, 3e-6, 2e-6, is_exact=True)
        assert seconds == pytest.approx(3e-6 / min(1.0, float(row["share"])))


def test_a_borrowed_table_is_read_at_the_same_place_of_the_roofline():
    """Twice the bandwidth halves the ridge: one row is as far from it as two were."""
    own, other = shares_of("H100"), shares_of("H100", 2.0)
    assert other.of(128, 3e7) == pytest.approx(own.of(256, 3e7))
    faster = configured("h100", bandwidth_gbs=6700, stack="vllm")
    assert faster.shares.scale == pytest.approx(2.0)
    assert configured("h100", stack="sglang").shares.scale == pytest.approx(1.0)


@pytest.mark.parametrize(("batch", "gamma"), [*product((64, 128), (3, 7))])
def test_engines_verify_large_batches_faster_than_a_saturating_rate_says(served, batch, gamma):
    """The published shares of 256 to 1,024 rows are above those of the calibrated software."""
    engine, own = (
        round_times(served(stack, batch=batch), gamma).verify.compute
        for stack in ("vllm", "magicdec")
    )
    assert engine < own


def test_machines_as_they_were_calibrated_are_not_changed_by_the_tables():
    assert hardware_named("8xA100").shares is None
    assert configured("h200").shares is None


def test_a_lookup_verifies_more_tokens_only_where_it_has_a_match(served):
    """With one row it is one of two passes, with many their average."""
    none, half, all_rows = (lookup(served, share, 1) for share in (0.0, 0.5, 1.0))
    assert half == pytest.approx((none + all_rows) / 2)
    assert none == pytest.approx(served().target_time.total, rel=1e-3)
    few, many = (lookup(served, share, 128, gamma=7) for share in (0.2, 1.0))
    assert few < 0.7 * many
    static = [lookup(served, share, 8, stack="magicdec") for share in (0.0, 1.0)]
    assert static[0] == static[1], "our rounds have static shapes"


def test_the_average_over_matches_is_that_of_the_binomial_distribution(served):
    share, gamma, batch = 0.3, 3, 2
    machine = served().hardware
    forward = served(batch=batch).target_pass._replace(splits=True)

    def verification(matches):
        tokens = 1 + gamma * matches / batch
        return step_time(forward._replace(query_tokens=tokens), machine).total

    chances = ((1 - share) ** 2, 2 * share * (1 - share), share**2)
    expected = sum(chance * verification(matches) for matches, chance in enumerate(chances))
    assert lookup(served, share, batch) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("stack", "hardware", "splits"),
    [
        ("vllm", "h100", True),
        ("vllm", "a100", False),
        ("vllm-triton", "h100", False),
        ("sglang", "a100", True),
        ("magicdec", "a100", True),
    ],
)
def test_verification_that_is_not_split_reads_long_contexts_slowly(served, stack, hardware, splits):
    times = round_times(served(stack, hardware, context=32_000), 3)
    ratio = times.verify.kv / times.target.kv
    # 32 tiles, one for each query head, on 108 or 132 SMs.
    sms = DEVICES[hardware.upper()].num_sms
    assert ratio == pytest.approx(1.0 if splits else sms / 32, rel=1e-3)


def test_unsplit_tiles_share_the_memory_as_waves_do():
    assert tile_stretch(54, 108, splits=False) == 2.0
    assert tile_stretch(108, 108, splits=False) == 1.0
    assert tile_stretch(256, 108, splits=False) == tile_stretch(256, 108)
    assert tile_stretch(54, 108) == tile_stretch(54, None, splits=False) == 1.0


def test_the_host_adds_to_every_step_row_and_round(served):
    setup = served(batch=8, draft=SelfSpeculation())
    quiet = replace(setup.hardware.stack, host=Host())
    silent = setup.at(hardware=replace(setup.hardware, stack=quiet))
    host = setup.hardware.stack.host
    added = round_times(setup, 4).overhead.overhead - round_times(silent, 4).overhead.overhead
    expected = host.round_us + 4 * host.draft_step_us + 8 * host.row_us
    assert added == pytest.approx(1e-6 * expected)


def test_codes_of_few_rows_are_decoded_for_each(served):
    """In llama.cpp and MLX: one more row costs its arithmetic, whatever is read."""
    setup = served("llama.cpp")
    device = replace(setup.hardware.device, vector_flops=20e12)
    machine = replace(setup.hardware, device=device)
    codes = Pass(setup.target, 1, 1, 10, weight_bytes=0.5, head_bytes=0.5)

    def seconds(tokens):
        return step_time(codes._replace(query_tokens=tokens), machine).total

    weights = setup.target.num_parameters - setup.target.vocab_size * setup.target.hidden_size
    per_row = 2 * weights / (VECTOR_SHARE * 20e12)
    assert seconds(3) - seconds(2) == pytest.approx(per_row, rel=0.02)
    assert seconds(8) > seconds(9), "more rows are multiplied by tensor cores"


def test_an_unknown_engine_is_named_with_those_that_are_known():
    with pytest.raises(
        UserError, match=r"scenario\.stack=tgi is not known; one of: magicdec, .*vllm"
    ):
        configured("h100", stack="tgi")
    assert all(stack.layer_us is None or stack.host.row_us > 0 for stack in STACKS.values())
