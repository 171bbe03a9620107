"""The files of W&B, read back from disk. Nothing that W&B does loses a run or reveals a secret."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from magicdec.errors import UserError
from magicdec.tracking.loggers import wandb as tracking
from magicdec.tracking.reader import load_run
from magicdec.tracking.store import Run
from magicdec.tracking.sweep import record
from magicdec.tracking.trackers import FinishedRun
from tests.tracking.processes import KILL, TELL, python
from tests.tracking.sample import (
    CONFIG,
    GENERATIONS,
    HISTORY,
    METRICS,
    SAMPLES,
    SYSTEM,
    with_changes,
)

wandb = pytest.importorskip("wandb", reason="W&B is not installed")

SECRET = "MARKER" + "0123456789abcdef" * 3

CHECK = """
import os
from magicdec.errors import UserError
from magicdec.tracking.loggers import wandb
for key in (None, "too short"):
    if key:
        os.environ["WANDB_API_KEY"] = key
    try:
        wandb.check({"wandb": {"mode": "online"}})
    except UserError as error:
        print(error)
"""


ATTEMPTS = ["0123456789ab", "0123456789ab-2"]


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Two attempts at a run, told offline in one process; its outcomes, and the process for what it
    printed.
    """
    home = tmp_path_factory.mktemp("home")
    process = python(
        "-c", TELL, home / "runs", "offline", 2, "0123456789ab", home=home, WANDB_API_KEY=SECRET
    )
    return [json.loads(line) for line in process.stdout.splitlines()], process, home


@pytest.fixture(scope="module")
def records(told):
    """The first attempt's records."""
    return inspect(told[0][0]["folder"])


def inspect(folder):
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return [json.loads(line) for line in output.splitlines()]


def updates(records, kind):
    return {
        key: value for r in records if r["type"] == kind for key, value in r[kind]["update"].items()
    }


def run_and_config(records):
    run = next(r["run"] for r in records if r["type"] == "run")
    return run, {key: value for key, value in run["config"]["update"].items() if key != "_wandb"}


def test_each_attempt_is_a_run_in_its_own_folder_and_the_terminal_hears_nothing_of_it(told):
    outcomes, process, home = told
    assert (process.returncode, process.stderr) == (0, "")
    folders = [Path(outcome["folder"]) for outcome in outcomes]
    assert [folder.parent for folder in folders] == [
        home / "runs" / name / "wandb" for name in ATTEMPTS
    ]
    assert [folder.name.partition("_")[2].partition("-")[2] for folder in folders] == ATTEMPTS
    assert [outcome["command"] for outcome in outcomes] == [
        f"wandb sync {folder}" for folder in folders
    ]
    assert all(outcome["warning"] is None for outcome in outcomes)


def test_config(records):
    run, config = run_and_config(records)
    assert config == CONFIG
    assert (run["run_id"], run["project"], run["run_group"]) == (
        "0123456789ab",
        "magicdec",
        "a group",
    )
    assert run["job_type"] == "compare"
    assert run["tags"] == ["mine", "tiny", "self", "streaming", "Some CPU @ 2.90GHz", "measured"]
    assert run["display_name"] == "tiny self streaming-128 gamma4 8x4096"


def test_a_run_of_a_plugin_that_is_not_imported_has_tags():
    config = with_changes(draft={"name": "echo"})
    assert "echo" in tracking._tags(config, METRICS)


def test_summary_holds_the_results_and_no_last_round(records):
    summary = updates(records, "summary")
    assert {key: summary[key] for key in METRICS} == METRICS
    assert (summary["status"], summary["attempt"]) == ("done", 1)
    kept = {
        r["metric"]["name"]
        for r in records
        if r["type"] == "metric" and not r["metric"]["summary"].get("none")
    }
    assert not kept & HISTORY[0].keys()


def test_history_is_a_line_per_round_and_what_the_machine_did_against_the_time(records):
    items = [r["history"]["item"] for r in records if r["type"] == "history"]
    rounds = [{key: item[key] for key in HISTORY[0]} for item in items if "round" in item]
    assert rounds == HISTORY
    assert [
        {key: item[key] for key in SYSTEM[0]} for item in items if "system/cpu" in item
    ] == SYSTEM
    steps = {
        r["metric"]["name"]: r["metric"].get("step_metric")
        for r in records
        if r["type"] == "metric"
    }
    assert steps["accepted"] == steps["seconds"] == "round"
    assert steps["system/cpu"] == "system/seconds"


