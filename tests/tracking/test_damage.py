"""Run files damaged in some hundreds of ways: every command says so in a line, and shows the rest
of the store.
"""

import csv
import json
import os
import random
import shutil
from importlib.util import find_spec

import pytest
import yaml

import magicdec
from magicdec.commands import clean, show, sync
from magicdec.commands.report import main as report
from magicdec.errors import JobFailed
from magicdec.tracking import reader, sweep
from magicdec.tracking import store as store_module
from magicdec.tracking.loggers import wandb
from magicdec.tracking.store import Run
from tests.tracking.sample import CONFIG, METRICS, ROUNDS, SAMPLE, with_changes
from tests.tracking.stores import data_of

GENERATION = {
    "row": 0,
    "context_len": 9,
    "autoregressive": [5, 6],
    "speculative": [*range(7)],
    "rounds": ROUNDS,
}
LEVELS = [
    {"concurrency": n, "speculative/tokens_per_second": 10.0 * n, "speedup": 1.5} for n in (1, 2)
]
FILES = ("result.json", "config.yaml", "samples.jsonl", "generations.jsonl", "history.jsonl")
ODD = [None, True, -1, 7, 0.5, 2**70, 10**400, float("nan"), float("inf")]
ODD += [
    "",
    "x",
    "\x1b[31m",
    "\ud800",
    "\u2028",
    "\u202e",
    [],
    {},
    [[]],
    [None],
    {"\x1b": 1},
    {"a": {"b": [1]}},
]
TORN = [b"", b"\x00", b"\xff", b"\x1b[2J", b"\n", b"{", b"]", b": ", b"&a [*a, *a]", b"9" * 5000]
TORN += [b"[" * 40_000, b"- " * 40_000]  # an overflow of libyaml's stack
BATCHES, DAMAGED = 5, 50


def write(runs_dir, name, config, levels=()):
    run = Run.open(runs_dir, name, config, ["a=1"])
    run.finish(METRICS, [GENERATION], levels or [{"round": 0, "accepted": 1.5}], [SAMPLE])


def tear(content, rng):
    """Cut a file, or put something into it."""
    start, end = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    return content[:start] + (b"" if rng.random() < 0.3 else rng.choice(TORN) + content[end:])


def alter(content, rng):
    """Replace or remove a value, at any depth, of a JSON or YAML document or of a line of
    several.
    """
    places = [
        (content, key) for key in (content if isinstance(content, dict) else range(len(content)))
    ]
    while places:
        node, key = rng.choice(places)
        if not isinstance(node[key], dict | list) or not node[key] or rng.random() < 0.3:
            break
        places = [
            (node[key], inner)
            for inner in (node[key] if isinstance(node[key], dict) else range(len(node[key])))
        ]
    if rng.random() < 0.3:
        del node[key]
    else:
        node[key] = rng.choice(ODD)


def damage(path, rng):
    if rng.random() < 0.4:
        path.write_bytes(tear(path.read_bytes(), rng))
    elif path.suffix == ".yaml":
        content = yaml.safe_load(path.read_text())
        alter(content, rng)
        path.write_text(yaml.safe_dump(content))
    else:
        lines = [path.read_text()] if path.suffix == ".json" else path.read_text().splitlines()
        contents = [json.loads(line) for line in lines]
        alter(contents if rng.random() < 0.1 else rng.choice(contents), rng)
        path.write_text("".join(json.dumps(content) + "\n" for content in contents))


@pytest.fixture(params=range(BATCHES))
def store(request, tmp_path):
    """Two sound runs, a sweep, a folder whose name is no text, and many damaged runs."""
    rng = random.Random(request.param)
    write(tmp_path, "a0", CONFIG)
    write(tmp_path, "a1", with_changes(scenario={"name": "serve"}), LEVELS)
    names = [f"d{number:02}" for number in range(DAMAGED)]
    for name in names:
        shutil.copytree(tmp_path / rng.choice(["a0", "a1"]), tmp_path / name)
        damage(tmp_path / name / rng.choice(FILES), rng)
    shutil.copytree(tmp_path / "a0", tmp_path / os.fsdecode(b"\xff\x1b"))
    sweep_dir = tmp_path / "sweeps" / "one"
    for number, name in enumerate([*names, "a0", "a1"]):
        sweep.record(sweep_dir, number, name, ["a=1"])
    damage(sweep_dir / sweep.JOBS, rng)
    (sweep_dir / sweep.STOPPED).write_bytes(rng.choice(TORN))
    return tmp_path


@pytest.fixture
def run(capfd, caplog):
    """Run a command line and check that nothing but text reaches the terminal, and one line of it
    is the error.
    """

    def check(main, *arguments):
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        lines = [
            *out.split("\n"),
            *err.split("\n"),
            *(record.getMessage() for record in caplog.records),
        ]
        assert all(line.isprintable() for line in lines), arguments
        assert [line.startswith("error: ") for line in err.splitlines()].count(True) == (
            code == 2
        ), err
        return out

    return check


@pytest.mark.slow
def test_damaged_runs_are_a_line_each_and_the_rest_is_shown(store, run, monkeypatch):
    names = sorted(
        path.name for path in store.iterdir() if path.name.isprintable() and path.name != "sweeps"
    )
    for name in names:
        run(show.main, store / name)
        run(report, "compare", store / "a0", store / name, "--all")
    for number in range(len(names)):
        sweep.attempt_of(store / "sweeps" / "one", number)
    with pytest.raises(JobFailed):
        sweep.refuse_if_stopped(store / "sweeps" / "one", 0)
    run(report, store, "--columns", "id,status,kind,reason,target.name,device,folder")
    run(report, store, "--group-by", "target.name,cache.policy")
    run(report, store, "--sort", "speedup", "--where", "budget>0")
    run(report, store, "--sweep", "one", "--html", store / "sweep.html")
    parquet = ["--parquet", store / "runs.parquet"] if find_spec("pyarrow") else []
    run(report, store, "--html", store / "page.html", "--csv", store / "runs.csv", *parquet)
    with (store / "runs.csv").open() as file:
        rows = [
            (row["id"], row["load.concurrency"], row["speedup"]) for row in csv.DictReader(file)
        ]
    expected = [("a0", "", str(METRICS["speedup"])), ("a1", "1", "1.5"), ("a1", "2", "1.5")]
    assert [row for row in rows if row[0] in ("a0", "a1")] == expected
    assert {"a0", "a1"} <= set(data_of((store / "page.html").read_text())["columns"]["id"])
    assert {"a0", "a1"} <= set(magicdec.runs(store)["id"])
    assert {"a0", "a1"} <= set(magicdec.histories(store)["id"])
    monkeypatch.setattr(store_module, "commit", dict)  # asking git takes most of the time
    monkeypatch.setattr(wandb, "_send", lambda run: wandb.Logged(run.name))
    sent = run(sync.main, store, "--mode", "offline")
    assert "a0" in sent
    assert "a1" in sent
    run(clean.main, store, *(f"--kind={kind}" for kind in clean.KINDS))
    assert (store / "a0" / "result.json").exists()
    for name in names:
        assert reader.run_of(Run.open(store, name, CONFIG).id) == name
