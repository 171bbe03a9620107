"""Read a run store, with complete and broken folders. Return plain data, and never raise for a broken folder."""

import json
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from magicdec.errors import UserError
from magicdec.tracking.lock import is_locked

log = logging.getLogger(__name__)

LOG = "log.txt"  # of a run, in its folder
RESULT = "result.json"
# A folder's name: the id of the run, and from the second attempt on its number.
ATTEMPT = re.compile(r"(.+?)(?:-(\d+))?", re.DOTALL)
STATES = ("running", "done", "failed")
DEPTH = 8  # of nested lists and objects: no file of a run has more
# Thresholds of warnings: the spread over repeats, the factor between two measurements of a time, and the share of a run
# in which the GPU was slowed down.
NOISY, DISAGREES, THROTTLED = 0.1, 1.5, 0.05
IMPOSSIBLE = 0.05  # share by which the parts of a round take longer than the round
# Times that a run measures twice (magicdec/measure/metrics.py).
TWICE = {
    "agreement/target_decode": "an autoregressive step took {:.2g} times as long as in the profile",
    "agreement/round": "a round took {:.2g} times as long as in the profile",
}
# libyaml where PyYAML was built with it: ten times as fast.
Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def run_of(attempt_id: str) -> str:
    """Return the id of the run: abc, abc-2 and abc-3 are attempts at abc."""
    return _parts(attempt_id)[0]


def number_of(attempt_id: str) -> int:
    """Return the number of the attempt, from 1."""
    return int(_parts(attempt_id)[1] or 1)


def _parts(attempt_id: str) -> tuple[str, str | None]:
    run_id, number = ATTEMPT.fullmatch(attempt_id).groups()  # type: ignore[union-attr]  # no folder has an empty name
    return run_id, number


def attempts(runs_dir: str | Path, run_id: str) -> list[Path]:
    """Return the folders of a run's attempts, the latest last."""
    found = [path.parent for path in Path(runs_dir).glob(f"{run_id}*/{RESULT}") if run_of(path.parent.name) == run_id]
    return sorted(found, key=lambda folder: number_of(folder.name))


def folder_of_lock(folder: Path) -> Path:
    """Return the folder that is locked while an attempt runs: one for all attempts at a run."""
    return folder.parent / run_of(folder.name)


def lost(result: Mapping[str, Any]) -> str:
    """Return the reason of a run whose process was killed."""
    return f"process {result.get('pid')} on {result.get('host')} ended without a word"


