"""What scenario=serve shows of its levels of load."""

import io

import pytest
from rich.console import Console

from magicdec.scenarios import levels
from magicdec.units import WAYS


def level(load, **others):
    latencies = {
        f"{way}/{key}{at}": 1e3 * value
        for way in WAYS
        for key in list(levels.LATENCIES)[:3]
        for at, value in (("", 20.0), ("_p50", 12.345), ("_p99", 98.765))
    }
    rates = {f"{way}/{key}": 1234.5 for way in WAYS for key in ("tokens_per_second", "goodput_rps")}
    return load | latencies | rates | others


@pytest.mark.parametrize("width", [80, 200])
def test_every_figure_fits_into_80_columns(width):
    history = [level({"rate": 1000.0}, speedup=1.4444, speedup_duration=1.1555), level({"rate": 2000.0})]
    console = Console(file=io.StringIO(), width=width)
    console.print(levels.speeds(history, WAYS), levels.latencies(history, WAYS))
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert lines[0] == ["tokens/s", *WAYS, "speedup", "per", "request", "per", "level"]
    assert ["1000", "a", "second", "1,234", "1,234", "1.44x", "1.16x"] in lines
    assert ["2000", "a", "second", "1,234", "1,234"] in lines, "a level without a request that speculated"
    ms, seconds = ["12,345", "|", "98,765"], ["12.3", "|", "98.8"]
    assert lines.count(["speculative", *ms, *ms, *seconds, "1,234"]) == 2
