"""Runs under load and the files of load generators, as rows."""

import csv
import json

import pytest

from magicdec.report import query
from magicdec.report.query import varying
from magicdec.report.rows import read_rows, rows_of_file
from tests.programs import ROOT
from tests.tracking.stores import write_load, write_run

LOADS = ROOT / "tests" / "peers" / "results"


def test_a_run_under_load_is_a_row_per_level(report, tmp_path):
    """A level lacks what it has not measured: not even the run's own figures, those of its last
    level, fill it.
    """
    write_load(tmp_path, {1: (100.0, 150.0), 2: (180.0, None), 8: (500.0, 450.0)})
    rows = read_rows(tmp_path)
    assert [(row["load.concurrency"], row.get("speedup")) for row in rows] == [
        (1, 1.5),
        (2, None),
        (8, 0.9),
    ]
    assert [row.get("speculative/tokens_per_second") for row in rows] == [150.0, None, 450.0]
    assert [row.get("lossless/passed") for row in rows] == [True, None, True]
    assert {row["memory/peak_gib"] for row in rows} == {1.0}
    assert [row.get("speedup_ci95/low") for row in rows] == [1.4, None, pytest.approx(0.8)]
    assert varying(rows) == ["load.concurrency"]
    assert "0.90x" in report("--where", "concurrency=8")
    write_run(tmp_path, "other", {"draft.gamma": 2})
    assert [line["runs"] for line in query.group(read_rows(tmp_path), ["gamma"], mix=True)] == [
        2
    ], "one run"
    out = report("--html", tmp_path / "page.html")
    assert "2 runs in " in out
    assert "\n1 SYNTHETIC: " in out
    assert "holds for none of 2 runs" in report("--where", "speedup>9", is_mistaken=True)
    (tmp_path / "10ad" / "history.jsonl").unlink()
    assert [row.get("speedup") for row in read_rows(tmp_path)] == [0.9, None]


def test_files_of_load_generators_become_rows(tmp_path, report):
    """Next to a run under load; the table is that of scenario=serve."""
    write_load(tmp_path, {1: (50.0, 60.0)})
    files = [LOADS / f"{name}.json" for name in ("vllm_bench", "aiperf", "guidellm")]
    out = report(*files, "--where", "engine.name!=native")
    for words in (
        "AR TTFT ms",
        "AR TPOT ms",
        "concurrency",
        "vllm bench serve",
        "AIPerf",
        "GuideLLM",
    ):
        assert words in out
    (line,) = (line.split() for line in out.splitlines() if line.startswith("vllm_bench.json"))
    assert [part for part in line if part in ("4", "125.5", "637.9", "21.6")] == [
        "125.5",
        "4",
        "637.9",
        "21.6",
    ]
    target = tmp_path / "all.csv"
    report(*files, "--csv", target, "--html", tmp_path / "page.html")
    assert [row["id"] for row in csv.DictReader(target.open())][-1] == "guidellm.json"
    assert "all.csv: not a result file that is read here" in report(target, is_mistaken=True)


def test_files_of_load_generators_need_no_store(tmp_path, report):
    files = [LOADS / f"{name}.json" for name in ("guidellm", "aiperf")]
    out = report(*files, "--html", tmp_path / "page.html", runs=None)
    assert [line.split()[0] for line in out.splitlines() if ".json" in line] == [
        "guidellm.json",
        "aiperf.json",
    ]
    assert (tmp_path / "page.html").exists()
    err = report(*files, "--sweep", "serving", runs=None, is_mistaken=True)
    assert f"--sweep serving: {files[0]} is a file; name a run store before it" in err


def test_a_server_that_reports_acceptance_is_speculative(tmp_path):
    content = json.loads((LOADS / "vllm_bench.json").read_text()) | {
        "spec_decode_acceptance_length": 2.5
    }
    (tmp_path / "fast.json").write_text(json.dumps(content))
    (row,) = rows_of_file(tmp_path / "fast.json")
    assert row["speculative/tokens_per_second"] == pytest.approx(125.53, rel=1e-4)
    assert row["acceptance_length"] == 2.5
    assert not [key for key in row if key.startswith("autoregressive/")]


def test_a_broken_level_does_not_hide_the_others(tmp_path):
    """Other kinds of damage are in test_store.py, and every form of the report in
    test_damage.py.
    """
    write_load(tmp_path, {1: (100.0, 150.0)})
    levels = [f'{{"concurrency": {"[" * 5000}{"]" * 5000}}}', '{"concurrency": NaN}']
    levels += ['{"concurrency": "many", "speedup": []}', "torn"]
    with (tmp_path / "10ad" / "history.jsonl").open("a") as file:
        file.write("\n".join(levels))
    assert [row.get("load.concurrency") for row in read_rows(tmp_path)] == [1, "many"]
