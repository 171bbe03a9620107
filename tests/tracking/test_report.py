"""The report on the terminal: tables, exports, attempts, and mistakes in one line."""

import csv
import json
import re
import shutil
import time

import pytest

from magicdec.commands import clean
from magicdec.commands.report import main
from magicdec.errors import UserError
from magicdec.report import page, terminal
from magicdec.report.rows import read_rows
from magicdec.tracking.lock import locked
from magicdec.tracking.reader import attempts as attempts_of
from magicdec.tracking.reader import find_run
from tests.runs import shown
from tests.tracking.stores import AXES, write_run, write_store

MANY, SECONDS = 10_000, 40  # it takes about 6 s on a free core; the bound is for crowded ones


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores") / "runs"
    write_store(folder, 200)
    return folder


def test_step_errors_stand_next_to_the_speedups_and_the_impossible_is_marked(report, tmp_path):
    predicted = {
        "predicted/speedup": 0.96,
        "predicted/speedup_error": -0.04,
        "predicted/step_error": -0.95,
    }
    write_run(
        tmp_path,
        "a",
        {},
        {"speedup": 1.0, "time/overhead_ms": -188.0, "time/round_ms": 475.0} | predicted,
    )
    write_run(
        tmp_path,
        "b",
        {"draft.gamma": 2},
        {"speedup": 1.0, "time/overhead_ms": -1.0, "time/round_ms": 475.0},
    )
    out = report()
    assert re.search(r"predicted +off +steps off", out)
    assert re.search(r"0\.96x +-4% +-95%", out)
    assert "1 with an impossible overhead" in out


def test_the_table_shows_what_differs(report, store):
    out = report(
        "--where", "speedup>1", "--sort", "speedup", "--descending", "--limit", 3, runs=store
    )
    for word in ("policy", "budget", "speedup", "tokens/s", "3 of", "SYNTHETIC"):
        assert word in out
    assert re.search(r"\bspeedup +speedup_wall\b", out)  # side by side
    out = report("--group-by", "policy,budget", runs=store)
    assert "medians" in out
    assert all(re.search(rf"\nsnapkv +{budget} +measured ", out) for budget in AXES["cache.budget"])
    assert "batch.size: too much" in report(
        "--columns", "id,reason", "--where", "status=failed", runs=store
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--where", "bugdet=4"], "did you mean budget?"),
        (["--where", "budget"], "not of the form"),
        (["--where", "speedup>abc"], "speedup>abc: abc is not a number, and > compares numbers"),
        (["--where", "speedup>100"], "holds for none of 200 runs"),
        (["--sort", "tokens_per_second"], "which one?"),
        (["--sweep", "mine"], "no such sweep"),
        (["--html", "/dev/null/page.html"], "cannot be written"),
        (["--columns", "spedup"], "did you mean speedup?"),
        (["--limit", "-1"], "--limit=-1: must be at least 0"),
        (["--descending"], "--descending has no effect without --sort KEY"),
        (["--mix"], "--mix has no effect without --group-by KEYS"),
    ],
)
def test_mistakes_are_one_line(report, store, arguments, said):
    assert said in report(*arguments, runs=store, is_mistaken=True)


def test_no_store_and_one_of_nothing_but_mistakes_are_mistakes(report, tmp_path):
    said = "nowhere: no such folder; name a run store, as in runs_dir=FOLDER, or a result file"
    assert said in report(runs=tmp_path / "nowhere", is_mistaken=True)
    assert "holds no runs" in report(is_mistaken=True)
    write_run(tmp_path, "ccc", failed="invalid")
    assert "left out: 1 mistyped; --all shows them" in report(is_mistaken=True)


def test_csv_holds_every_column(report, store, tmp_path):
    target = tmp_path / "new" / "runs.csv"
    report("--csv", target, runs=store)
    with target.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 200
    assert {"id", "cache.budget", "speculative/tokens_per_second", "reason"} <= lines[0].keys()
    assert {line["lossless/identical"] for line in lines} == {"true", ""}


