"""The benchmark for a GPU, rehearsed on the CPU: every part yields figures, what is known is not measured again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def rehearse(out: Path, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "benchmarks/gpu.py", "--rehearse", "--out", str(out), *options]
    here = os.environ | {"PYTHONPATH": str(ROOT)}  # this checkout, whatever is installed
    return subprocess.run(command, cwd=ROOT, env=here, capture_output=True, text=True, stdin=subprocess.DEVNULL)


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
    assert not [point for points in found.values() for point in points.values() if "skipped" in point]
    assert all(point["of_copy"] > 0 for point in found["c"].values())
    assert all(point["round_ms"] > 0 and point["estimated_gib"] > 0 for point in found["d"].values())
    assert all(point["speedup"] > 0 and point["of_formula"] > 0 for point in found["e"].values())
    return found


def test_the_page_says_what_has_not_been_measured(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_page

    assert (ROOT / "docs/results/gpu.md").read_text() == gpu_page.page(lambda part: {}, "On a GPU")