def test_generations_and_the_chart_of_acceptance_lie_in_the_folder(told, records):
    files = Path(told[0][0]["folder"]) / "files"
    generations = next(json.loads(p.read_text()) for p in files.rglob("generations_*.table.json"))
    assert generations == {"columns": list(SAMPLES[0]), "data": [list(SAMPLES[0].values())]}
    positions = next(
        json.loads(p.read_text()) for p in files.rglob("acceptance_by_position_*.table.json")
    )
    assert positions["data"] == [["0", 0.85], ["1", 0.76], ["2", 0.68], ["3", 0.6]]
    assert any("acceptance_by_position" in key for key in updates(records, "config"))


def test_what_an_offline_run_needs_later_lies_in_the_run_s_folder(told):
    _, _, home = told
    staged = [path for path in home.rglob("artifacts/staging/*") if path.is_file()]
    assert staged
    assert {path.relative_to(home / "runs").parts[0] for path in staged} == set(ATTEMPTS)


def test_a_run_is_sent_again_from_the_store_alone(told, tmp_path):
    outcomes, _, home = told
    shutil.copytree(home / "runs", tmp_path / "runs", ignore=shutil.ignore_patterns("wandb"))
    process = python(
        "-m", "magicdec", "sync", tmp_path / "runs", "--mode", "offline", home=tmp_path
    )
    assert (process.returncode, process.stderr) == (0, "")
    folders = [
        next((tmp_path / "runs" / name / "wandb").glob("offline-run-*")) for name in ATTEMPTS
    ]
    lines = [f"{name}  wandb sync {folder}" for name, folder in zip(ATTEMPTS, folders, strict=True)]
    assert process.stdout.splitlines() == lines
    assert content(inspect(folders[1])) == content(inspect(outcomes[1]["folder"]))


def content(records):
    """Return what was logged, without times; a table's file has a random name."""
    run, config = run_and_config(records)
    facts = {
        key: run.get(key)
        for key in ("run_id", "project", "run_group", "job_type", "tags", "display_name")
    }
    items = [r["history"]["item"] for r in records if r["type"] == "history"]
    history = [{key: item[key] for key in item if key in HISTORY[0] | SYSTEM[0]} for item in items]
    tables = [
        sorted(key for key in item if key in ("generations", "acceptance_by_position_table"))
        for item in items
    ]
    summary = {
        key: value
        for key, value in updates(records, "summary").items()
        if key in METRICS or key == "started"
    }
    return facts, config, history, tables, summary


SUMMARY = """
import sys
from pathlib import Path
from magicdec.report.summary import summarize
summarize(Path(sys.argv[1]), True)
"""


def sweep_of_one(runs_dir, mode):
    """Return the folder of a sweep whose one run is stored, and the process that has shown its
    end.
    """
    changed = with_changes(wandb={"mode": mode})
    run = Run.open(runs_dir, "abc", changed)
    run.finish({"speedup": 1.5}, GENERATIONS, HISTORY)
    folder = runs_dir / "sweeps" / "2026-01-01_00-00-00_ours"
    record(folder, 0, run.id, ["draft.gamma=4"])
    address = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": SECRET}
    shorter = "from magicdec.tracking.loggers import wandb; wandb.INIT_TIMEOUT_S = 3.0"
    return folder, python("-c", f"{shorter}\n{SUMMARY}", folder, home=runs_dir.parent, **address)


@pytest.mark.parametrize("mode", ["offline", "online"])
@pytest.mark.slow
def test_the_report_of_a_sweep_is_an_artifact_of_the_sweep(tmp_path, mode):
    """It waits in the sweep's folder, also where W&B cannot be reached. Its figures are media,
    too.
    """
    folder, process = sweep_of_one(tmp_path / "runs", mode)
    assert process.returncode == 0, process.stderr
    assert process.stderr.count("warning: the report of the sweep: W&B failed") == (
        mode == "online"
    )
    (kept,) = folder.glob("wandb/offline-run-*")
    assert f"report in W&B     wandb sync {kept}\n" in process.stdout
    records = inspect(kept)
    (run,) = (record["run"] for record in records if record["type"] == "run")
    assert (run["job_type"], run["run_group"], run["display_name"]) == (
        "sweep",
        "a group",
        folder.name,
    )
    (artifact,) = (record["artifact"] for record in records if record["type"] == "artifact")
    assert (artifact["type"], artifact["name"]) == ("sweep", f"sweep-{folder.name}")
    entries = artifact["manifest"]["contents"]
    kept_bytes = {entry["path"]: Path(entry["local_path"]).read_bytes() for entry in entries}
    names = ("jobs.jsonl", "report.html", "speedup.png")
    assert kept_bytes == {name: (folder / name).read_bytes() for name in names}
    items = [record["history"]["item"] for record in records if record["type"] == "history"]
    assert [item["figures/speedup._type"] for item in items] == ["image-file"]


