"""Acceptance by context."""

from math import exp, log, sqrt

import pytest

from magicdec.measure.contexts import Speculated, bucket_of, context_acceptance
from magicdec.measure.intervals import t_quantile


def test_buckets_are_powers_of_two():
    assert [bucket_of(length) for length in (1, 1023, 1024, 2047, 2048)] == [
        1,
        512,
        1024,
        1024,
        2048,
    ]


def test_each_bucket_has_the_length_of_its_rounds_and_an_interval_over_requests():
    short = [Speculated(100, 10, 20), Speculated(120, 10, 10), Speculated(64, 20, 40)]
    short += [Speculated(90, 10, 30)]
    found = context_acceptance([*short, Speculated(1024, 10, 5), Speculated(4000, 0, 0)])
    assert found["context/64/requests"] == 4
    assert found["context/64/acceptance_length"] == pytest.approx(1 + 100 / 50)
    assert found["context/1024/acceptance_length"] == 1.5
    assert "context/1024/acceptance_length_ci95" not in found, "of one request"
    assert not any("2048" in key for key in found), "no round, no acceptance"
    assert found["context/error_of_shortest"] == pytest.approx(3 / 1.5 - 1)
    without = [
        (150 - tokens) / (50 - rounds)
        for tokens, rounds in ((30, 10), (20, 10), (60, 20), (40, 10))
    ]
    changes = [log(one) - log(3) for one in without]
    mean = sum(changes) / 4
    half = t_quantile(3) * sqrt(3 * sum((one - mean) ** 2 for one in changes) / 4)
    assert found["context/64/acceptance_length_ci95"] == pytest.approx(
        [3 * exp(-half), 3 * exp(half)]
    )


def test_one_bucket_has_no_error():
    assert "context/error_of_shortest" not in context_acceptance([Speculated(100, 10, 5)])