@pytest.mark.extra
def test_parquet(report, store, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    write_run(tmp_path, "large", {"data.seed": 1 << 63})
    assert "large.parquet" in report("--parquet", tmp_path / "large.parquet")
    report("--parquet", tmp_path / "runs.parquet", runs=store)
    table = parquet.read_table(tmp_path / "runs.parquet")
    assert table.num_rows == 200
    assert str(table.schema.field("speedup").type) == "double"
    assert str(table.schema.field("cache.budget").type) == "int64"


def test_predictions_have_a_table_of_their_own(report, tmp_path):
    """It shows the best gamma, and the alpha from which speculation pays where no acceptance is
    known.
    """
    predicted = {
        "predicted/gamma": 3,
        "predicted/break_even_alpha": 0.7071,
        "predicted/speedup": 1.2,
    }
    write_run(
        tmp_path, "a", {"draft.gamma": 1}, {"speedup": 1.5, "acceptance_rate": 0.5} | predicted
    )
    write_run(
        tmp_path, "b", {"draft.gamma": 2}, {"speedup": 0.9, "acceptance_rate": 0.25} | predicted
    )
    unknown = {key: value for key, value in predicted.items() if key != "predicted/speedup"}
    for number in range(2):
        write_run(
            tmp_path, f"c{number}", {"scenario.name": "predict", "batch.size": number}, unknown
        )
    lines = [line.split() for line in report().splitlines() if line.strip()]
    assert lines[0] == ["compare"]
    assert lines[1] == ["id", "status", "speedup", "gamma", "accepted", "predicted"]
    assert lines[5] == ["predict"]
    assert lines[6] == ["id", "status", "batch", "best", "gamma", "pays", "from", "alpha"]
    assert lines[8] == ["c0", "done", "0", "3", "0.7071"]
    out = report("--columns", "id,draft.gamma,predicted/gamma")
    assert len(re.findall(r"(?m)^(a|b|c0|c1) ", out)) == 4, "a single table where columns are named"


def test_a_command_to_copy_leaves_out_what_is_not_the_runs():
    stored = json.dumps(["+sweeps=grid", "draft.gamma=4", "runs_dir=x", "data.path='a b'"])
    assert (
        page.command({"overrides": stored})
        == "magicdec +sweeps=grid draft.gamma=4 'data.path='\"'\"'a b'\"'\"''"
    )


@pytest.mark.soak
def test_ten_thousand_runs_in_seconds(report, tmp_path):
    write_store(tmp_path / "runs", MANY)
    start = time.perf_counter()
    report("--html", tmp_path / "page.html", "--csv", tmp_path / "runs.csv", runs=tmp_path / "runs")
    assert time.perf_counter() - start < SECONDS
    assert (tmp_path / "page.html").stat().st_size < 5e6


@pytest.fixture
def attempts(tmp_path):
    """A run with two attempts that are done and one that failed, and runs that were mistyped."""
    write_run(tmp_path, "aaa", {}, {"speedup": 1.0})
    write_run(tmp_path, "aaa-2", {}, {"speedup": 2.0})
    for name in ("aaa-3", "bbb"):
        write_run(tmp_path, name, failed="out_of_memory")
    for name in ("ccc", "ccc-2", "aaa-4"):
        write_run(tmp_path, name, failed="invalid")
    return tmp_path


def test_the_latest_attempt_is_shown_and_nothing_that_was_mistyped(report, attempts):
    assert [(row["id"], row.get("speedup")) for row in read_rows(attempts)] == [
        ("aaa-2", 2.0),
        ("bbb", None),
    ]
    out = report()
    assert "1 failed; " in out
    assert "left out: 3 mistyped, 2 superseded; --all shows them, magicdec clean " in out
    out = report("--all")
    assert re.findall(r"^[a-c]{3}\S*", out, re.M) == [
        "aaa",
        "aaa-2",
        "aaa-3",
        "aaa-4",
        "bbb",
        "ccc",
        "ccc-2",
    ]
    assert "left out" not in out


def test_any_two_attempts_are_compared(compare, attempts):
    out = compare("aaa", "aaa-2")
    assert re.search(r"^speedup +1.00x +2.00x +\+100.0%$", out, re.M)
    assert "the same configuration" in out
    assert "aa: aaa, aaa-2, aaa-3, aaa-4; name a run's folder" in compare(
        "aa", "bbb", is_mistaken=True
    )
    assert "no such run" in compare(attempts / "gone", "bbb", is_mistaken=True)


def test_what_was_mistyped_is_deleted_by_a_command(attempts, capsys):
    (attempts / "ccc" / "wandb").mkdir()
    assert clean.main([str(attempts)]) == 0
    out = capsys.readouterr().out
    assert "ccc-2  batch.size: too much\n" in out
    assert f"3 runs deleted from {attempts}\n" in out
    assert sorted(path.name for path in attempts.iterdir()) == ["aaa", "aaa-2", "aaa-3", "bbb"]
    with locked(attempts / "aaa"):
        assert clean.main([str(attempts), "--kind", "out_of_memory"]) == 2
        assert "aaa is being run by" in capsys.readouterr().err
    assert clean.main([str(attempts), "--kind", "out_of_memory"]) == 0
    assert sorted(path.name for path in attempts.iterdir()) == ["aaa", "aaa-2"]
    assert clean.main([str(attempts / "nowhere")]) == 2


def test_a_run_that_has_ended_since_it_was_listed_is_not_deleted(tmp_path, monkeypatch, capsys):
    """A sweep has gone on with the first one. The last one still says that it is running."""
    for name in ("aaa", "bbb"):
        write_run(tmp_path, name, failed="interrupted")
    write_run(tmp_path, "killed", metrics={"status": "running"})
    listed = list(clean.iter_runs(tmp_path))
    monkeypatch.setattr(clean, "iter_runs", lambda runs_dir: listed)
    shutil.rmtree(tmp_path / "aaa")
    write_run(tmp_path, "aaa")
    assert clean.main([str(tmp_path), "--kind", "interrupted"]) == 0
    assert capsys.readouterr().out.endswith(f"2 runs deleted from {tmp_path}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["aaa"]


def test_every_kind_of_failure_can_be_deleted():
    kinds = {error.kind for error in (UserError, *UserError.__subclasses__())}
    assert kinds <= set(clean.KINDS)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("speedup", "1.19x"),
        ("predicted/speedup", "1.19x"),
        ("predicted/speedup_wall", "1.19x"),
        ("formula/speedup_wall", "1.19x"),
        ("speedup_duration", "1.19x"),
        ("published/predicted_speedup", "1.19x"),
        ("predicted/speedup/gamma_4", "1.19x"),
        ("speedup_spread", "1.186"),
        ("speedup_precision", "1.186"),
        ("predicted/speedup_error", "+119%"),
    ],
)
def test_speedups_have_one_form_and_nothing_else_has_it(key, text):
    assert terminal.marked({key: 1.186}, key).plain == text


