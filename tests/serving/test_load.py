"""Load and its metrics: against figures worked out by hand, and with requests that only wait."""

import asyncio
import time

import pytest

from magicdec.serving.load_generator import Load, RequestSpec, load_metrics, under_load
from magicdec.serving.request import Params, Request, Stats


def stats(arrived: float, chunks: list[tuple[float, int]]) -> Stats:
    """The figures of a request that got so many tokens at each of these times."""
    made = Request([1, 2], Params())
    made.arrived = arrived
    made.chunk_times = [at for at, _ in chunks]
    made.tokens = [0] * sum(count for _, count in chunks)
    return made.stats


TWO = [
    stats(10.0, [(10.5, 1), (11.0, 3), (11.5, 1)]),  # TTFT 0.5, TPOT 0.25, latency 1.5
    stats(10.0, [(11.0, 1), (11.2, 2)]),  # TTFT 1.0, TPOT 0.1, latency 1.2
]


def test_metrics_by_hand():
    metrics = load_metrics(TWO, seconds=2.0, latency_ms=250.0, first_token_ms=600.0)
    expected = {
        "tokens_per_second": 8 / 2.0,
        "tokens_per_second_per_user": (4 + 10) / 2,
        "requests_per_second": 1.0,
    }
    expected |= {
        "wall_s": 2.0,
        "time_to_first_token_ms": 750.0,
        "time_to_first_token_ms_p50": 750.0,
    }
    expected |= {"time_to_first_token_ms_p90": 950.0, "time_to_first_token_ms_p99": 995.0}
    expected |= {"inter_chunk_latency_ms": 400.0, "inter_chunk_latency_ms_p50": 500.0}
    expected |= {"time_per_output_token_ms": 175.0, "request_latency_ms": 1350.0}
    expected |= {"goodput_rps": 0.5}  # the second one began too late
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert load_metrics(TWO, 2.0, latency_ms=100.1)["goodput_rps"] == 0.5
    assert "goodput_rps" not in load_metrics(TWO, 2.0)


def test_a_single_token_has_a_time_to_the_first_one_alone():
    metrics = load_metrics([stats(0.0, [(0.25, 1)])], 1.0)
    assert metrics["time_to_first_token_ms_p99"] == metrics["request_latency_ms"] == 250.0
    # NaN: there is none.
    assert metrics["time_per_output_token_ms"] != metrics["time_per_output_token_ms"]


class Waiting:
    """An engine whose requests take some time each, and which counts how many there are at once."""

    def __init__(self, seconds: float):
        self.seconds, self.now, self.most, self.started = seconds, 0, 0, []

    class Answer:
        def __init__(self, engine, prompt, params):
            self.engine, self.request = engine, Request(prompt, params)

        async def __aiter__(self):
            engine = self.engine
            engine.started.append(time.perf_counter())
            engine.now += 1
            engine.most = max(engine.most, engine.now)
            await asyncio.sleep(engine.seconds)
            engine.now -= 1
            yield [1]

    def generate(self, prompt, params):
        return self.Answer(self, prompt, params)


JOBS = [RequestSpec([number], Params()) for number in range(20)]


def test_a_closed_loop_keeps_so_many_busy_and_no_more():
    engine, told = Waiting(0.005), []
    requests, seconds = asyncio.run(
        under_load(engine, JOBS, Load("concurrency", 4), 0, told.append)
    )
    assert engine.most == 4
    assert [r.prompt for r in requests] == [job.prompt for job in JOBS]
    assert sum(told) == 20
    assert seconds >= 5 * 0.005


def test_a_failure_in_an_open_loop_does_not_wait_for_the_last_arrival():
    class Broken:
        def generate(self, prompt, params):
            raise ValueError("broken")

    begin = time.monotonic()
    with pytest.raises(ValueError, match="broken"):
        asyncio.run(under_load(Broken(), JOBS, Load("rate", 0.1), 3))
    assert time.monotonic() - begin < 10  # the last one would come after minutes


def test_an_open_loop_does_not_wait_for_answers():
    engine = Waiting(0.2)
    requests, _ = asyncio.run(under_load(engine, JOBS, Load("rate", 200.0), 3))
    assert engine.most > 4
    assert [r.prompt for r in requests] == [job.prompt for job in JOBS]
    gaps = [
        after - before for before, after in zip(engine.started, engine.started[1:], strict=False)
    ]
    assert 0.02 < sum(gaps) < 0.5  # 19 gaps of 5 ms in the mean
    assert max(gaps) > 2 * min(gaps)
