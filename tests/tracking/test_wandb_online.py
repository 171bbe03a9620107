"""Runs that arrive at a stand-in for W&B's server, and runs that it refuses."""

import json
import re
import shutil
from base64 import b64encode
from pathlib import Path

import pytest
import yaml

from magicdec.tracking.reader import iter_runs
from magicdec.tracking.run_files import ROW, read_lines
from tests.programs import ROOT
from tests.tracking.processes import KILL, TELL, python, start
from tests.tracking.sample import CONFIG, HISTORY, METRICS, SAMPLES, SYSTEM, with_changes
from tests.tracking.stores import write_run
from tests.tracking.wandb_server import API_KEY, ENTITY, Received, WandbServer

pytest.importorskip("wandb", reason="W&B is not installed")

# The machine is looked at more often than a tiny run would let it be.
LAUNCH = """
import functools, sys
import launch
from magicdec import scenarios
scenarios.sampled = functools.partial(scenarios.sampled, 0.1)
sys.exit(launch.main())
"""
TINY = [
    "batch.size=2",
    "batch.context_len=128",
    "batch.generate_len=12",
    "scenario.repeats=1",
    "draft.gamma=2",
]
IDS = ["0123456789ab", "ba9876543210"]
SYNC = ("-m", "magicdec", "sync")
WANDB = ("-m", "wandb")


@pytest.fixture
def server():
    with WandbServer() as server:
        yield server
    assert server.unknown == []


