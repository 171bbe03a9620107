"""Read a run store. Return plain, well-typed data; leave out runs whose files are damaged, with a
line in the log.
"""

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from magicdec.errors import UserError
from magicdec.tracking import files
from magicdec.tracking.cells import is_number
from magicdec.tracking.lock import is_locked

LOG = "log.txt"  # of a run, in its folder
RESULT = "result.json"
# A folder's name: the id of the run, and from the second attempt on its number.
ATTEMPT = re.compile(r"(.+?)(?:-(\d+))?", re.DOTALL)
# From which spread over repeats, and share of a run with a slowed GPU, there is a warning.
NOISY, THROTTLED = 0.1, 0.05
IMPOSSIBLE = 0.05  # share by which the parts of a round take longer than the round
# A run's times next to another measurement of them (magicdec/measure/metrics.py and `slowness`):
# the factor from which there is a warning, and its words. Predictions may be wrong themselves.
CROSS_CHECKS = {
    "agreement/target_decode": (
        1.5,
        "an autoregressive step took {:.2g} times as long as in the profile",
    ),
    "agreement/round": (1.5, "a round took {:.2g} times as long as in the profile"),
    "agreement/earlier": (
        1.5,
        "an autoregressive step took {:.2g} times as long as in the fastest earlier attempt",
    ),
    "agreement/prediction": (2.0, "an autoregressive step took {:.2g} times as long as predicted"),
}
BASELINE = "autoregressive/time_per_output_token_ms"


def run_of(attempt_id: str) -> str:
    """Return the id of the run: abc, abc-2 and abc-3 are attempts at abc."""
    return ATTEMPT.fullmatch(attempt_id)[1]  # type: ignore[index]  # no folder has an empty name


def number_of(attempt_id: str) -> int:
    """Return the number of the attempt, from 1."""
    return int(ATTEMPT.fullmatch(attempt_id)[2] or 1)  # type: ignore[index]


def attempts(runs_dir: str | Path, run_id: str) -> list[Path]:
    """Return the folders of a run's attempts, the latest last."""
    found = [
        path.parent
        for path in Path(runs_dir).glob(f"{run_id}*/{RESULT}")
        if run_of(path.parent.name) == run_id
    ]
    return sorted(found, key=lambda folder: number_of(folder.name))


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
    result = files.read_result(folder / RESULT)
    if not result:
        return {}
    config = files.read_config(folder / "config.yaml")
    if result["status"] == "running" and not is_locked(folder_of_lock(folder.absolute())):
        result |= {"status": "failed", "kind": "interrupted", "reason": lost(result)}
    return result | {"id": folder.absolute().name, "folder": str(folder), "config": config}


def find_run(name: str, runs_dir: Path) -> dict[str, Any]:
    """Return a run by its folder, its id or the beginning of its id. Raise UserError unless that is
    one run.
    """
    for exact in (Path(name), runs_dir / name):
        if run := load_run(exact):
            return run
    found = [
        path.parent
        for path in sorted(runs_dir.glob(f"*/{RESULT}"))
        if path.parent.name.startswith(name)
    ]
    if len(found) != 1:
        names = ", ".join(folder.name for folder in found) or "no such run"
        raise UserError(
            f"{name}: {names}; name a run's folder, or the beginning of an id in {runs_dir}"
        )
    return load_run(found[0])


def noise(result: Mapping[str, Any]) -> list[str]:
    """Return why a run's times cannot be trusted, in words; [] if nothing that it has measured says
    so.
    """
    known = {key: value for key, value in result.items() if isinstance(value, int | float)}
    spread = known.get("speedup_spread", 0.0)
    found = [f"the speedup spreads over {spread:.0%} between repeats"] if spread > NOISY else []
    for key, (factor, words) in CROSS_CHECKS.items():
        if not 1 / factor <= known.get(key, 1.0) <= factor:
            found.append(words.format(known[key]))
    return found


def slowness(result: Mapping[str, Any], earlier: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return `agreement/earlier` and `agreement/prediction`: how many times as long an
    autoregressive step took as in the fastest earlier attempt and as predicted, at least 1. Nothing
    within a run shows that all of it was slow.
    """
    before = [one.get(BASELINE) for one in earlier if one.get("status") == "done"]
    others = {
        "earlier": (result.get(BASELINE), before),
        "prediction": (
            result.get("time/target_decode_ms"),
            [result.get("predicted/target_decode_ms")],
        ),
    }
    found = {}
    for name, (time, expected) in others.items():
        known = [float(one) for one in expected if is_number(one) and one > 0]
        if is_number(time) and known:
            found[f"agreement/{name}"] = max(1.0, time / min(known))
    return found


def gpu_trouble(result: Mapping[str, Any]) -> list[str]:
    """Return what has disturbed the GPU during a run, in words (magicdec/measure/system.py); [] if
    nothing is known.
    """
    known = {key: value for key, value in result.items() if isinstance(value, int | float)}
    shares = {why: known.get(f"gpu/throttled/{why}", 0.0) for why in ("thermal", "power")}
    found = [
        f"throttled ({why}) for {share:.0%} of the time"
        for why, share in shares.items()
        if share > THROTTLED
    ]
    others = known.get("gpu/shared", 0)
    return found + (
        [f"shared with {others} other process{'es' if others > 1 else ''}"] if others else []
    )


def is_impossible(result: Mapping[str, Any]) -> bool:
    """Return whether the parts of a round were measured to take longer than the round that they
    make up.
    """
    overhead, whole = (result.get(f"time/{name}_ms") for name in ("overhead", "round"))
    return (
        isinstance(overhead, int | float)
        and isinstance(whole, int | float)
        and overhead < -IMPOSSIBLE * whole
    )


def find_done(runs_dir: str | Path, run_id: str, software: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of the latest attempt that is done with this software ({}: any), or {} if
    there is none.
    """
    results = (
        read_result(folder) | {"id": folder.name} for folder in reversed(attempts(runs_dir, run_id))
    )
    return next(
        (r for r in results if r.get("status") == "done" and software.items() <= r.items()), {}
    )


def latest(runs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one attempt of each run: the last that is done, or else the last. Leave out runs that
    were mistyped.
    """
    chosen: dict[str, dict[str, Any]] = {}
    for run in sorted(runs, key=lambda run: (run["status"] == "done", number_of(run["id"]))):
        if run.get("kind") != "invalid":
            chosen[run_of(run["id"])] = run
    return list(chosen.values())


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
    return _or_empty(files.read_result, folder / RESULT)


def _or_empty(read: Callable[[Path], dict[str, Any]], path: Path) -> dict[str, Any]:
    """Return what `read` returns; {}, with a line in the log, for a run whose files are damaged."""
    try:
        return read(path)
    except files.Damaged as damage:
        files.warn(f"{damage}; the run is left out")
        return {}
