"""The run store: a folder per run, complete before anyone else hears of it. Plain data in, JSON and YAML out.

<runs_dir>/<id>/ holds config.yaml, result.json (status and flat metrics), generations.jsonl (token ids), history.jsonl,
samples.jsonl (text of a few rows), system.jsonl (what the machine did meanwhile), log.txt.
Files are written beside their final names and moved there, so that no reader, kill or full disk meets half of one.
"""

import hashlib
import json
import logging
import math
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from magicdec import __version__
from magicdec.errors import UserError
from magicdec.tracking.lock import Busy, locked
from magicdec.tracking.reader import LOG, read_lines, read_result

log = logging.getLogger(__name__)

# Keys that say where a run is told of, or in which company it runs, but not what it does.
NOT_IN_ID = frozenset({"wandb", "hydra", "runs_dir", "resume", "sweep"})
ID_LENGTH = 12  # hex digits: among 10,000 runs, two share an id with a probability of 2e-7
CHECKOUT = Path(__file__).resolve().parents[2]
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def run_id(config: Mapping[str, Any], fingerprints: Mapping[str, str], device: str) -> str:
    """The name that a run deserves: a hash of what decides its result.

    The order of keys does not matter, nor how a number is written: 1 and 1.0 are the same.
    """
    decisive = {key: value for key, value in config.items() if key not in NOT_IN_ID}
    identity = {"config": decisive, "checkpoints": fingerprints, "device": device}
    text = json.dumps(_plain(identity, whole_numbers=True), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:ID_LENGTH]


def shown(path: Path) -> str:
    """A path as one would type it: relative where it lies below the working directory."""
    absolute, here = path.absolute(), Path.cwd()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)


@dataclass
class Run:
    """One attempt at a run. `result` is what it has to tell so far, in the names of result.json.

    An earlier attempt's result stays in place until this one is finished; until then, and if this one fails, it stands
    under `rerun` in that result.
    """

    runs_dir: str | Path
    id: str
    attempt: int = 1
    result: dict[str, Any] = field(default_factory=dict)
    _earlier: dict[str, Any] | None = None

    @classmethod
    def open(cls, runs_dir: str | Path, run_id: str, config: Mapping[str, Any], overrides: Sequence[str] = ()) -> "Run":
        """Make the folder and mark it as running; raises UserError where that is impossible.

        To be called with the run's lock in hand (tracking/lock.py). `overrides` is what was typed to get this run.
        """
        run = cls(runs_dir, run_id)
        earlier = read_result(run.folder)
        attempts = [r.get("attempt") for r in (earlier, earlier.get("rerun")) if isinstance(r, dict)]
        run.attempt = 1 + max((number for number in attempts if isinstance(number, int)), default=0)
        run._earlier = earlier if earlier.get("status") == "done" else None
        run.result = {"status": "running", "id": run_id, "attempt": run.attempt, "started": _now()}
        run.result |= {"host": socket.gethostname(), "pid": os.getpid(), "overrides": list(overrides)}
        run.result |= _versions()
        with explained(runs_dir):
            run.folder.mkdir(parents=True, exist_ok=True)
            for torn in run.folder.glob(".*.tmp"):  # of a process that was killed
                torn.unlink(missing_ok=True)
            text = yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True)
            _write_atomically({run.folder / "config.yaml": [text], run._result_path: [run._result_text]})
        return run

    @classmethod
    def bury(cls, runs_dir: str | Path, run_id: str, pid: int, reason: str) -> None:
        """Mark as crashed what a process has left running that can no longer do so itself."""
        with suppress(Busy, OSError), locked(Path(runs_dir, run_id)):  # busy: someone else has taken the run up already
            stored = read_result(Path(runs_dir, run_id))
            attempt = stored.get("rerun", stored)
            if attempt.get("status") == "running" and attempt.get("pid") == pid:
                earlier = {key: value for key, value in stored.items() if key != "rerun"} if "rerun" in stored else None
                cls(runs_dir, run_id, attempt["attempt"], attempt, earlier).fail(reason, "crashed")

    @property
    def folder(self) -> Path:
        """Where everything of this run lies."""
        return Path(self.runs_dir, self.id)

    def finish(
        self,
        metrics: Mapping[str, Any],
        generations: Iterable[Mapping],
        history: Iterable[Mapping],
        samples: Iterable[Mapping] = (),
        system: Iterable[Mapping] = (),
    ) -> None:
        """Store the results; raises UserError where that is impossible, and then earlier results are intact."""
        facts = self.result | {"status": "done", "finished": _now()}
        result = _plain(facts | dict(metrics) | facts)
        with explained(self.runs_dir):
            _write_atomically(
                {
                    self.folder / "generations.jsonl": map(_json_line, generations),
                    self.folder / "history.jsonl": map(_json_line, history),
                    self.folder / "samples.jsonl": map(_json_line, samples),
                    self.folder / "system.jsonl": map(_json_line, system),
                    self._result_path: [_json_text(result)],  # last: whoever finds it done finds the rest, too
                }
            )
        self.result, self._earlier = result, None

    def fail(self, reason: str, kind: str, history: Sequence[Mapping] = ()) -> None:
        """Mark this attempt as failed: `kind` is invalid, out_of_memory, crashed or interrupted. `history` is what it
        has found out so far; it takes the place of no more than that of an earlier attempt.

        Never raises for a disk that refuses: there is an error on its way already, and it is the one to be seen.
        """
        self.result |= {"status": "failed", "kind": kind, "reason": reason, "finished": _now()}
        path = self.folder / "history.jsonl"
        try:
            _write_atomically({self._result_path: [self._result_text]})
            if not self._earlier and len(history) > len(read_lines(path)):
                _write_atomically({path: map(_json_line, history)})
        except OSError as error:
            log.warning("%s could not be marked as failed: %s", self.folder, error)

    @contextmanager
    def log_to_file(self) -> Iterator[None]:
        """Append the program's log to log.txt, and the traceback of an exception that passes through."""
        with explained(self.runs_dir):
            handler = _LogFile(self.folder / LOG, encoding="utf-8")
        handler.setFormatter(logging.Formatter(LOG_FORMAT))
        logging.getLogger().addHandler(handler)
        try:
            with _more_detail():
                log.info("run %s, attempt %s", self.id, self.attempt)
                yield
        except BaseException:
            record = log.makeRecord(log.name, logging.ERROR, __file__, 0, "failed", (), sys.exc_info())
            handler.handle(record)  # to the file alone: the terminal hears of it from the command line
            raise
        finally:
            logging.getLogger().removeHandler(handler)
            handler.close()

    @property
    def _result_path(self) -> Path:
        return self.folder / "result.json"

    @property
    def _result_text(self) -> str:
        """An attempt that is not done stands below an earlier one that is."""
        return _json_text(self._earlier | {"rerun": self.result} if self._earlier else self.result)