def load_run(folder: str | Path) -> dict[str, Any]:
    """Return what result.json holds with its `id`, `folder` and `config`; {} where the folder is not a run's.

    A run whose process was killed still says that it is running: here it has failed, and was interrupted. The
    configurations of several runs may share parts: do not change them.
    """
    folder = Path(folder)
    result = read_result(folder)
    if not result:
        return {}
    try:
        config = _sound(_parse(Path(folder, "config.yaml").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError):
        config = None
    if result["status"] == "running" and not is_locked(folder_of_lock(folder.absolute())):
        result |= {"status": "failed", "kind": "interrupted", "reason": lost(result)}
    config = config if isinstance(config, dict) else {}
    return result | {"id": folder.absolute().name, "folder": str(folder), "config": config}


def find_run(name: str, runs_dir: Path) -> Path:
    """Return the folder of a run by that folder, its id or the beginning of its id. Raise UserError unless that is one
    run.
    """
    for exact in (Path(name), runs_dir / name):
        if load_run(exact):
            return exact
    found = [path for path in sorted(runs_dir.glob("*")) if path.name.startswith(name) and load_run(path)]
    if len(found) != 1:
        names = ", ".join(folder.name for folder in found) or "no such run"
        raise UserError(f"{name}: {names}; name a run's folder, or the beginning of an id in {runs_dir}")
    return found[0]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file with one per line; [] where there is none, and without lines that are torn."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    return [content for line in lines if isinstance(content := _json(line), dict)]


def noise(result: Mapping[str, Any]) -> list[str]:
    """Return why a run's times cannot be trusted, in words; [] if nothing that it has measured says so."""
    known = {key: value for key, value in result.items() if isinstance(value, int | float)}
    spread = known.get("speedup_spread", 0.0)
    found = [f"the speedup spreads over {spread:.0%} between repeats"] if spread > NOISY else []
    for key, words in TWICE.items():
        if not 1 / DISAGREES <= known.get(key, 1.0) <= DISAGREES:
            found.append(words.format(known[key]))
    return found


def gpu_trouble(result: Mapping[str, Any]) -> list[str]:
    """Return what has disturbed the GPU during a run, in words (magicdec/measure/gpu.py); [] if nothing is known."""
    known = {key: value for key, value in result.items() if isinstance(value, int | float)}
    shares = {why: known.get(f"gpu/throttled/{why}", 0.0) for why in ("thermal", "power")}
    found = [f"throttled ({why}) for {share:.0%} of the time" for why, share in shares.items() if share > THROTTLED]
    others = known.get("gpu/shared", 0)
    return found + ([f"shared with {others} other process{'es' if others > 1 else ''}"] if others else [])


def is_impossible(result: Mapping[str, Any]) -> bool:
    """Return whether the parts of a round were measured to take longer than the round that they make up."""
    overhead, whole = (result.get(f"time/{name}_ms") for name in ("overhead", "round"))
    return isinstance(overhead, int | float) and isinstance(whole, int | float) and overhead < -IMPOSSIBLE * whole


def find_done(runs_dir: str | Path, run_id: str, source: str | None) -> dict[str, Any]:
    """Return the result of the latest attempt that is done by this code (None: by any code), or {} if there is none."""
    results = (read_result(folder) | {"id": folder.name} for folder in reversed(attempts(runs_dir, run_id)))
    found = (r for r in results if r.get("status") == "done" and source in (None, r.get("source")))
    return next(found, {})


def latest(runs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one attempt of each run: the last that is done, or else the last. Leave out runs that were mistyped."""
    chosen: dict[str, dict[str, Any]] = {}
    for run in sorted(runs, key=lambda run: (run["status"] == "done", number_of(run["id"]))):
        if run.get("kind") != "invalid":
            chosen[run_of(run["id"])] = run
    return list(chosen.values())


def iter_runs(runs_dir: str | Path, ids: Collection[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield every attempt in a store, or those of some ids, in the order of ids; skip all else that lies there."""
    try:
        folders = sorted(path for path in Path(runs_dir).iterdir() if path.is_dir())
    except OSError:
        return
    for folder in folders:
        if (ids is None or folder.name in ids) and (run := load_run(folder)):
            yield run


def read_result(folder: Path) -> dict[str, Any]:
    """Return what result.json holds; {} where there is none, or none that can be read, which is logged."""
    try:
        result = _json((folder / RESULT).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, UnicodeDecodeError):
        result = None
    if not _is_result(result):
        log.warning("%s cannot be read and is left out", folder / RESULT)
        return {}
    return result


def _is_result(content: Any) -> bool:
    """Return True for an object with the facts that every reader needs."""
    if not isinstance(content, dict) or content.get("status") not in STATES:
        return False
    overrides = content.get("overrides", [])
    return isinstance(overrides, list) and all(isinstance(text, str) for text in overrides)


def _json(text: str) -> Any:
    """Return the content of a JSON text, or None if it is not JSON or holds what no run writes."""
    try:
        return _sound(json.loads(text))
    except (ValueError, RecursionError):
        return None


def _sound(content: Any) -> Any:
    """Return the content. Raise ValueError or TypeError for what no run writes: deep nesting, integers beyond 64 bits,
    and what cannot be written as JSON, such as NaN, a date or half a surrogate pair.
    """
    _check(content, DEPTH)
    json.dumps(content, ensure_ascii=False, allow_nan=False).encode()
    return content


def _check(content: Any, levels: int) -> None:
    if isinstance(content, dict | list):
        if levels == 0:
            raise ValueError("nested too deeply")
        for item in content.values() if isinstance(content, dict) else content:
            _check(item, levels - 1)
    elif isinstance(content, int) and content.bit_length() > 64:
        raise ValueError("an integer beyond 64 bits")


def _parse(text: str) -> Any:
    """Parse YAML group by group, with a cache: the runs of a sweep share most groups, and parsing takes long."""
    try:
        blocks = [_parse_block(block) for block in re.split(r"\n(?=[^\s#-])", text)]
        if all(isinstance(block, dict) for block in blocks):
            return {key: value for block in blocks for key, value in block.items()}
    except yaml.YAMLError:  # what only the whole can tell, such as an alias of another group's
        pass
    return yaml.load(text, Loader)


@lru_cache(maxsize=4096)
def _parse_block(block: str) -> Any:
    return yaml.load(block, Loader)
