"""What the answers of a burst say about the rounds of a server."""

import pytest

from magicdec.peers.answer import EndpointRequest, Event, Usage
from magicdec.peers.base import AcceptanceCounts
from magicdec.peers.steady import burst_of
from magicdec.serving.request import Params


def request(arrived: float, times: list[float], tokens: int) -> EndpointRequest:
    """An answered request whose chunks came at these times."""
    found = EndpointRequest([1], Params(tokens))
    found.arrived, found.chunk_times = arrived, times
    found.take(Event([], Usage(tokens)))
    return found


def test_a_step_is_timed_while_all_requests_decode():
    """One is delayed by the prefill of the other, and goes on after its end."""
    first = [1.0, 1.5, 3.0, *(3.0 + 0.1 * n for n in range(1, 12)), 5.0]
    second = [3.0 + 0.1 * n for n in range(11)]
    found = burst_of([request(0.0, first, len(first)), request(0.5, second, len(second))])
    assert (found.step_ms, found.first_ms, found.decoded) == pytest.approx((100, 1000, (7 + 5) / 2))
    assert burst_of([request(0.0, [1.0, 1.1], 2), request(0.0, second, 11)]) is None, (
        "they never decode together"
    )
    assert burst_of([request(0.0, second, 21)]).step_ms == pytest.approx(50), "chunks of two tokens"


def test_a_round_of_speculation_is_timed_however_its_tokens_are_sent():
    """Rounds of 50 ms that accept 2 of 4: in a chunk a round, a chunk a token, two rounds a
    chunk.
    """
    counts = AcceptanceCounts(rounds=20, proposed=80, unplaced=40)
    by_round = [1 + 0.05 * number for number in range(21)]
    by_token = [1.0] + [time + late for time in by_round[1:] for late in (0, 0.001, 0.002)]
    for times in (by_round, by_token, by_round[::2]):
        found = burst_of([request(0.0, times, 61)], counts)
        assert found.step_ms == pytest.approx(50)
        assert (found.length, found.gamma) == (3, 4)
        assert found.decoded == pytest.approx(30)


def test_rows_that_accept_unlike_each_other_share_their_rounds():
    """One accepts nothing and the other everything: their rounds are the same."""
    slow = request(0.0, [1 + 0.05 * number for number in range(31)], 31)
    fast = request(0.0, [1 + 0.05 * number for number in range(16)], 46)
    found = burst_of([slow, fast], AcceptanceCounts(45, proposed=90, unplaced=30))
    assert found.step_ms == pytest.approx(50)


def test_chunks_that_are_received_together_do_not_shorten_rounds():
    """A client that is busy finds three chunks at a time."""
    late = [1 + 0.05 * 3 * -(-number // 3) for number in range(49)]
    assert burst_of([request(0.0, late, 49)]).step_ms == pytest.approx(50, rel=0.1)


def test_the_interval_is_that_of_the_parts_of_the_window():
    times = [0.0]
    for number in range(33):
        times.append(times[-1] + (0.04 if number % 8 < 4 else 0.06))
    found = burst_of([request(0.0, times, len(times))])
    low, high = found.step_ms_ci95
    assert low < found.step_ms < high
    steady_times = [0.05 * number for number in range(33)]
    ends = burst_of([request(0.0, steady_times, 33)]).step_ms_ci95
    assert ends == pytest.approx([50, 50])
