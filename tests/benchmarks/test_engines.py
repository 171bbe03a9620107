"""The program that profiles servers from outside: our server next to our engine."""

import engines
import pytest


def row(engine: str, batch: int, context: int, ms: float, step: str = "target_decode") -> dict:
    place = {"target": "tiny", "engine": engine, "batch": batch, "context": context, "gamma": 1}
    return place | {"step": step, "ms": ms}


def test_our_server_is_compared_with_our_engine_before_and_after_at_the_middle_of_its_windows():
    middle = engines.NEW_TOKENS // 2
    rows = []
    for batch, served in ((1, 5.0), (8, 14.0)):
        rows += [
            row("native before", batch, 1024 + middle, 3.0),
            row("magicdec", batch, 1024, served),
            row("native after", batch, 1024 + middle, 5.0),
            row("vllm", batch, 1024, 100.0),
        ]
    (line,) = engines.summary(rows)
    assert (line["step"], line["points"]) == ("target_decode", 2)
    assert line["median"] == pytest.approx((5 / 4 + 14 / 4) / 2)
    assert line["low"] < line["median"] < line["high"]
    assert line["added_ms"] == pytest.approx((1 / 1 + 10 / 8) / 2)


def test_a_time_below_0_is_left_out():
    rows = [
        row(engine, batch, 1024 + shift, -1.0 if batch == 4 and engine == "magicdec" else 2.0)
        for batch in (1, 4, 8)
        for engine, shift in (("native before", 24), ("magicdec", 0), ("native after", 24))
    ]
    assert engines.summary(rows)[0]["points"] == 2