def address(server, key=API_KEY):
    return {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": key}


def assert_no_secret(folder, *processes):
    secrets = [b"MARKER00", b64encode(f"api:{API_KEY}".encode())]
    said = "".join(process.stdout + process.stderr for process in processes).encode()
    kept = {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}
    assert not [
        path
        for path, text in {"said": said, **kept}.items()
        if any(secret in text for secret in secrets)
    ]


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """A comparison that is sent as it ends: the server, the run there and in the store, the process
    and its home.
    """
    home = tmp_path_factory.mktemp("home")
    arguments = [
        *TINY,
        f"runs_dir={home}/runs",
        "wandb.mode=online",
        "wandb.tags=[mine]",
        "wandb.group=ours",
    ]
    with WandbServer() as server:
        process = python("-c", LAUNCH, *arguments, home=home, cwd=home, **address(server))
    assert process.returncode == 0, process.stderr
    assert server.unknown == []
    (stored,) = iter_runs(home / "runs")
    return server, server.runs.pop(stored["id"]), stored, process, home


@pytest.mark.slow
def test_a_launched_run_arrives_with_what_it_is(launched):
    server, run, stored, process, _ = launched
    assert server.runs == {}, "and alone"
    facts = {"project": "magicdec", "groupName": "ours", "jobType": "compare"}
    facts["tags"] = ["mine", "tiny", "self", "streaming", stored["device"], "measured"]
    assert {key: run.facts[key] for key in facts} == facts
    assert {key: value for key, value in run.config.items() if key != "_wandb"} == stored["config"]
    assert run.config["cache"].keys() == {
        "policy",
        "budget",
        "num_sink",
    }, "no keys of options that were not chosen"
    assert run.exit_code == 0
    assert f"{server.url}/{ENTITY}/magicdec/runs/{stored['id']}" in process.stdout
    assert "send to W&B" not in process.stdout


def test_its_summary_is_its_result(launched):
    _, run, stored, _, _ = launched
    result = {key: value for key, value in stored.items() if key not in ("folder", "config")}
    assert {key: run.summary.get(key) for key in result} == result
    named = {
        "speedup",
        "acceptance_rate",
        "acceptance_length",
        "lossless/identical",
        "time/draft_ms",
        "status",
    }
    assert named <= run.summary.keys()


def test_its_history_is_what_it_told_live_a_line_per_round_and_then_the_machine_s(launched):
    _, run, stored, _, _ = launched
    folder = Path(stored["folder"])
    live, rounds, system = (
        read_lines(folder / f"{name}.jsonl", ROW) for name in ("live", "history", "system")
    )
    assert [line["repeat"] for line in live if "repeat" in line] == [1]
    assert rounds
    assert system
    sent = [
        {key: value for key, value in row.items() if not key.startswith("_")} for row in run.history
    ]
    assert sent[: len(live) + len(rounds) + len(system)] == live + rounds + system


def test_its_files_are_an_artifact_and_its_tables_hold_its_rows(launched):
    server, _, stored, _, _ = launched
    folder = Path(stored["folder"])
    (files,) = (
        one["files"] for one in server.artifacts.values() if one["artifactTypeName"] == "run"
    )
    for name in ("config.yaml", "generations.jsonl"):
        assert files[name] == (folder / name).read_bytes()
    rows = read_lines(folder / "samples.jsonl", ROW)
    samples = [{key: value for key, value in row.items() if key != "rounds"} for row in rows]
    assert server.table("generations", stored["id"]) == samples
    table = server.table("acceptance_by_position_table", stored["id"])
    rates = {row["position"]: row["acceptance_rate"] for row in table}
    assert rates == {str(i): stored[f"acceptance_rate/position_{i}"] for i in (0, 1)}


def test_its_key_is_told_to_nobody_else(launched):
    _, run, _, process, home = launched
    assert_no_secret(home, process)
    assert not [name for name, text in run.files.items() if b"MARKER" in text]
    assert "MARKER" not in json.dumps([run.config, run.facts, run.summary])


def content(server, name):
    """Return what has arrived of a run, without times; files have random names."""
    run = server.runs[name]
    config = {key: value for key, value in run.config.items() if key != "_wandb"}
    chosen = HISTORY[0] | SYSTEM[0]
    history = [{key: row[key] for key in row if key in chosen} for row in run.history]
    summary = {key: run.summary[key] for key in METRICS}
    facts = {
        key: run.facts[key] for key in ("groupName", "jobType", "tags", "project", "displayName")
    }
    return facts, config, history, summary, server.table("generations", name), run.exit_code


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """Two runs, told offline by two processes at once; to be copied by who changes their store."""
    home = tmp_path_factory.mktemp("home")
    processes = [start("-c", TELL, home / "runs", "offline", 1, name, home=home) for name in IDS]
    outcomes = [json.loads(process.finish().stdout) for process in processes]
    return dict(zip(IDS, outcomes, strict=True))


@pytest.fixture
def store(offline, tmp_path):
    """A copy of both."""
    return shutil.copytree(
        Path(next(iter(offline.values()))["folder"]).parents[2], tmp_path / "runs"
    )


@pytest.mark.slow
def test_runs_told_offline_in_parallel_arrive_once_each(offline, store, tmp_path, server):
    sent = python(*SYNC, store, home=tmp_path, **address(server))
    assert (sent.returncode, sent.stderr) == (0, "")
    urls = {line.partition("  ")[2] for line in sent.stdout.splitlines()}
    assert urls == {f"{server.url}/{ENTITY}/magicdec/runs/{name}" for name in offline}
    assert server.runs.keys() == offline.keys()
    first = {name: content(server, name) for name in offline}
    for facts, config, history, summary, generations, exit_code in first.values():
        assert (facts["groupName"], facts["jobType"]) == ("a group", "compare")
        assert config == with_changes(wandb={"mode": "online"})
        assert history == [*HISTORY, *SYSTEM, {}, {}], "and two tables"
        assert (summary, generations, exit_code) == (METRICS, SAMPLES, 0)
    for folder in store.glob("*/wandb"):
        shutil.rmtree(folder)
    again = python(*SYNC, store, home=tmp_path, **address(server))
    assert (again.returncode, again.stdout) == (0, sent.stdout)
    assert {name: content(server, name) for name in server.runs} == first
    assert_no_secret(tmp_path, sent, again)
    server.runs["0123456789ab"] = Received()
    python(*SYNC, store, home=tmp_path, **address(server))
    assert {name: content(server, name) for name in server.runs} == first, (
        "what is not there as a whole is sent again"
    )


FAIL = """
import sys
import launch
from magicdec.planning import build
def fail(*_):
    raise ZeroDivisionError("a bug")
build.engine = fail
sys.exit(launch.main())
"""


@pytest.mark.slow
def test_a_run_that_fails_arrives_as_failed_once(tmp_path, server):
    """Unless it was mistyped or stopped, which says nothing of it."""
    arguments = [*TINY, f"runs_dir={tmp_path}/runs", "wandb.mode=online"]
    process = python("-c", FAIL, *arguments, home=tmp_path, cwd=tmp_path, **address(server))
    assert process.returncode == 1
    ((name, run),) = server.runs.items()
    assert (run.exit_code, run.summary["status"], run.summary["kind"]) == (1, "failed", "crashed")
    assert run.summary["reason"] == "ZeroDivisionError: a bug"
    assert 0 < run.summary["duration_s"] < 600
    for kind in ("invalid", "interrupted"):
        write_run(tmp_path / "runs", kind, failed=kind)
    sent = python(*SYNC, tmp_path / "runs", home=tmp_path, **address(server))
    assert sent.stdout == f"{name}  {server.url}/{ENTITY}/magicdec/runs/{name}\n"
    assert list(server.runs) == [name]


@pytest.mark.slow
def test_what_a_server_refuses_is_kept(tmp_path, server):
    """Three runs in one process: it knows the key no more, is out of order, is gone in the middle
    of a run.
    """

    def refuse(what, sent):
        if what == "upsertBucket":
            return 401 if "gamma1" in sent else 500 if "gamma2" in sent else None
        return 0 if what == "file_stream" else None

    server.refuse = refuse
    runs = tmp_path / "runs"
    launcher = [
        "-m",
        "hydra/launcher=basic",
        "scenario=predict",
        "draft.gamma=1,2,3",
        "cache.budget=64",
    ]
    arguments = [
        ROOT / "tests" / "quick_launch.py",
        *launcher,
        f"runs_dir={runs}",
        "wandb.mode=online",
    ]
    quick = {"QUICK_STARTS": str(tmp_path), "QUICK_PATIENCE_S": "3"}
    process = python(*arguments, home=tmp_path, **quick, **address(server))
    assert process.returncode == 0, process.stderr
    stored = {run["config"]["draft"]["gamma"]: run for run in iter_runs(runs)}
    assert {gamma: run["status"] for gamma, run in stored.items()} == {
        1: "done",
        2: "done",
        3: "done",
    }
    warnings = re.findall(r"W&B +W&B failed, (.*)", process.stdout)
    assert (
        warnings[0]
        == "CommError: user is not logged in; `wandb login --relogin` changes the key, wandb.entity"
        " the team"
    )
    assert warnings[1].startswith("CommError: Timed out while retrying: HTTP 500")
    assert warnings[2] == "TimeoutError: Timed out finishing run."
    commands = re.findall(r"send to W&B +wandb (sync .*)", process.stdout)
    assert len(commands) == 3
    assert "Traceback" not in process.stderr + process.stdout
    assert_no_secret(tmp_path, process)

    server.refuse = lambda what, sent: None
    sent = python(*WANDB, *commands[0].split(), home=tmp_path, **address(server))
    assert sent.returncode == 0, sent.stderr
    again = python(*SYNC, runs, home=tmp_path, **address(server))
    assert (again.returncode, again.stderr) == (0, "")
    # The sweep's own.
    runs = {name: run for name, run in server.runs.items() if not name.startswith("sweep-")}
    arrived = {name: (len(run.history), run.summary["speedup"]) for name, run in runs.items()}
    assert arrived == {run["id"]: (2, gamma + 0.064) for gamma, run in stored.items()}


def test_sync_with_a_wrong_key_says_what_to_do(tmp_path, server):
    write_run(tmp_path, "abc")
    process = python(*SYNC, tmp_path, home=tmp_path, **address(server, "f" * 40))
    assert (process.returncode, process.stdout) == (2, "")
    assert (
        process.stderr
        == f"error: AuthenticationError: Failed to authenticate with {server.url}: user is not"
        " logged in; run `wandb login --relogin`\n"
    )


def test_a_wrong_key_is_found_before_the_work(tmp_path, server):
    settings = [*TINY, f"runs_dir={tmp_path}/runs", "wandb.mode=online"]
    process = python(
        "-c", LAUNCH, *settings, home=tmp_path, cwd=tmp_path, **address(server, "f" * 40)
    )
    assert (process.returncode, process.stdout) == (2, "")
    assert (
        process.stderr
        == "error: wandb.mode=online: AuthenticationError: Failed to authenticate with"
        f" {server.url}: user is not logged in; run `wandb login --relogin`, or set"
        " wandb.mode=offline and send the run later\n"
    )
    assert not list(iter_runs(tmp_path / "runs"))


def test_sync_tells_which_run_was_not_taken(store, tmp_path, server):
    server.refuse = lambda what, sent: (
        404 if what == "upsertBucket" and "ba9876543210" in sent else None
    )
    process = python(*SYNC, store, home=tmp_path, **address(server))
    assert (process.returncode, process.stderr) == (1, "")
    assert "ba9876543210  W&B failed, CommError: it is down\n" in process.stdout
    assert list(server.runs) == ["0123456789ab"]
    assert len(list(store.glob("*/wandb/offline-run-*"))) == 2, (
        "the store has it all, nothing more is to be kept"
    )


def test_data_that_w_and_b_drops_is_noticed(tmp_path, server):
    """It raises nothing then, and gives an address where nothing is to be seen."""
    server.refuse = lambda what, sent: 401 if what == "file_stream" else None
    process = python(
        "-c", TELL, tmp_path / "runs", "online", 1, "0123456789ab", home=tmp_path, **address(server)
    )
    outcome = json.loads(process.stdout)
    assert outcome["warning"].startswith("W&B failed, Fatal error while uploading data.")
    assert Path(outcome["folder"]).name.startswith("offline-run-")
    assert process.stderr == ""


@pytest.mark.skipif(shutil.which("pgrep") is None, reason="needs pgrep")
def test_a_service_that_dies_while_it_sends_leaves_the_run_offline(tmp_path, server):
    process = python(
        "-c", KILL + TELL, tmp_path, "online", 1, "0123456789ab", home=tmp_path, **address(server)
    )
    outcome = json.loads(process.stdout)
    assert outcome["warning"].startswith("W&B failed, ")
    sent = python(*WANDB, *outcome["command"].split()[1:], home=tmp_path, **address(server))
    assert sent.returncode == 0, sent.stderr
    facts, *found, _ = content(server, "0123456789ab")
    assert facts["groupName"] == "a group"
    assert found == [CONFIG, [*HISTORY, *SYSTEM, {}, {}], METRICS, SAMPLES]


# The agent looks for work more often than every five seconds.
AGENT = """
from wandb import wandb_agent
from wandb.cli.cli import cli
wandb_agent.Agent.POLL_INTERVAL = 0.1
cli()
"""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("grid", marks=pytest.mark.soak),
        pytest.param("bayes", marks=pytest.mark.slow),
    ],
)
def test_an_agent_s_runs_are_those_of_its_sweep(name, tmp_path, server):
    sweep = yaml.safe_load((ROOT / "sweeps" / "wandb" / f"{name}.yaml").read_text())
    sweep["program"] = str(ROOT / "tests" / "quick_launch.py")
    place = sweep["command"].index("${args_no_hyphens}")
    sweep["command"][place:place] = ["scenario=predict", f"runs_dir={tmp_path}/runs"]
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    made = python(
        *WANDB, "sweep", tmp_path / "sweep.yaml", home=tmp_path, cwd=tmp_path, **address(server)
    )
    command = re.search(r"wandb agent (\S+)", made.stdout + made.stderr)
    quick = {"QUICK_STARTS": str(tmp_path)} | address(server)
    agent = python(
        "-c", AGENT, "agent", "--count=1", command[1], home=tmp_path, cwd=tmp_path, **quick
    )
    assert agent.returncode == 0, agent.stderr
    ((given, run),) = server.runs.items()
    assert "W&B failed" not in agent.stdout
    assert (given, run.facts["sweep"]) == ("sweep0-run0", "sweep0")
    gamma, budget = run.config["draft"]["gamma"], run.config["cache"]["budget"]
    lowest = {
        key: entry.get("min") or entry["values"][0] for key, entry in sweep["parameters"].items()
    }
    assert {"draft.gamma": gamma, "cache.budget": budget} == lowest
    assert run.summary["speedup"] == gamma + budget / 1000
    again = python(*SYNC, tmp_path / "runs", home=tmp_path, **address(server))
    assert again.returncode == 0, again.stdout
    assert list(server.runs) == [given]