@contextmanager
def explained(runs_dir: str | Path) -> Iterator[None]:
    """An operating system's refusal, in the user's words."""
    try:
        yield
    except OSError as error:
        what = f"cannot write{f' {error.filename}' if error.filename else ''}: {error.strerror or error}"
        raise UserError(f"runs_dir={runs_dir}: {what}; choose a folder with runs_dir=FOLDER") from error


def _write_atomically(contents: Mapping[Path, Iterable[str]]) -> None:
    """Write all files beside their final names before the first is moved there: failures come before any change."""
    staged: dict[Path, Path] = {}
    try:
        for path, pieces in contents.items():
            temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            staged[temporary] = path
            with temporary.open("w", encoding="utf-8", newline="\n") as file:
                file.writelines(pieces)
                file.flush()
                os.fsync(file.fileno())
        for temporary, path in staged.items():
            os.replace(temporary, path)
    finally:
        for temporary in staged:
            temporary.unlink(missing_ok=True)


def _json_text(content: Mapping) -> str:
    return json.dumps(_plain(content), indent=2, ensure_ascii=False) + "\n"


def _json_line(row: Mapping) -> str:
    return json.dumps(_plain(row), separators=(",", ":"), ensure_ascii=False) + "\n"


def _plain(value: Any, whole_numbers: bool = False) -> Any:
    """What JSON and YAML can hold: NaN and infinities become null; with `whole_numbers`, 1.0 becomes 1."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item, whole_numbers) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, whole_numbers) for item in value]
    if hasattr(value, "item"):  # a number of NumPy's or PyTorch's
        return _plain(value.item(), whole_numbers)
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return int(value) if whole_numbers and value.is_integer() else float(value)
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _versions() -> dict[str, Any]:
    """What ran: of the package, of its checkout if it is one, of Python and PyTorch (without importing it)."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = None
    return {"version": __version__} | _commit() | {"python": platform.python_version(), "torch": torch}


def _commit() -> dict[str, Any]:
    """The checkout's commit and whether files differ from it; null for an installed package, whatever surrounds it."""
    described = ""
    if (CHECKOUT / ".git").exists():
        command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        try:
            described = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=10).stdout.strip()
        except (OSError, subprocess.SubprocessError) as error:
            log.warning("the commit is unknown: %s", error)
    commit, _, dirty = described.partition("-")
    return {"commit": commit or None, "commit_dirty": bool(dirty) if commit else None}


@contextmanager
def _more_detail() -> Iterator[None]:
    """Let the package tell what it does (INFO), without letting handlers tell more of it than they did before."""
    package, before = logging.getLogger("magicdec"), logging.getLogger("magicdec").getEffectiveLevel()
    others = [handler for handler in logging.getLogger().handlers if not isinstance(handler, _LogFile)]
    levels = [handler.level for handler in others]
    own_level = package.level
    try:
        if before > logging.INFO:
            package.setLevel(logging.INFO)
            for handler in others:
                handler.setLevel(max(handler.level, before))
        yield
    finally:
        package.setLevel(own_level)
        for handler, level in zip(others, levels, strict=True):
            handler.setLevel(level)


class _LogFile(logging.FileHandler):
    """A log file whose own trouble, such as a full disk, does not show on the terminal."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Lose the record."""