def test_intervals_are_numbers_for_charts():
    found = tracking._ends({"speedup": 1.5, "speedup_ci95": [1.25, 1.75], "alpha_ci95": None})
    assert found == {"speedup_ci95/low": 1.25, "speedup_ci95/high": 1.75}


def test_the_report_of_a_sweep_goes_nowhere_with_wandb_disabled(tmp_path):
    folder, process = sweep_of_one(tmp_path / "runs", "disabled")
    assert (process.returncode, "W&B" in process.stdout + process.stderr) == (0, False)
    assert sorted(path.name for path in folder.iterdir()) == [
        "jobs.jsonl",
        "report.html",
        "speedup.png",
    ]


@pytest.mark.extra
def test_a_dashboard_without_a_login_is_a_file(tmp_path):
    pytest.importorskip("wandb_workspaces")
    file = tmp_path / "spec.json"
    for number, (budget, speedup) in enumerate([(64, 1.25), (128, 1.75)]):
        run = Run.open(tmp_path / "runs", f"run{number}", with_changes(cache={"budget": budget}))
        run.finish(METRICS | {"speedup": speedup}, GENERATIONS, HISTORY)
        record(tmp_path / "runs" / "sweeps" / "mine", number, run.id, [])
    arguments = [
        "--entity",
        "me",
        "--sweep",
        "mine",
        "--file",
        file,
        "--runs-dir",
        tmp_path / "runs",
    ]
    process = python("-m", "magicdec", "dashboard", *arguments, home=tmp_path, WANDB_API_KEY=SECRET)
    assert (process.returncode, process.stdout) == (0, f"the specification is in {file}\n")
    spec = json.loads(file.read_text())
    sections = spec["workspace"]["spec"]["section"]["panelBankConfig"]["sections"]
    panels = [panel["config"] for section in sections for panel in section["panels"]]
    kinds = {
        panel["viewType"]: panel["config"] for section in sections for panel in section["panels"]
    }
    assert "Run Comparer" in kinds
    columns = [column["accessor"] for column in kinds["Parallel Coordinates Plot"]["columns"]]
    assert columns[:2] == ["config:cache.value.policy", "config:cache.value.budget"]
    (bars,) = [
        panel["metrics"]
        for panel in panels
        if any("_ci95" in name for name in panel.get("metrics") or ())
    ]
    assert bars == ["speedup_ci95/low", "speedup", "speedup_ci95/high"]
    axes = [(panel.get("xAxis"), panel.get("yAxis")) for panel in panels]
    assert ("config:batch.value.size", "summary:speedup") in axes
    assert ("summary:predicted/speedup", "summary:speedup") in axes
    text = json.dumps(spec["report"])
    assert '"name": "group"}, "op": "=", "value": "mine"' in text
    assert re.search(r"cache.budget=128 [^\"]*1\.75x", text), "what the sweep has found"
    named = {
        axis.removeprefix("summary:")
        for pair in axes
        for axis in pair
        if axis and axis.startswith("summary:")
    }
    assert named <= {*METRICS, "predicted/speedup"}, "every metric has the name that runs give it"
    assert "MARKER" not in file.read_text()


def test_no_secret_is_written(told):
    _, process, home = told
    assert "MARKER" not in process.stdout + process.stderr
    for path in home.rglob("*"):
        assert not path.is_file() or b"MARKER" not in path.read_bytes(), path


