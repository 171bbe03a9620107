"""The documentation: its commands run or compose, generated pages are current, and every metric is
defined.
"""

import json
import re
import subprocess
import sys
import tomllib
from itertools import chain

import pytest
import torch
from pydantic import TypeAdapter

import magicdec
from magicdec import cli
from magicdec.commands.report import main
from magicdec.config.choices import CacheConfig, DraftConfig
from magicdec.config.options import known_keys
from magicdec.measure.expert_choices import line_of, metrics_of
from magicdec.tracking.result_types import RunFacts, RunResult
from magicdec.units import WAYS
from tests.programs import ROOT, python
from tools import check_docs, reference

COMMANDS = check_docs.commands()
FIRST = [command for command in COMMANDS if command.page in ("README.md", "docs/quickstart.md")]
# What the end of a run must print, by a word of its command; the first that fits counts.
SAYS = {
    "scenario=predict": (
        r"draft\.gamma=2(, the best [\w ]+,)? is predicted to run at [01]\.\d+x per row and"
        r" [01]\.\d+x per batch \(pays",
        r"\(pays in every comparable measurement of \d+ sources; [^)]*\): ",
        r" S\* is [\d,]+ \(measured .*; alpha 0\.\d\d: ",
        r" memory per GPU: [\d.]+ of 80 GiB ",
    ),
    "scenario=plan": (
        (
            r"plans.* 64 +self +streaming +512 +\d+ +[\d,]+ +[\d.]+ +[1-9]\.\d\dx \| \d\.\d\dx 64"
            r" +none .* 1\.00x "
        ),
    ),
    "": (
        r" autoregressive +speculative ",
        r" speedup +\d+\.\d\dx per row and \d+\.\d\dx per batch",
        r" acceptance rate +[\d.]+% of proposals",
        r" lossless +yes,",
    ),
}


def test_the_readme_begins_with_its_two_commands():
    texts = [command.text for command in FIRST]
    assert texts[:2] == [
        "pip install -e . && python launch.py",
        "pip install -e '.[test]' && python -m pytest",
    ]
    assert sum(command.kind == "run" for command in FIRST) >= 10
    assert len(COMMANDS) >= 80


@pytest.fixture
def launch(tmp_path, monkeypatch, capfd, hydra_logging):
    """A function that runs `python launch.py` with these arguments, and returns what it prints:
    in this process or, with `is_program`, in one of its own. What it writes stays out of the
    checkout.
    """

    def run(arguments, is_program):
        if is_program:
            done = python(ROOT / "launch.py", *arguments, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            return done.stdout
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["launch.py", *arguments])
        code, said = cli.main(), capfd.readouterr()
        assert code == 0, said.err
        return said.out

    return run


@pytest.mark.parametrize(
    "command", [c for c in FIRST if c.kind == "run"], ids=lambda command: command.text
)
def test_first_commands_run_and_print_what_they_are_for(command, tmp_path, launch, capfd):
    arguments = check_docs.small(command.arguments, tmp_path)
    logs_to_wandb = "wandb" in command.text or command.text == "python launch.py"
    if not logs_to_wandb:
        arguments[arguments.index("wandb.mode=offline")] = "wandb.mode=disabled"
    # test_plugins.py runs a sweep with the default launcher, whose processes import everything.
    if "-m" in arguments:
        arguments.append("hydra/launcher=basic")
    printed = launch(arguments, is_program=logs_to_wandb)
    results = [json.loads(path.read_text()) for path in tmp_path.glob("*/result.json")]
    assert results
    assert all(r["status"] == "done" and r.get("lossless/identical", True) for r in results)
    said = " ".join(printed.split())
    for pattern in next(patterns for words, patterns in SAYS.items() if words in command.text):
        assert re.search(pattern, said), (pattern, printed)
    assert " ? " not in said
    assert main([str(tmp_path)]) == 0
    assert results[0]["id"] in capfd.readouterr().out


@pytest.mark.parametrize(
    "command", [c for c in FIRST if c.kind in ("compose", "parse")], ids=lambda c: c.text
)
def test_first_commands_are_valid(command):
    assert check_docs.check(command) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [c for c in COMMANDS if c not in FIRST and c.kind in ("compose", "parse")],
    ids=lambda c: c.text,
)
def test_all_other_commands_are_valid(command):
    """To run those that can run here, too: python tools/check_docs.py."""
    assert check_docs.check(command) == ""


