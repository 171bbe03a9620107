"""The command of a sweep, in this process: what it runs, skips, lists and says."""

import errno
import os
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hydra_plugins.magicdec import _groups, _sweeper
from magicdec import cli
from magicdec.commands import report
from magicdec.tracking.lock import locked
from magicdec.tracking.reader import iter_runs
from magicdec.tracking.sweep import jobs
from tests.sweeps.grid import COMMON, finished, start


@pytest.fixture
def here(quick, monkeypatch, capfd, tmp_path, hydra_logging):

    def with_arguments(*arguments, runs="runs"):
        monkeypatch.setattr(
            sys, "argv", ["launch.py", *arguments, f"runs_dir='{tmp_path / runs}'", *COMMON]
        )
        code = cli.main()
        return SimpleNamespace(code=code, **capfd.readouterr()._asdict())

    return with_arguments


@pytest.mark.parametrize("own", [_sweeper.WITHOUT_TASKS, ()], ids=["jobs", "a task"])
def test_fail_fast(here, starts, monkeypatch, own):
    monkeypatch.setattr(_sweeper, "WITHOUT_TASKS", own)
    sweep = here("-m", "hydra/launcher=basic", "sweep.fail_fast=true", "draft.gamma=6,1,2")
    assert sweep.code == 1
    assert re.findall("job (.) is not started", sweep.err) == ["1", "2"]
    assert len(list(starts.iterdir())) == 1


def test_turns_are_as_many_for_all_jobs(here):
    sweep = here("-m", "sweep.turns=true", "scenario.repeats=1,2")
    assert sweep.code == 2
    assert "sweep.turns=true: every job takes scenario.repeats turns" in sweep.err


def order(starts):
    """The gammas of the runs, in the order in which they were begun."""
    names = sorted(
        (path.name.split("-") for path in starts.iterdir()), key=lambda parts: int(parts[2])
    )
    return [int(gamma) for gamma, *_ in names]


@pytest.mark.parametrize(("limit", "firsts"), [("null", [0, 1]), ("2", [0, 4, 1, 5])])
@pytest.mark.slow
def test_a_launcher_of_tasks_runs_the_jobs_of_a_group_in_one(
    here, starts, monkeypatch, tmp_path, limit, firsts
):
    """Each job has its number and result; one that fails is one failed run."""
    tasks, run_all = [], _groups.GroupTask.__call__

    def task(self, first):
        tasks.append(self.groups[len(tasks)][0].number)
        return run_all(self, first)

    monkeypatch.setattr(_sweeper, "WITHOUT_TASKS", ())
    monkeypatch.setattr(_groups.GroupTask, "__call__", task)
    own = ["draft.gamma=1,6,2", "data.seed=1,2", "cache.budget=8", f"sweep.jobs_per_task={limit}"]
    sweep = here("-m", "hydra/launcher=basic", *own)
    assert (sweep.code, tasks) == (1, firsts)
    assert sweep.err.count(f"hydra/launcher=basic: 6 jobs in {len(firsts)} tasks") == 1
    assert order(starts) == [1, 6, 2] * 2
    (sweep_dir,) = (tmp_path / "runs" / "sweeps").iterdir()
    stored = {run["id"]: run for run in iter_runs(tmp_path / "runs")}
    done = [stored[job["id"]] for job in jobs(sweep_dir)]
    assert [(run["config"]["draft"]["gamma"], run["config"]["data"]["seed"]) for run in done] == [
        (gamma, seed) for gamma in (1, 6, 2) for seed in (1, 2)
    ]
    assert [run["status"] for run in done] == ["done"] * 2 + ["failed"] * 2 + ["done"] * 2


@pytest.mark.parametrize("change", ["sweep.share=none", "scenario=predict", "engine=transformers"])
def test_jobs_that_share_nothing_are_tasks_of_their_own(here, starts, monkeypatch, change):
    monkeypatch.setattr(_sweeper, "WITHOUT_TASKS", ())
    sweep = here("-m", "hydra/launcher=basic", change, "draft.gamma=1,2")
    assert sweep.code == 0, sweep.err
    assert " in 1 task" not in sweep.err


def test_a_sweep_ends_with_its_table_its_page_and_its_figures(here, tmp_path, monkeypatch):
    keys = ("sweep.name=mine", "sweep.figures=true", "draft.gamma=1,6")
    sweep = here("-m", "hydra/launcher=basic", *keys, runs="my runs")
    (folder,) = (tmp_path / "my runs" / "sweeps").glob("*_mine")
    assert sweep.code == 1
    assert "2 runs: 1 done, 1 failed\n" in sweep.out
    for name in ("report.html", "speedup.png"):
        assert f"written           {folder / name}\n" in sweep.out
        assert (folder / name).stat().st_size > 1000
    command = shlex.split(re.search(r"magicdec report (.*)", sweep.out)[1])
    assert report.main(command) == 0
    monkeypatch.setattr(Path, "write_bytes", refuse)
    sweep = here("-m", "hydra/launcher=basic", "draft.gamma=1")
    assert (sweep.code, sweep.out.count("not written       ")) == (0, 1)