@pytest.mark.slow
def test_a_server_that_is_away_leaves_the_run_offline(tmp_path):
    address = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": SECRET, "PATIENCE_S": "3"}
    process = python(
        "-c", TELL, tmp_path / "runs", "online", 1, "0123456789ab", home=tmp_path, **address
    )
    outcome = json.loads(process.stdout)
    assert outcome["warning"].startswith("W&B failed, ")
    assert outcome["command"] == f"wandb sync {outcome['folder']}"
    assert Path(outcome["folder"], "run-0123456789ab.wandb").stat().st_size > 1000
    assert load_run(tmp_path / "runs" / "0123456789ab")["status"] == "done"
    assert "MARKER" not in process.stdout + process.stderr


def test_a_service_that_dies_while_it_is_told_loses_nothing(tmp_path):
    if shutil.which("pgrep") is None:
        pytest.skip("needs pgrep")
    process = python(
        "-c", KILL + TELL, tmp_path, "offline", 1, "0123456789ab", home=tmp_path, PATIENCE_S="5"
    )
    outcome = json.loads(process.stdout)
    assert outcome["warning"].startswith("W&B failed, ")
    assert load_run(tmp_path / "0123456789ab")["status"] == "done"
    shutil.rmtree(tmp_path / "0123456789ab" / "wandb")
    process = python("-m", "magicdec", "sync", tmp_path, "--mode", "offline", home=tmp_path)
    assert process.returncode == 0, process.stderr
    assert list((tmp_path / "0123456789ab" / "wandb").glob("offline-run-*/*.wandb"))


def test_online_without_a_key_is_one_clear_line(tmp_path):
    process = python("-c", CHECK, home=tmp_path)
    without, with_a_bad_one = process.stdout.splitlines()
    for line in (without, with_a_bad_one):
        assert line.startswith("wandb.mode=online: ")
        assert "`wandb login" in line
        assert "wandb.mode=offline" in line
    assert "no credentials" in without
    assert "WANDB_API_KEY invalid" in with_a_bad_one
    assert process.stderr == ""


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_other_modes_need_no_key(monkeypatch, mode):
    monkeypatch.setitem(sys.modules, "wandb", None)
    tracking.check({"wandb": {"mode": mode}})


@pytest.fixture
def run(tmp_path):
    run = Run.open(tmp_path, "0123456789ab", CONFIG)
    run.finish(METRICS, GENERATIONS, HISTORY)
    return FinishedRun(run.folder, CONFIG, run.result)


def test_disabled_does_nothing(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    before = sorted(run.folder.iterdir())
    assert tracking.log_run(replace(run, config=with_changes(wandb={"mode": "disabled"}))) is None
    assert sorted(run.folder.iterdir()) == before


def test_a_missing_package_is_a_warning(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    outcome = tracking.log_run(run)
    assert outcome.warning.startswith("W&B failed, ModuleNotFoundError")
    assert load_run(run.folder)["status"] == "done"
    with pytest.raises(
        UserError, match=r"^wandb.mode=online: the package wandb is missing: pip install wandb, or "
    ):
        tracking.check({"wandb": {"mode": "online"}})


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_whatever_it_raises_is_a_line_of_warning(run, monkeypatch, mode):
    def fail(**_):
        raise RuntimeError("it is down\nand says so at length")

    monkeypatch.setattr(wandb, "init", fail)
    before = dict(os.environ)
    outcome = tracking.log_run(replace(run, config=with_changes(wandb={"mode": mode})))
    assert outcome.warning.startswith("W&B failed, RuntimeError: it is down")
    assert "\n" not in outcome.warning
    assert outcome.command is None
    assert dict(os.environ) == before
    assert load_run(run.folder)["speedup"] == METRICS["speedup"]


def test_sync_command_can_be_pasted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert tracking.sync_command(tmp_path / "my runs" / "abc") == "wandb sync 'my runs/abc'"


def test_levels_of_load_are_told_against_the_load():
    """The load is then the x axis of a chart, not the order of the lines."""
    told = SimpleNamespace(metrics={}, rows=[])
    told.define_metric = lambda name, step_metric=None, summary=None: told.metrics.update(
        {name: step_metric}
    )
    told.log = told.rows.append
    levels = [
        {"concurrency": users, "speculative/tokens_per_second": 10.0 * users} for users in (1, 8)
    ]
    tracking._log_history(told, levels)
    assert told.metrics == {"concurrency": None, "speculative/tokens_per_second": "concurrency"}
    assert told.rows == levels
