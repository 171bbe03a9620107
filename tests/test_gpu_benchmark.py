"""The benchmark for a GPU, rehearsed on the CPU: every part yields figures, what is known is not measured again."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.programs import ROOT, Program


def rehearse(out: Path, *options: str) -> subprocess.CompletedProcess:
    return Program("benchmarks/gpu.py", "--rehearse", "--out", out, *options).finish(timeout=250)


def test_a_rehearsal_goes_on_where_it_stood(tmp_path):
    first = rehearse(tmp_path, "--parts", "b")
    assert first.returncode == 0, first.stderr
    assert "Not yet measured." in (tmp_path / "page.md").read_text()
    ceilings = (tmp_path / "b.json").read_text()
    check(tmp_path, rehearse(tmp_path, "--parts", "bcde"), "bcde")
    assert (tmp_path / "b.json").read_text() == ceilings


@pytest.mark.slow
def test_a_rehearsal_measures_every_part(tmp_path):
    found = check(tmp_path, rehearse(tmp_path), "abcdefg")
    assert all(point["lossless/identical"] for key, point in found["a"].items() if key.startswith("lossless"))
    assert all(point["lossless/identical"] for point in found["f"].values())
    assert len([point for point in found["g"].values() if "ms" in point]) == 3
    assert "Not yet measured." not in (tmp_path / "page.md").read_text()


def check(out: Path, done: subprocess.CompletedProcess, parts: str) -> dict[str, dict]:
    """What was measured, in which nothing is missing."""
    assert done.returncode == 0, done.stderr
    found = {part: json.loads((out / f"{part}.json").read_text()) for part in parts}
    assert all(found.values())
    points = [point for points in found.values() for point in points.values()]
    assert not [point for point in points if {"skipped", "failed"} & point.keys()]
    assert all(point["of_copy"] > 0 for point in found["c"].values())
    assert all(point["round_ms"] > 0 and point["estimated_with_prefill_gib"] > 0 for point in found["d"].values())
    assert all(point["speedup"] > 0 and point["of_formula"] > 0 for point in found["e"].values())
    return found


@pytest.fixture
def gpu_bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_bench

    return gpu_bench


def test_what_fails_is_told_and_the_rest_goes_on(gpu_bench, tmp_path):
    def fail():
        raise RuntimeError("an illegal memory access\nwas encountered")

    bench = gpu_bench.Bench(tmp_path, gpu_bench.REHEARSAL, commit="abc")
    assert bench.point("c", "first", fail) == {"failed": "RuntimeError: an illegal memory access"}
    assert bench.point("c", "second", lambda: {"ms": 1.0}) == {"ms": 1.0}
    assert "failed" in bench.point("c", "first", lambda: {"ms": 2.0}), "not tried again unless asked to"
    bench.retry()
    assert bench.point("c", "first", lambda: {"ms": 2.0}) == {"ms": 2.0}
    assert bench.points("c")["second"] == {"ms": 1.0, "commit": "abc"}


def test_a_device_that_is_lost_ends_the_process_but_not_the_figures(gpu_bench, tmp_path, monkeypatch):
    bench = gpu_bench.Bench(tmp_path, gpu_bench.REHEARSAL)
    monkeypatch.setattr(bench, "_clean", lambda: False)
    with pytest.raises(gpu_bench.DeviceLost):
        bench.point("c", "first", lambda: {"ms": 1.0})
    assert bench.points("c")["first"]["ms"] == 1.0


def test_a_new_process_takes_over_from_a_lost_device(gpu_bench, tmp_path, monkeypatch):
    import gpu

    def lost(_):
        raise gpu_bench.DeviceLost

    monkeypatch.setitem(gpu.RUN, "c", lost)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--parts", "c", "--retry", "--seconds", "400"])
    taken_over = []
    monkeypatch.setattr(os, "execv", lambda program, arguments: taken_over.append(arguments))
    gpu.measure(gpu_bench.Bench(tmp_path, gpu_bench.REHEARSAL, time.monotonic() + 100.2), "c")
    assert taken_over == [[sys.executable, "gpu.py", "--parts", "c", "--seconds", "400", "--seconds=100"]]


def test_the_page_of_a_rehearsal_or_of_nothing_is_not_published(gpu_bench, tmp_path, capsys):
    import gpu

    (tmp_path / "machine.json").write_text(json.dumps({"device": "cpu", "torch": "2", "rehearsal": True}))
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert gpu._publish(gpu_bench.Bench(folder, gpu_bench.REHEARSAL)) == 2
    assert capsys.readouterr().err.count("has no figures of a GPU") == 2


def test_a_smaller_card_gets_fewer_rows(gpu_bench):
    sizes = gpu_bench.Sizes()
    assert sizes.within(140 << 30) == sizes
    assert sizes.within(80 << 30).cells == ((12, 32768), (96, 4096), (48, 8192), (24, 16384), (4, 100_000))


def test_the_page_says_what_has_not_been_measured(gpu_bench):
    import gpu_page

    known = {"machine": {"card": {}, "device": "NVIDIA H100", "torch": "2.13"}}
    written = gpu_page.page(lambda part: known.get(part, {}))
    assert written.startswith("# On NVIDIA H100")
    assert written.count("Not yet measured.") == len(gpu_page.TITLES)
