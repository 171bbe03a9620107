"""`magicdec clean RUNS_DIR`: delete the runs that were mistyped, or that failed in other ways."""

import argparse
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from magicdec.errors import exit_code, printable
from magicdec.inputs.others import given_path
from magicdec.tracking.lock import NAME, locked
from magicdec.tracking.reader import check_store, folder_of_lock, iter_runs, read_result
from magicdec.tracking.store import counted, shown
from magicdec.tracking.whole_files import explained

LAST = {"result.json": 1, "config.yaml": 2}  # in the order of deleting
KINDS = ("invalid", "storage", "non_finite", "out_of_memory", "crashed", "interrupted", "stopped")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser("magicdec clean", description=__doc__)
    parser.add_argument("runs_dir", type=given_path, help="a run store, as in runs_dir=FOLDER")
    what = (
        "delete runs that failed in this way (invalid, that is mistyped); may be given several"
        " times"
    )
    parser.add_argument("--kind", choices=KINDS, action="append", help=what)
    options = parser.parse_args(arguments)
    return exit_code(lambda: _clean(options.runs_dir, options.kind or ["invalid"]))


def _clean(runs_dir: Path, kinds: Sequence[str]) -> None:
    check_store(runs_dir)
    runs = [run for run in iter_runs(runs_dir) if run.get("kind") in kinds]
    num_deleted = sum(_delete(run, kinds) for run in runs)
    print(f"{counted(num_deleted, 'run')} deleted from {shown(runs_dir)}")


def _delete(run: Mapping[str, Any], kinds: Sequence[str]) -> bool:
    """Delete a failed attempt, and return whether that was done: a sweep may have gone on with it
    since it was listed. Raise UserError if deleting is impossible, or if the next attempt is
    running.
    """
    folder = Path(run["folder"])
    lock = folder_of_lock(folder)
    with explained(folder.parent), locked(lock):
        result = read_result(folder)
        # Nobody runs it while it is locked here.
        kind = "interrupted" if result.get("status") == "running" else result.get("kind")
        if kind not in kinds:
            return False
        # Last what readers know a run by: an interrupted command can then be repeated.
        for path in sorted(folder.iterdir(), key=lambda path: LAST.get(path.name, 0)):
            if path.name != NAME:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    for empty in {folder, lock}:
        with suppress(OSError):
            empty.rmdir()
    print(printable(f"{run['id']}  {run.get('reason')}"))
    return True