@pytest.mark.extra
def test_a_dashboard_is_saved_with_a_login(tmp_path, server):
    pytest.importorskip("wandb_workspaces")
    arguments = ["--entity", ENTITY, "--sweep", "ours"]
    process = python(
        "-m", "magicdec", "dashboard", *arguments, home=tmp_path, cwd=tmp_path, **address(server)
    )
    assert process.returncode == 0, process.stderr
    workspace, report = server.views
    assert [view["projectName"] for view in server.views] == ["magicdec", "magicdec"]
    assert (workspace["displayName"], report["displayName"]) == ("magicdec", "ours")
    assert re.fullmatch(
        rf"{server.url}/{ENTITY}/magicdec\?nw=\w+\n.*/reports/ours--view2\n", process.stdout
    )
    assert list(tmp_path.glob("*.json")) == []
    for view in server.views:
        panel = next(
            panel
            for panel in panels_of(json.loads(view["spec"]))
            if panel.get("viewType") == "Vega2"
        )
        ((chart, drawn),) = server.charts.items()
        assert panel["config"]["panelDefId"] == chart
        (asked,) = panel["config"]["userQuery"]["queryFields"]
        (keys,) = [field["args"] for field in asked["fields"] if field["name"] == "summary"]
        settings = panel["config"]["fieldSettings"]
        assert set(settings.values()) == {"name", *keys[0]["value"]}
        assert set(keys[0]["value"]) <= METRICS.keys()
        assert set(re.findall(r"\$\{field:(\w+)\}", json.dumps(drawn))) == settings.keys()


def panels_of(spec):
    """Every panel of a workspace or a report, wherever it is in there."""
    if isinstance(spec, list):
        return [panel for part in spec for panel in panels_of(part)]
    if not isinstance(spec, dict):
        return []
    return (
        [spec]
        if "viewType" in spec
        else [panel for part in spec.values() for panel in panels_of(part)]
    )
