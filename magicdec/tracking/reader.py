"""Read a run store. Return plain, well-typed data; leave out runs whose files are damaged, with a
line in the log.
"""

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from magicdec.errors import UserError
from magicdec.tracking import run_files
from magicdec.tracking.lock import is_locked
from magicdec.tracking.unit_files import warn

LOG = "log.txt"  # of a run, in its folder
RESULT = "result.json"
# A folder's name: the id of the run, and from the second attempt on its number.
ATTEMPT = re.compile(r"(.+?)(?:-(\d+))?", re.DOTALL)


def run_of(attempt_id: str) -> str:
    """Return the id of the run: abc, abc-2 and abc-3 are attempts at abc."""
    return ATTEMPT.fullmatch(attempt_id)[1]  # type: ignore[index]  # no folder has an empty name


def number_of(attempt_id: str) -> int:
    """Return the number of the attempt, from 1."""
    return int(ATTEMPT.fullmatch(attempt_id)[2] or 1)  # type: ignore[index]


def attempts(runs_dir: str | Path, run_id: str) -> list[Path]:
    """Return the folders of a run's attempts, the latest last. Raise UserError where there can be
    none.
    """
    try:
        results = list(Path(runs_dir).glob(f"{run_id}*/{RESULT}"))
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
        raise UserError(
            f"runs_dir={runs_dir}: {reason}; choose a folder with runs_dir=FOLDER"
        ) from None
    folders = [path.parent for path in results if run_of(path.parent.name) == run_id]
    return sorted(folders, key=lambda folder: number_of(folder.name))


def folder_of_lock(folder: Path) -> Path:
    """Return the folder that is locked while an attempt runs: one for all attempts at a run."""
    return folder.parent / run_of(folder.name)


def lost(result: Mapping[str, Any]) -> str:
    """Return the reason of a run whose process was killed."""
    return f"process {result.get('pid')} on {result.get('host')} ended without a result"


def load_run(folder: str | Path) -> dict[str, Any]:
    """Return what result.json holds with its `id`, `folder` and `config`; {} where the folder is
    not a run's. Raise Damaged where a file cannot be read.

    A run whose process was killed still says that it is running: here it has failed, and was
    interrupted. The configurations of several runs may share parts: do not change them.
    """
    folder = Path(folder)
    result = run_files.read_result(folder / RESULT)
    if not result:
        return {}
    config = run_files.read_config(folder / "config.yaml")
    if result["status"] == "running" and not is_locked(folder_of_lock(folder.absolute())):
        result |= {"status": "failed", "kind": "interrupted", "reason": lost(result)}
    return result | {"id": folder.absolute().name, "folder": str(folder), "config": config}


def find_run(name: str, runs_dir: Path) -> dict[str, Any]:
    """Return a run by its folder, its id or the beginning of its id. Raise UserError unless that is
    one run.
    """
    if not name:
        raise UserError(
            f"the name of a run is empty; name its folder, or the beginning of an id in {runs_dir}"
        )
    for exact in (Path(name), runs_dir / name):
        if run := load_run(exact):
            return run
    folders = [
        path.parent
        for path in sorted(runs_dir.glob(f"*/{RESULT}"))
        if path.parent.name.startswith(name)
    ]
    if len(folders) != 1:
        names = ", ".join(folder.name for folder in folders) or "no such run"
        raise UserError(
            f"{name}: {names}; name a run's folder, or the beginning of an id in {runs_dir}"
        )
    return load_run(folders[0])


def latest(runs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one attempt of each run: the last that is done, or else the last. Leave out runs that
    were mistyped.
    """
    chosen: dict[str, dict[str, Any]] = {}
    for run in sorted(runs, key=lambda run: (run["status"] == "done", number_of(run["id"]))):
        if run.get("kind") != "invalid":
            chosen[run_of(run["id"])] = run
    return list(chosen.values())


def check_store(runs_dir: str | Path, instead: str = "") -> None:
    """Raise UserError unless this is a folder. `instead` says what else could be named."""
    if not Path(runs_dir).is_dir():
        remedy = ", ".join(filter(None, ("name a run store, as in runs_dir=FOLDER", instead)))
        raise UserError(f"{runs_dir}: no such folder; {remedy}")


def iter_runs(runs_dir: str | Path, ids: Collection[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield every attempt in a store, or those of some ids, in the order of ids. Log what cannot be
    read; skip all else that lies there.
    """
    try:
        names = sorted(os.listdir(runs_dir) if ids is None else set(ids))
    except OSError:
        return
    for name in names:
        if run := _or_empty(load_run, Path(runs_dir, name)):
            yield run


def read_result(folder: Path) -> dict[str, Any]:
    """Return what result.json holds; {} where there is none, or none that can be read, which is
    logged.
    """
    return _or_empty(run_files.read_result, folder / RESULT)


def _or_empty(read: Callable[[Path], dict[str, Any]], path: Path) -> dict[str, Any]:
    """Return what `read` returns; {}, with a line in the log, for a run whose files are damaged."""
    try:
        return read(path)
    except run_files.Damaged as damage:
        warn(f"{damage}; the run is left out")
        return {}