def test_a_wrong_command_is_found():
    for kind, *arguments in (
        ("compose", "cache.budgt=1"),
        ("compose", "target=nobody"),
        ("parse", "report", "runs", "--colums", "a"),
    ):
        assert check_docs.check(check_docs.Command("", "", kind, tuple(arguments))) != ""


def test_what_can_run_here_is_run():
    """Every command is run, but those that need what is not here."""
    reasons = {command.text: check_docs.reason_not_to_run(command) for command in COMMANDS}
    assert sum(not why for why in reasons.values()) > 80
    assert (
        reasons[
            "python launch.py scenario=plan target=llama-3.1-8b hardware=h100"
            " batch.context_len=16000"
        ]
        == ""
    )
    assert (
        reasons["magicdec serve target=tiny draft=self batch.size=8"]
        == "needs a client or a server of W&B's"
    )
    assert reasons["python launch.py target=llama-3.1-8b"] == "needs a checkpoint"


def test_a_command_that_needs_an_earlier_one_of_its_page_is_run_behind_it(monkeypatch, capsys):
    page, later = "docs/cost-model.md", "python launch.py scenario=predict hardware=calibrated"
    chosen = [command for command in COMMANDS if command.text in ("magicdec calibrate", later)]
    done = []

    def run_here(command, folder, limit):
        done.append((command.text, folder))
        return ""

    monkeypatch.setattr(check_docs, "commands", lambda: chosen)
    monkeypatch.setattr(check_docs, "run_here", run_here)
    monkeypatch.setattr(check_docs, "_launch", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["check_docs.py"])
    assert check_docs.main() == 0
    assert [text for text, _ in done] == ["magicdec calibrate", later]
    assert done[0][1] == done[1][1]
    assert page in capsys.readouterr().out


def test_commands_with_a_hyphen_are_read_as_commands():
    assert check_docs._classified("page", "magicdec check-plugin my_policy").kind == "parse"


def test_repeats_until_they_agree_end_within_the_time_of_a_command(tmp_path):
    given = ("scenario.repeats=auto", "scenario.max_minutes=10")
    assert {"scenario.repeats=auto", "scenario.max_minutes=0.5"} <= {
        *check_docs.small(given, tmp_path)
    }


def test_a_plan_of_the_reader_is_not_in_the_way(tmp_path):
    """In a checkout, conf/experiment/planned.yaml is an option of every folder."""
    names = {key for key in check_docs.small(("scenario=plan",), tmp_path) if "save_as" in key}
    assert names == {"scenario.save_as=of_the_documentation"}
    given = check_docs.small(("scenario=plan", "scenario.save_as=null"), tmp_path)
    assert {key for key in given if "save_as" in key} == {"scenario.save_as=null"}
    schedule = check_docs.small(("scenario=plan", "scenario.schedule=vllm"), tmp_path)
    assert not [key for key in schedule if "save_as" in key], "later commands name its file"


def test_commands_that_are_new_are_known(monkeypatch):
    with pytest.raises(SystemExit, match="--since no-such-commit: no such commit"):
        check_docs.changed_since("no-such-commit")
    new = check_docs.Command("README.md", "magicdec new", "run")
    monkeypatch.setattr(check_docs, "commands", lambda: [new])
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True).returncode == 0:
        assert check_docs.changed_since("HEAD") == {"magicdec new"}


def test_a_command_that_fails_is_found_where_it_is_run(tmp_path):
    command = check_docs.Command("page", "magicdec report nowhere", "parse")
    assert "nowhere" in check_docs.run_here(command, tmp_path, 60)
    assert check_docs.run_here(command._replace(text="magicdec --version"), tmp_path, 60) == ""
    assert check_docs.run_here(command, tmp_path, 0.001) == "it took longer than 0.001 s"


def test_the_page_of_commands_has_every_command():
    text = reference.WRITERS["cli.md"]()
    assert re.findall(r"^## magicdec ([\w-]+)$", text, re.MULTILINE) == list(cli.COMMANDS)


def test_every_setting_is_in_the_reference():
    text = reference.WRITERS["configuration.md"]()
    shown = set(re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE))
    hints = CacheConfig.__annotations__ | DraftConfig.__annotations__
    facts = {"drafts", "one_row"} | {
        name for name, hint in hints.items() if "ClassVar" in str(hint)
    }
    groups = {key.rpartition(".")[0] for key in known_keys()} | {"draft.model", "draft.cache"}
    copies = ("draft.model.", "draft.cache.", "target.architecture.rope_scaling.")
    keys = {
        key
        for key in known_keys()
        if not key.startswith(copies) and key.rpartition(".")[2] not in facts
    }
    assert keys - groups - shown == set()