@pytest.mark.parametrize("launcher", ["basic", "magicdec"])
@pytest.mark.slow
def test_a_sweep_tells_of_jobs_that_were_no_runs(here, starts, tmp_path, launcher):
    if launcher == "basic":
        sweep = here("-m", "hydra/launcher=basic", "scenario=predict", "draft.gamma=1,1000")
    else:  # not in this process, whose fork server may have the stderr of an earlier test
        sweep = finished(start(tmp_path / "runs", "draft.gamma=1,1000"))
    assert sweep.code == cli.USER_ERROR
    assert sweep.err.count("draft.gamma=1000: must be below") == 1
    assert "1 job ended before there was a run: see the errors above\n" in sweep.out
    assert "1 run: 1 done\n" in sweep.out
    sweep = here("-m", "hydra/launcher=basic", "scenario=predict", "draft.gamma=1,2")
    assert (sweep.code, sweep.err.count("done already")) == (0, 1), "with whichever launcher"
    assert sorted(run["attempt"] for run in iter_runs(tmp_path / "runs")) == [1, 1]


def test_a_sweep_that_cannot_write_says_so(here, tmp_path):
    (tmp_path / "runs").write_text("a file, where a folder should be")
    sweep = here("-m", "hydra/launcher=basic", "draft.gamma=1,2")
    assert sweep.code == cli.USER_ERROR
    (line,) = [line for line in sweep.err.splitlines() if line.startswith("error: ")]
    assert f"runs_dir={tmp_path / 'runs'}: cannot write {tmp_path / 'runs'}" in line
    assert line.endswith("choose a folder with runs_dir=FOLDER")
    assert "Traceback" not in sweep.err


def refuse(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_dry_run_lists_and_leaves_nothing(here, tmp_path, starts):
    assert here("-m", "hydra/launcher=basic", "draft.gamma=1,6").code == 1
    before = sorted((tmp_path / "runs").rglob("*"))
    sweep = here("-m", "sweep.dry_run=true", "draft.gamma=1,2,6")
    assert sweep.code == 0
    lines = [line.split() for line in sweep.out.splitlines() if " GiB " in line]
    assert [line[1:4] for line in lines] == [
        [state, "3.00", "GiB"] for state in ("done", "new", "crashed")
    ]
    assert [" ".join(line[4:6]) for line in lines] == ["0 s", "2 min", "2 min"]
    assert "about 3 min in all" in sweep.out
    assert (
        here("-m", "hydra/launcher=basic", "sweep.dry_run=true", "draft.gamma=1,1000").code
        == cli.USER_ERROR
    )
    assert sorted((tmp_path / "runs").rglob("*")) == before
    assert len(list(starts.iterdir())) == 2


def test_a_single_run_that_another_process_is_running_is_refused(here, tmp_path):
    assert here().code == 0
    (path,) = (tmp_path / "runs").glob("*/result.json")
    with locked(path.parent):
        refused = here()
    assert refused.code == cli.USER_ERROR
    assert f"error: run {path.parent.name} is being run by process {os.getpid()}" in refused.err


def test_a_sweep_skips_what_the_same_code_has_done(here, starts, tmp_path, monkeypatch):
    sweep = ["-m", "hydra/launcher=basic", "draft.gamma=1"]
    assert here(*sweep).code == 0
    assert ": done already, skipped (resume=false" in here(*sweep).err
    assert " done " in here(*sweep, "sweep.dry_run=true").out
    monkeypatch.setattr("magicdec.tracking.software.PACKAGE_HASH", "edited")
    assert ": done already with other source, skipped" in here(*sweep, "resume=any_version").err
    assert " other version " in here(*sweep, "sweep.dry_run=true").out
    assert len(list(starts.iterdir())) == 1
    after = here(*sweep, "sweep.name=after")
    assert "done already" not in after.err
    assert len(list(starts.iterdir())) == 2
    first, second = iter_runs(tmp_path / "runs")
    assert second["id"] == f"{first['id']}-2"
    assert first["source"] != second["source"] == "edited"
    members = [
        {line["id"] for line in jobs(path)}
        for path in sorted((tmp_path / "runs" / "sweeps").iterdir())
    ]
    assert members == [{first["id"]}] * 3 + [{second["id"]}], (
        "each sweep keeps the attempts that it has shown"
    )
