"""Intervals and probabilities from errors on rows that were held back."""

from math import log

import pytest

from magicdec.costmodel.confidence import Case, Error, case_of, confidence
from magicdec.costmodel.hardware import configured
from magicdec.costmodel.prediction import predict
from magicdec.costmodel.verdict_words import verdict

CASE = Case(False, "eagle3", 8)


def errors(ratios, case=CASE, source=None):
    return [Error(case, source or f"source {n}", log(ratio)) for n, ratio in enumerate(ratios)]


def test_the_interval_scales_with_the_prediction_and_holds_what_was_measured():
    """A handful of sources cannot leave out a tail of 5%."""
    known = errors([0.5, 0.9, 1.0, 1.1, 1.5])
    single, double = (confidence(CASE, speedup, known) for speedup in (1.0, 2.0))
    assert (single.low, single.high) == pytest.approx((0.5, 1.5))
    assert (double.low, double.high) == pytest.approx((1.0, 3.0))
    many = errors([1 + 0.01 * n for n in range(-40, 60)])
    assert confidence(CASE, 1.0, many).low > 0.61


def test_the_probability_is_the_share_of_errors_that_leave_a_gain():
    known = errors([0.5, 0.9, 1.0, 1.1, 1.5])
    # 0.5 x 1.5 is a loss, the other four are gains; one opinion more is undecided.
    assert confidence(CASE, 1.5, known).pays == pytest.approx(4.5 / 6)
    assert confidence(CASE, 0.6, known).pays == pytest.approx(0.5 / 6)
    assert str(confidence(CASE, 0.6, known)).startswith("does not pay in any comparable")


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ((0.9, 1.1), "pays in every comparable measurement of 2 sources; 90% of "),
        ((0.9,), "pays in every comparable measurement of 1 source; 90% of "),
        (
            (0.9, 0.5, 1.1, 1.1),
            "pays in 75% of comparable measurements of 4 sources, each of which counts alike; ",
        ),
        (
            (0.4, 0.5, 1.1, 0.5),
            "does not pay in 75% of comparable measurements of 4 sources, each of which counts",
        ),
        ((0.4, 0.5), "does not pay in any comparable measurement of 2 sources; 90% of "),
    ],
)
def test_people_read_in_how_many_measurements_it_pays_per_row(ratios, said):
    """With few sources the probability is far from 1, next to an interval wholly above 1."""
    text = str(confidence(CASE, 1.5, errors(ratios)))
    assert text.startswith(said)
    assert text.endswith("x per row")


def test_sources_weigh_equally():
    known = errors([2.0] * 99, source="many") + errors([0.5, 0.5], source="few")
    assert confidence(CASE, 1.0, known).pays == pytest.approx((1 + 0.5) / 3)


def test_errors_of_the_same_kind_count_where_enough_sources_have_them():
    lookups, large = Case(False, "ngram", 8), Case(False, "eagle3", 64)
    same, other = errors([1.0, 1.0, 1.0]), errors([9.0, 9.0, 9.0], lookups)
    assert confidence(CASE, 1.0, same + other).high == pytest.approx(1.0)
    assert confidence(CASE, 1.0, same[:2] + other).high == pytest.approx(9.0)
    assert confidence(large, 1.0, same + other).high == pytest.approx(9.0), "of any batch"
    assert confidence(Case(True, "self", 8), 1.0, same) is None


@pytest.mark.parametrize("draft", ["eagle3", "mtp", "dflash"])
def test_what_reads_hidden_states_is_as_sure_as_a_head(draft):
    assert confidence(CASE._replace(draft=draft), 1.5) == confidence(CASE, 1.5)


def test_the_verdict_says_how_sure_it_is(setup):
    for at in (setup(), setup().at(hardware=configured("h100", stack="vllm"))):
        prediction = predict(at, (3,), alpha=0.8)
        metrics, sure = prediction.metrics(), prediction.confidence
        assert metrics["predicted/speedup_low"] < metrics["predicted/speedup"]
        assert metrics["predicted/speedup"] < metrics["predicted/speedup_high"]
        assert f"({sure})" in verdict(prediction)
    assert predict(setup(), (3,)).confidence is None, "no alpha"


@pytest.mark.parametrize(
    ("name", "stack", "is_calibrated"),
    [
        ("h200", None, True),
        ("h200", "magicdec", True),
        ("h200", "llama.cpp", False),
        ("h100", None, True),
        ("h100", "magicdec", False),
        ("h100", "vllm", False),
        ("l40", None, False),
    ],
)
def test_a_machine_is_calibrated_with_the_software_that_was_measured_there(
    setup, name, stack, is_calibrated
):
    at = setup().at(hardware=configured(name, stack=stack))
    assert case_of(at).is_calibrated is is_calibrated


def test_work_that_was_not_measured_is_as_uncertain_as_other_software(setup):
    quest, streaming = (
        predict(setup(policy=policy), (3,), alpha=0.8).confidence
        for policy in ("quest", "streaming")
    )
    assert quest.high / quest.low > streaming.high / streaming.low
