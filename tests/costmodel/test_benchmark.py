"""The aims of the cost model, as benchmarks/costmodel.py measures them, on the committed
calibration.
"""

import json
from statistics import median

import pytest
import yaml

from magicdec.costmodel.hardware import CALIBRATED, hardware_named
from magicdec.costmodel.tables import PUBLISHED, read_table
from tests.programs import ROOT, python

KEYS = [
    "rows",
    "fitted_rows",
    "median_error",
    "p90_error",
    "wrong_side",
    "spearman",
    "target_decode_median_error",
]
BENCHMARK = "benchmarks/costmodel.py"


def summary(table):
    done = python(BENCHMARK, table)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert list(result) == KEYS
    return result


def test_the_aims_over_all_rows():
    result = summary(PUBLISHED)
    assert (result["rows"], result["fitted_rows"], result["wrong_side"]) == (65, 17, 0)
    assert result["median_error"] <= 0.04
    assert result["p90_error"] <= 0.09
    assert result["spearman"] >= 0.985
    assert result["target_decode_median_error"] <= 0.03


def test_the_aims_over_rows_that_were_not_fitted(tmp_path):
    header, *lines = PUBLISHED.read_text().splitlines()
    unseen = [
        line
        for line in lines
        if not line.startswith("3b,") and ",self,streaming,512,pg19,8xH100" not in line
    ]
    path = tmp_path / "unseen.csv"
    path.write_text("\n".join([header, *unseen]))
    result = summary(path)
    assert (result["rows"], result["fitted_rows"]) == (48, 0)
    assert result["median_error"] <= 0.05
    assert result["p90_error"] <= 0.10


def test_tables_of_other_machines_and_models(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text(
        "target,draft,policy,kv_budget,hardware,context_len,batch_size,gamma,omega,speedup\n"
        "qwen2.5-32b,self,streaming,512,4xA100,8000,16,3,2.5,1.2\n"
        "mistral-7b-v0.3,self,snapkv,1024,8xL40,16000,32,4,3.1,1.4\n"
        "yi-1.5-34b,yi-1.5-6b,streaming,512,1xH100,2000,4,2,2.0,1.1\n"
    )
    result = summary(path)
    assert result["rows"] == 3
    assert result["target_decode_median_error"] is None  # the table gives no times


def test_a_bad_table_is_one_line_and_exit_code_2(tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text("nothing\n1\n")
    done = python(BENCHMARK, path)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"error: {path}: the column target is missing"]


@pytest.mark.parametrize("path", sorted(CALIBRATED.glob("*x*.yaml")), ids=lambda p: p.stem)
def test_calibrated_files_are_valid_and_say_where_they_come_from(path):
    text = path.read_text()
    assert text.startswith("# ")
    name = yaml.safe_load(text)["hardware"]
    assert path.stem == name.lower()
    assert hardware_named(name).note == f"calibrated on {name}"


@pytest.fixture
def versions(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import costmodel_versions

    return costmodel_versions


def test_the_first_version_is_predicted_from_the_acceptance_of_the_iclr_version(versions):
    errors = [abs(line["error"]) for line in versions.speedups()]
    assert len(errors) == 20
    assert median(errors) <= 0.04
    assert median(abs(line["error"]) for line in versions.latencies()) <= 0.04


def test_the_share_of_kv_is_what_grows_with_the_context_in_the_measured_steps(versions, model):
    from costmodel_scores import compare

    rows = [row for row in read_table() if row.table in ("3a", "3c")]
    lines = versions.slopes([compare(row, model) for row in rows])
    assert len(lines) == 7
    for line in lines:
        assert line["predicted_kv"] == pytest.approx(line["measured"], abs=0.03)


def test_shares_by_bytes_and_flops_agree_with_the_model_where_both_count_the_same(versions):
    for line in versions.shares():
        assert 0 < line["share"] < line["share_of_work"] <= 1
        # Bound by memory, attention of all heads.
        if line["target"] == "llama-2-7b-32k" and line["batch"] <= 16:
            assert line["share_of_work"] == pytest.approx(line["by_table_1"], abs=0.05)


def test_the_calibration_of_a_cpu_measures_steps_and_tabulates_their_errors(tmp_path, monkeypatch):
    pytest.importorskip("scipy")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import costmodel_cpu as program

    monkeypatch.setattr(program, "RESULTS", tmp_path)
    monkeypatch.setattr(program.render, "write", lambda name: None)
    found = {"tiny": program.measure("tiny", [(1, 320, 1), (2, 512, 2)])}
    start = program.configured("cpu", 1, 20.0, 0.2, stack=program.OWN_STACK)
    program.write(found, start, program.fit(found, list(found), start))
    steps = program.render.read_csv(tmp_path / "costmodel-cpu.csv")
    assert [(line["step"], line["batch"], line["context"]) for line in steps[::2]] == [
        (step, 1, 320) for step in ("T_T", "T_D", "T_V")
    ]
    assert all(line["ms"] > 0 for line in steps)
