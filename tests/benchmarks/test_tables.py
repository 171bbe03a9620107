"""The CSV files of results pages: rows of the runs of a sweep, races of engines, acceptances as
they are shipped.
"""

import pytest
import tables
from races import races
from render import DOCS, read_csv

import magicdec
from magicdec.costmodel.acceptance import published_points
from magicdec.errors import UserError
from magicdec.tracking.sweep import record

TARGET = "smollm2-135m-q4"


def way(engine, ms, prefill=2.0, batch=8, **more):
    place = {
        "target": "tiny",
        "batch": batch,
        "context": 1024,
        "engine": engine,
        "measured_by": "here",
    }
    return place | more | {"time_per_output_token_ms": ms, "last_row_s": prefill}


def test_only_like_is_compared_with_like():
    plain = [
        way("native", 10.0),
        way("native, self", 5.0),
        way("llamacpp", 8.0),
        way("transformers", 12.0, 1.0),
    ]
    (race,) = races(plain)
    assert (race["best_peer"], race["native_to_it"], race["best_on_pytorch"]) == (
        "llamacpp",
        0.8,
        "transformers",
    )
    # The others did not speculate.
    assert (race["our_best_way"], race["ours_to_it"]) == ("native, self", None)
    assert race["prefill_to_best"] == 0.5
    ngram = way("llamacpp", 4.0, draft="ngram", way="speculative")
    (race,) = races([*plain, ngram])
    assert (race["best_peer_any_way"], race["ours_to_it"]) == ("llamacpp, ngram", 0.8)
    assert list(races([way("native", 1.0), way("vllm", 1.0, batch=1)])) == []


def test_the_pages_races_are_those_of_its_ways():
    keys = ("target", "batch", "context")
    known = {
        tuple(row[key] for key in keys): row
        for row in read_csv(DOCS / "results/peers-cpu-races.csv")
    }
    reduced = ("llamacpp, F16", "openvino, 8-bit KV")
    found = list(
        races(
            row for row in read_csv(DOCS / "results/peers-cpu.csv") if row["engine"] not in reduced
        )
    )
    assert len(found) == len(known)
    for race in found:
        row = known[tuple(race[key] for key in keys)]
        assert (race["best_peer"], race["our_best_way"]) == (row["best_peer"], row["our_best_way"])
        # Of rounded times.
        assert race["native_to_it"] == pytest.approx(row["native_to_it"], rel=0.03)


def test_rows_are_those_of_the_runs_of_a_sweep(tmp_path):
    small = [
        "experiment=quick",
        "batch.size=4",
        "batch.context_len=320",
        "batch.generate_len=8",
        "tracker=[]",
    ]
    run = magicdec.run([*small, "scenario.repeats=1", f"runs_dir={tmp_path}"])
    record(tmp_path / "sweeps/2026-01-01_00-00-00_cpu", 0, run.folder.name, small)
    ((name, (row,)),) = tables.tables("cpu", tmp_path)
    assert (name, row["run"], row["context"], row["budget"]) == ("cpu", run.folder.name, 320, 64)
    assert row["speedup"] == run.metrics["speedup"]
    assert row["prefill_s"] == run.metrics["autoregressive/time_to_first_token_ms"] / 1e3
    slow, fast = tables.rows_of(
        tables.read_rows(tmp_path), {"ms": "{way}/time_per_output_token_ms"}
    )
    assert slow["ms"] / fast["ms"] == pytest.approx(run.metrics["speedup"])


def test_a_page_of_two_sweeps_takes_those_that_the_store_holds(monkeypatch, tmp_path):
    """The CSV file of the other one stays as it is."""
    row = {"id": "1", "status": "done", "torch": "2", "draft.name": "ngram", "target.name": "tiny"}
    known = {"heads_speedup": [row]}

    def read(runs_dir, sweep):
        if sweep not in known:
            raise UserError(f"holds no runs of sweep {sweep}")
        return known[sweep]

    monkeypatch.setattr(tables, "read_rows", read)
    ((name, (row,)),) = tables.tables("heads", tmp_path)
    assert (name, row["draft"]) == ("heads-speedup", "ngram")
    known.clear()
    with pytest.raises(UserError, match="holds no runs of sweep heads"):
        list(tables.tables("heads", tmp_path))


def test_shipped_acceptances_are_those_of_the_page():
    shipped = {p[1:6]: p.alpha for p in published_points() if p.target == TARGET}
    cells = [
        row
        for row in read_csv(DOCS / "results/smollm2.csv")
        if row["draft"] == "self" and row["gamma"] == 3
    ]
    novels = [
        row
        for row in cells
        if (row["text"], row["temperature"], row["generate_len"]) == ("text", 0, 160)
    ]
    assert len(novels) > 10
    for row in novels:
        place = ("self", row["policy"], row["budget"], row["context"], "text")
        assert shipped[place] == pytest.approx(row["alpha"], abs=5e-4)


def test_a_prediction_from_a_shipped_acceptance_says_so(tmp_path, capsys):
    overrides = [
        f"target={TARGET}",
        "hardware=h100",
        "cache=snapkv",
        "tracker=[]",
        f"runs_dir={tmp_path}",
    ]
    found = magicdec.run(["scenario=predict", *overrides]).metrics
    known = next(
        p.alpha
        for p in published_points()
        if p[:6] == (TARGET, "self", "snapkv", 256, 4096, "stdlib")
    )
    assert found["predicted/alpha"] == pytest.approx(known, abs=0.02)
    assert "docs/results/smollm2.md" in found["predicted/acceptance_source"]
    assert "measured acceptance, predicted times" in " ".join(capsys.readouterr().out.split())