def test_columns_that_are_not_shown_name_their_table():
    """The table of predictions has room for all of its columns; that of runs lacks the last."""
    common = {"status": "done", "batch.size": 8}
    rows = [
        common | {"id": "a", "scenario.name": "predict", "predicted/speedup_wall": 1.186},
        common
        | {"id": "b", "scenario.name": "compare", "speedup": 1.1, "acceptance_length": 2.0}
        | {"lossless/passed": True, "predicted/speedup_wall": 1.2},
    ]
    out = shown(terminal.runs_table(rows, None, 50, 45), width=45)
    assert "predicted wall" in out
    assert re.search(r"not shown: [^;]*\(of compare\);", " ".join(out.split()))
    assert "(of predict)" not in out


def test_the_only_line_of_a_table_names_what_ran():
    row = {"id": "a", "status": "done", "scenario.name": "plan", "predicted/speedup": 1.2}
    row |= {"target.name": "llama-3.1-8b", "device": "h200", "batch.context_len": 4096}
    out = shown(terminal.runs_table([row], None, 50, 200), width=200)
    assert all(word in out for word in ("llama-3.1-8b", "h200", "4096"))


def test_two_options_do_not_write_the_same_file(report, store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = report("--csv", "a.csv", "--html", "./a.csv", runs=store, is_mistaken=True)
    assert said == "error: --html a.csv: --csv writes the same file; name another\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["", "--csv", "a"], ["runs", "--csv", ""]])
def test_an_empty_path_is_not_the_working_directory(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(": is empty; name a file or a folder\n")


def test_a_run_without_a_name_is_none(tmp_path):
    with pytest.raises(UserError, match=r"^the name of a run is empty; name its folder, or the"):
        find_run("", tmp_path)


def test_a_store_whose_name_is_too_long_is_refused_in_one_line():
    with pytest.raises(UserError, match=r"^runs_dir=x*: cannot be read: File name too long"):
        attempts_of("x" * 300, "0a1b")
