"""Reading a run store: what others wrote, whole or not. Plain data out, and nothing here raises for a broken folder."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from magicdec import __version__
from magicdec.tracking.lock import is_locked

LOG = "log.txt"  # of a run, in its folder
# What is pointed at: a spread over the repeats above this; a GPU that was slowed down for a larger share of a run.
NOISY, THROTTLED = 0.1, 0.05
# libyaml where PyYAML was built with it: ten times as fast.
Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def load_run(folder: str | Path) -> dict[str, Any]:
    """What result.json holds, and beside it the `folder` and the `config`; {} where the folder is not a run's.

    A run whose process was killed still says that it is running: here it has failed, and was interrupted. The
    configurations of several runs may share parts: they are there to be read.
    """
    result = read_result(Path(folder))
    if not result:
        return {}
    try:
        config = _parse(Path(folder, "config.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        config = None
    if result["status"] == "running" and not is_locked(Path(folder)):
        reason = f"process {result.get('pid')} on {result.get('host')} ended without a word"
        result |= {"status": "failed", "kind": "interrupted", "reason": reason}
    return result | {"folder": str(folder), "config": config if isinstance(config, dict) else {}}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A file with a JSON object per line; [] where there is none, and without a line that is torn."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    return [content for line in lines if isinstance(content := _json(line), dict)]


def gpu_trouble(result: Mapping[str, Any]) -> list[str]:
    """What has kept the GPU from being itself during a run, in words (magicdec/measure/gpu.py)."""
    told = {key: value for key, value in result.items() if isinstance(value, int | float)}
    shares = {why: told.get(f"gpu/throttled/{why}", 0.0) for why in ("thermal", "power")}
    found = [f"throttled ({why}) for {share:.0%} of the time" for why, share in shares.items() if share > THROTTLED]
    others = told.get("gpu/shared", 0)
    return found + ([f"shared with {others} other process{'es' if others > 1 else ''}"] if others else [])


def is_done(runs_dir: str | Path, run_id: str, any_version: bool = False) -> bool:
    """Whether this version of the package has finished the run, or any."""
    result = read_result(Path(runs_dir, run_id))
    return result.get("status") == "done" and (any_version or result.get("version") == __version__)


def iter_runs(runs_dir: str | Path, ids: Collection[str] | None = None) -> Iterator[dict[str, Any]]:
    """Every run of a store, or those of some ids, in the order of ids; whatever else lies there is passed over."""
    try:
        folders = sorted(path for path in Path(runs_dir).iterdir() if path.is_dir())
    except OSError:
        return
    for folder in folders:
        if (ids is None or folder.name in ids) and (run := load_run(folder)):
            yield run


def read_result(folder: Path) -> dict[str, Any]:
    """What result.json holds; {} where there is none, or none that can be read."""
    try:
        result = _json((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return {}
    return result if isinstance(result, dict) and "status" in result else {}


def _json(text: str) -> Any:
    """None for what is no JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _parse(text: str) -> Any:
    """YAML, a group at a time: the runs of a sweep share most of their groups, and parsing is what takes long."""
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
