"""`magicdec sync RUNS_DIR`: send stored runs to Weights & Biases, from the store alone.

A run keeps its id (or the one that `wandb agent` gave it). A run that W&B has completely is not
sent again.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from magicdec.errors import UserError, exit_code, printable, to_stderr
from magicdec.inputs.others import given_path
from magicdec.report.rows import sweep_members
from magicdec.tracking.loggers import wandb
from magicdec.tracking.reader import check_store, iter_runs, read_result
from magicdec.tracking.store import shown
from magicdec.tracking.trackers import FinishedRun, Logged, is_logged


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit code: 2 for a mistake or no login, 1 if W&B did not
    take a run.
    """
    return exit_code(lambda: _sync(_parser().parse_args(arguments)))


def _sync(options: argparse.Namespace) -> int:
    runs = _runs(options)
    api = wandb.connect() if options.mode == "online" else None
    failures = 0
    for run in runs:
        logged = _send(run, options, api)
        print(
            printable(f"{run['id']}  {logged.warning or logged.url or logged.command}"), flush=True
        )
        failures += logged.warning is not None
    for missing in sorted({*options.ids} - {run["id"] for run in runs}):
        to_stderr(f"{missing}: not sent; no such run that is done, or failed by itself")
        failures += 1
    return 1 if failures else 0


def _send(stored: dict, options: argparse.Namespace, api: Any) -> Logged:
    """Send one run in the chosen mode, unless W&B has all of it."""
    typed = {key: getattr(options, key) for key in ("mode", "project", "entity")}
    given = {key: value for key, value in typed.items() if value is not None}
    config = stored["config"] | {"wandb": stored["config"]["wandb"] | given}
    folder = Path(stored["folder"])
    run = FinishedRun(folder, config, read_result(folder))
    if api is not None and (url := wandb.url_of(api, run)):
        return Logged(wandb.NAME, url=url)
    return wandb.send(run) or Logged(wandb.NAME)


def _runs(options: argparse.Namespace) -> list[dict]:
    """Return the runs to send, whose configuration can be read. Raise UserError if there are
    none.
    """
    check_store(options.runs_dir)
    ids = set(options.ids) or None
    if options.sweep is not None:
        members = set(sweep_members(options.runs_dir, options.sweep))
        ids = members & ids if ids else members
    runs = [
        run
        for run in iter_runs(options.runs_dir, ids)
        if is_logged(run) and "wandb" in run["config"]
    ]
    if not runs:
        raise UserError(
            f"{shown(options.runs_dir)}: holds no such runs that are done, or failed by themselves"
        )
    return runs


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("magicdec sync", description=__doc__)
    parser.add_argument("runs_dir", type=given_path, help="a run store, as in runs_dir=FOLDER")
    parser.add_argument(
        "ids", nargs="*", help="runs to send (all that are done, or failed by themselves)"
    )
    parser.add_argument(
        "--sweep",
        metavar="NAME",
        help="only the runs of the sweeps of this name, or of this folder",
    )
    modes = ("online", "offline")
    parser.add_argument(
        "--mode", choices=modes, default="online", help="offline: only write W&B's files again"
    )
    parser.add_argument("--project", help="instead of the run's own")
    parser.add_argument("--entity", help="instead of the run's own")
    return parser