DEFINED = [
    name
    for name in re.findall(
        r"`([\w/<>.-]+)`", (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    )
    if not re.fullmatch(r"<\w+>", name)  # a placeholder, of any metric
]
PATTERNS = [
    re.compile(re.sub(r"<\w+>", lambda found: r"\d+" if found[0] == "<i>" else r"[\w/.]+", name))
    for name in DEFINED
]
# Those without a number or a name in them, of which a type can tell.
NAMED = {name.replace("<way>", way) for name in DEFINED for way in WAYS}
NAMED = {name for name in NAMED if "<" not in name}
SMALL = [
    "batch.size=4",
    "batch.context_len=64",
    "batch.generate_len=8",
    "cache.budget=16",
    "scenario.repeats=3",
]
SERVE = [
    "scenario=serve",
    "scenario.num_requests=4",
    "scenario.latency_ms=9",
    "scenario.concurrencies=[2]",
]

PLAN = [
    "scenario=plan",
    "hardware=h100",
    "target=llama-3.1-8b",
    "scenario.alpha=0.8",
    "scenario.save_as=null",
]
VERIFY = [
    "scenario=verify",
    "scenario.batch_sizes=[2]",
    "scenario.context_lens=[64]",
    "scenario.gammas=[1]",
    "scenario.repeats=2",
    "batch.generate_len=8",
    "cache.budget=16",
]
PROFILE = [
    "scenario=profile",
    "scenario.batch_sizes=[2]",
    "scenario.context_lens=[64]",
    "scenario.gammas=[1,2]",
    "cache.budget=16",
]


@pytest.mark.parametrize(
    "overrides",
    [
        SMALL,
        [*SMALL, "sampling=sample", "cache=quest", "data=ruler", "batch.context_len=256"],
        [*SMALL[:4], *SERVE],
        [
            "scenario=predict",
            "hardware=8xa100",
            "target=llama-3.1-8b",
            "batch.size=48",
            "batch.context_len=32000",
        ],
        PLAN,
        [*PLAN, "scenario.schedule=vllm", "draft=ngram"],
        VERIFY,
        PROFILE,
    ],
    ids=["compare", "sampled", "serve", "predict", "plan", "schedule", "verify", "profile"],
)
def test_every_metric_is_defined(overrides, tmp_path):
    run = magicdec.run([*overrides, f"runs_dir={tmp_path}", "wandb.mode=disabled"])
    levels = [line for line in run.history if "scenario=serve" in overrides]
    undefined = {
        key
        for key in chain(run.metrics, *levels)
        if not any(pattern.fullmatch(key) for pattern in PATTERNS)
    }
    assert undefined == set()
    TypeAdapter(RunResult).validate_python(run.metrics)
    assert {key for key in run.metrics if key in NAMED} <= RunResult.__annotations__.keys()


def test_metrics_of_experts_are_defined():
    """The bundled models have none."""
    figures = metrics_of([line_of(torch.tensor([[[0, 1], [0, 2]]]), num_experts=4, most=2)])
    assert len(figures) == 3
    assert {key for key in figures if not any(p.fullmatch(key) for p in PATTERNS)} == set()


def test_every_metric_that_has_a_type_is_defined():
    figures = RunResult.__annotations__.keys() - RunFacts.__annotations__.keys()
    assert len(figures) > 100
    assert {key for key in figures if not any(p.fullmatch(key) for p in PATTERNS)} == set()


def test_every_extra_that_is_named_exists():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    known = set(project["optional-dependencies"])
    files = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "docs").rglob("*.ipynb"),
    ]
    files += [*(ROOT / "magicdec").rglob("*.py"), *(ROOT / "conf").rglob("*.yaml")]
    named = re.compile(r"(?:magicdec|-e '?\.|install '?\.)\[([a-z,]+)\]")
    texts = {file: ",".join(named.findall(file.read_text(encoding="utf-8"))) for file in files}
    assert {
        file: unknown
        for file, text in texts.items()
        if (unknown := set(text.split(",")) - known - {""})
    } == {}
    assert any("serve" in text for text in texts.values())


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    """Every cell runs in turn, in an empty folder; the sweep is lossless, and its prediction pays
    in long contexts.
    """
    pytest.importorskip("matplotlib").use("agg")
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "docs/tour.ipynb").read_text(encoding="utf-8"))["cells"]
    names = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert names["runs"]["lossless/identical"].all()
    assert list(names["runs"]["draft.gamma"]) == [1, 2, 3, 5]
    assert names["speedups"][-1] > 1 > names["speedups"][0]
