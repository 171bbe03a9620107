"""`python -m magicdec.tracking.sync RUNS_DIR`: send stored runs to Weights & Biases, whatever became of its folders.

A run is sent under its own id (or the one that `wandb agent` gave it), and only if it is not there as a whole: sending
it twice is sending it once.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from magicdec.errors import UserError, to_stderr
from magicdec.tracking import wandb
from magicdec.tracking.reader import iter_runs, read_lines, read_result
from magicdec.tracking.report.rows import sweep_members
from magicdec.tracking.store import Run, shown

USER_ERROR, FAILURE = 2, 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 2 where W&B cannot be asked at all, 1 where a run was not taken."""
    options = _parser().parse_args(arguments)
    try:
        runs = _runs(options)
        api = wandb.connect() if options.mode == "online" else None
    except UserError as error:
        to_stderr(f"error: {error}")
        return USER_ERROR
    failures = 0
    for run in runs:
        told = send(Path(run["folder"]), run["config"], options, api)
        print(f"{run['id']}  {told.warning or told.url or told.sync_command}", flush=True)
        failures += told.warning is not None
    return FAILURE if failures else 0


def send(folder: Path, config: dict, options: argparse.Namespace, api: Any) -> wandb.WandbOutcome:
    """Tell W&B of a run as it was told when it ended, from what the store holds; nothing if it knows all of it."""
    result = read_result(folder)
    run = Run(folder.parent, folder.name, result)
    chosen = {key: value for key in ("mode", "project", "entity") if (value := getattr(options, key)) is not None}
    results = SimpleNamespace(
        **{name: read_lines(folder / f"{name}.jsonl") for name in ("history", "samples", "system")}
    )
    config = config | {"wandb": config["wandb"] | chosen}
    if api is not None and (url := wandb.arrived(api, run, config)):
        return wandb.WandbOutcome(url=url)
    return wandb.send(run, config, results)


def _runs(options: argparse.Namespace) -> list[dict]:
    """Return the runs that are done and whose configuration can be read. Raise UserError if there are none."""
    if not options.runs_dir.is_dir():
        raise UserError(f"{options.runs_dir}: no such folder; name a run store, as in runs_dir=FOLDER")
    ids = None if options.sweep is None else sweep_members(options.runs_dir, options.sweep)
    ids = set(options.ids) & ids if ids is not None and options.ids else ids or options.ids or None
    runs = [run for run in iter_runs(options.runs_dir, ids) if run["status"] == "done" and _has_mode(run["config"])]
    if not runs:
        raise UserError(f"{shown(options.runs_dir)}: holds no such runs that are done")
    return runs


def _has_mode(config: dict) -> bool:
    return isinstance(settings := config.get("wandb"), dict) and "mode" in settings


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m magicdec.tracking.sync", description=__doc__)
    parser.add_argument("runs_dir", type=Path, help="a run store, as in runs_dir=FOLDER")
    parser.add_argument("ids", nargs="*", help="runs to send (all that are done)")
    parser.add_argument("--sweep", metavar="NAME", help="only the runs of the sweeps of this name, or of this folder")
    modes = ("online", "offline")
    parser.add_argument("--mode", choices=modes, default="online", help="offline: only rebuild what W&B keeps on disk")
    parser.add_argument("--project", help="in place of the run's own")
    parser.add_argument("--entity", help="likewise")
    return parser


if __name__ == "__main__":
    sys.exit(main())
