"""The run store: a folder per attempt at a run, complete before a tracker reads it. Takes plain
data, writes JSON and YAML.

The folder's name is the attempt's id: <runs_dir>/<id>/, <id>-2/, <id>-3/. It holds config.yaml,
result.json (status and flat metrics), generations.jsonl (token ids), history.jsonl, samples.jsonl
(text of a few rows), system.jsonl (load of the machine), log.txt, and the folder units (what was
measured, a file for each part). Files are written under temporary names and then moved, so that no
reader, kill or full disk leaves half of one.

A run's folder belongs to its id and to the software that measures it. A sweep adds to it what is
missing, and replaces result.json last. A run by hand gets a folder of its own.
"""

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
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from typing_extensions import override

from magicdec import threads
from magicdec.config.registry import PACKAGE, PLUGINS
from magicdec.errors import StorageError
from magicdec.inputs.fingerprint import of_code
from magicdec.tracking.lock import Busy, locked
from magicdec.tracking.reader import LOG, attempts, folder_of_lock, lost, number_of, read_result
from magicdec.version import VERSION

log = logging.getLogger(__name__)

CHECKOUT = PACKAGE.parent
CODE_FOLDERS = ("magicdec", "conf", "sweeps", "hydra_plugins", "launch.py")  # of the checkout
# The package as this process has imported it: an edit while a sweep runs does not reach the jobs of
# its fork server.
PACKAGE_HASH = of_code(PACKAGE)
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def source() -> str:
    """Return a hash of the code that runs: the package, and the plugins imported so far."""
    return "+".join([PACKAGE_HASH, *(of_code(path) for _, path in sorted(PLUGINS.items()))])


def counted(number: int, noun: str) -> str:
    """Return a number of things in words: 1 row, 2 rows."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shown(path: Path) -> str:
    """Return a path as one would type it: relative if it lies below the working directory."""
    absolute, here = path.absolute(), Path.cwd()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)


@dataclass
class Run:
    """One attempt at a run, with an id and a folder of its own.

    `result` is the content of result.json so far. Where repeats are added to a run that is done,
    that stays its result until there is a new one, and `before` of its repeats do not count towards
    those that are asked for.
    """

    runs_dir: str | Path
    id: str
    result: dict[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    before: int = 0
    # What describes the run and this process, not a measurement.
    facts: dict[str, Any] = field(default_factory=dict)
    seconds_before: float = 0.0  # of earlier sessions
    writes: bool = True

    @classmethod
    def open(
        cls,
        runs_dir: str | Path,
        run_id: str,
        config: Mapping[str, Any],
        overrides: Sequence[str] = (),
    ) -> "Run":
        """Make the folder of the next attempt and mark it as running. Raise StorageError where that
        is impossible.

        The caller holds the run's lock (tracking/lock.py). `overrides` are those of the command
        line.
        """
        earlier = attempts(runs_dir, run_id)
        # But we hold its lock.
        if earlier and (last := read_result(earlier[-1])).get("status") == "running":
            cls(runs_dir, earlier[-1].name, last).fail(lost(last), "interrupted")
        number = 1 + (number_of(earlier[-1].name) if earlier else 0)
        run = cls(runs_dir, run_id if number == 1 else f"{run_id}-{number}", config=plain(config))
        run.facts = {"id": run.id, "attempt": number, "started": _now()} | _process(overrides)
        run.result = {"status": "running"} | run.facts
        run._begin()
        return run

    @classmethod
    def reopen(
        cls, folder: Path, config: Mapping[str, Any], overrides: Sequence[str] = (), before: int = 0
    ) -> "Run":
        """Continue in the folder of an attempt, by the same software. Raise StorageError where that
        is impossible.

        The caller holds the run's lock. All that was measured is kept.
        """
        run = cls(folder.parent, folder.name, read_result(folder), plain(config), before)
        kept = {key: run.result[key] for key in ("id", "attempt", "started") if key in run.result}
        run.facts = kept | {"resumed": _now()} | _process(overrides)
        run.seconds_before = run.result.get("duration_s", 0.0)
        if run.result.get("status") != "done":
            run.result = {"status": "running"} | run.facts
        run._begin()
        return run

    def _begin(self) -> None:
        """Prepare the folder; mark the attempt as running unless it is done already."""
        with explained(self.runs_dir):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_torn_files()
            if self.result["status"] == "running":
                _write_atomically(
                    self._config_file() | {self._result_path: [_json_text(self.result)]}
                )

    def _config_file(self) -> dict[Path, list[str]]:
        text = yaml.safe_dump(self.config, sort_keys=False, allow_unicode=True)
        return {self.folder / "config.yaml": [text]}

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file into the folder, complete when it is there. Raise StorageError where
        that is impossible.
        """
        if not self.writes:
            return
        path = self.folder / name
        with explained(self.runs_dir):
            path.parent.mkdir(exist_ok=True)
            _write_atomically({path: [_json_line(content)]})

    def read_only(self) -> "Run":
        """Return a handle that writes nothing, for ranks that do the same work."""
        return replace(self, writes=False)

    def write_lines(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Replace a .jsonl file of a run that may yet fail; `finish` replaces it once more."""
        if self.writes:
            with explained(self.runs_dir):
                _write_atomically({self.folder / f"{name}.jsonl": map(_json_line, rows)})

    def earlier(self, prefixes: tuple[str, ...]) -> dict[str, Any]:
        """Return the metrics with these prefixes of a run that is done, to which more is added."""
        if self.result.get("status") != "done":
            return {}
        return {key: value for key, value in self.result.items() if key.startswith(prefixes)}

    @classmethod
    def mark_crashed(cls, runs_dir: str | Path, attempt_id: str, pid: int, reason: str) -> None:
        """Mark as crashed an attempt that a dead process has left running."""
        folder = Path(runs_dir, attempt_id)
        # Busy: the next attempt is running.
        with suppress(Busy, OSError), locked(folder_of_lock(folder)):
            result = read_result(folder)
            if result.get("status") == "running" and result.get("pid") == pid:
                cls(runs_dir, attempt_id, result).fail(reason, "crashed")

    @property
    def folder(self) -> Path:
        """Return the folder with all files of this attempt."""
        return Path(self.runs_dir, self.id)

    def finish(
        self,
        metrics: Mapping[str, Any],
        generations: Iterable[Mapping],
        history: Iterable[Mapping],
        samples: Iterable[Mapping] = (),
        system: Iterable[Mapping] = (),
    ) -> None:
        """Store the results. Raise StorageError where that is impossible."""
        facts = self.facts | {"status": "done"} | self._end()
        result = plain(facts | dict(metrics) | facts)
        rows = {
            "generations": generations,
            "history": history,
            "samples": samples,
            "system": system,
        }
        files = {
            self.folder / f"{name}.jsonl": map(_json_line, lines) for name, lines in rows.items()
        }
        with explained(self.runs_dir):
            # The result comes last: a run that is done is complete.
            _write_atomically(
                files | self._config_file() | {self._result_path: [_json_text(result)]}
            )
        self.result = result

    def annotate(self, metrics: Mapping[str, Any]) -> None:
        """Add metrics that are no measurements to the result, such as predictions."""
        self.result = plain(self.result | dict(metrics))
        with explained(self.runs_dir):
            _write_atomically({self._result_path: [_json_text(self.result)]})

    def fail(
        self,
        reason: str,
        kind: str,
        history: Sequence[Mapping] = (),
        metrics: Mapping[str, Any] | None = None,
        generations: Sequence[Mapping] = (),
    ) -> None:
        """Mark this attempt as failed: `kind` is one of KINDS in clean.py. Keep what it has
        measured so far.

        A run that was done stays done. Never raise if the disk refuses: the user is about to see
        another error already.
        """
        if self.result.get("status") == "done":
            log.warning("%s keeps its result; adding repeats to it failed: %s", self.folder, reason)
            return
        facts = self.result | {"status": "failed", "kind": kind, "reason": reason} | self._end()
        self.result = plain(facts | dict(metrics or {}) | facts)
        try:
            self._remove_torn_files()
            _write_atomically({self._result_path: [_json_text(self.result)]})
            for name, rows in (("history", history), ("generations", generations)):
                if rows:
                    _write_atomically({self.folder / f"{name}.jsonl": map(_json_line, rows)})
        except OSError as error:
            log.warning("%s could not be marked as failed: %s", self.folder, error)

    @contextmanager
    def log_to_file(self) -> Iterator[None]:
        """Append the program's log to log.txt, and the traceback of an exception that passes
        through.
        """
        with explained(self.runs_dir):
            handler = _LogFile(self.folder / LOG, encoding="utf-8")
        handler.setFormatter(logging.Formatter(LOG_FORMAT))
        logging.getLogger().addHandler(handler)
        try:
            with _more_detail():
                log.info("run %s", self.id)
                yield
        except BaseException:
            record = log.makeRecord(
                log.name, logging.ERROR, __file__, 0, "failed", (), sys.exc_info()
            )
            # Into the file alone: the command line prints it on the terminal.
            handler.handle(record)
            raise
        finally:
            logging.getLogger().removeHandler(handler)
            handler.close()

    def _end(self) -> dict[str, Any]:
        """Return when the attempt ended, and how long its sessions took if this process has run the
        last one.
        """
        finished = _now()
        if self.result.get("pid") != os.getpid() and self.facts.get("pid") != os.getpid():
            return {"finished": finished}  # nobody knows when it was killed
        begun = self.facts.get("resumed") or self.result["started"]
        took = (datetime.fromisoformat(finished) - datetime.fromisoformat(begun)).total_seconds()
        return {"finished": finished, "duration_s": took + self.seconds_before}

    @property
    def _result_path(self) -> Path:
        return self.folder / "result.json"

    def _remove_torn_files(self) -> None:
        """Remove what a killed process was writing."""
        for path in [*self.folder.glob(".*.tmp"), *self.folder.glob("*/.*.tmp")]:
            path.unlink(missing_ok=True)


@contextmanager
def explained(runs_dir: str | Path) -> Iterator[None]:
    """Turn an OSError into a StorageError."""
    try:
        yield
    except OSError as error:
        what = (
            f"cannot write{f' {error.filename}' if error.filename else ''}:"
            f" {error.strerror or error}"
        )
        raise StorageError(
            f"runs_dir={runs_dir}: {what}; choose a folder with runs_dir=FOLDER"
        ) from error


def _write_atomically(contents: Mapping[Path, Iterable[str]]) -> None:
    """Write all files under temporary names before the first is moved into place: a failure comes
    before any change.
    """
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
    return json.dumps(plain(content), indent=2, ensure_ascii=False) + "\n"


def _json_line(row: Mapping) -> str:
    return json.dumps(plain(row), separators=(",", ":"), ensure_ascii=False) + "\n"


def plain(value: Any, whole_numbers: bool = False) -> Any:
    """Return a value that JSON and YAML can hold: NaN and infinity become null; with
    `whole_numbers`, 1.0 becomes 1.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item, whole_numbers) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, whole_numbers) for item in value]
    if hasattr(value, "item"):  # a number of NumPy's or PyTorch's
        return plain(value.item(), whole_numbers)
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return int(value) if whole_numbers and value.is_integer() else float(value)
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _process(overrides: Sequence[str]) -> dict[str, Any]:
    """Return what describes this process and its software."""
    process = {"host": socket.gethostname(), "pid": os.getpid(), "overrides": list(overrides)}
    return process | {"version": VERSION} | _commit() | software()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def software() -> dict[str, str]:
    """Return what may change a run's figures but is no part of its id: the code, Python, PyTorch,
    OpenMP's settings.
    """
    versions = {"python": platform.python_version(), "torch": metadata.version("torch")}
    return {"source": source()} | versions | {"openmp": threads.settings()}


def _commit() -> dict[str, Any]:
    """Return the checkout's commit and whether its code differs, new files included; null for an
    installed package.
    """
    lines: list[str] = []
    if (CHECKOUT / ".git").exists():
        command = [
            "git",
            "--no-optional-locks",
            "status",
            "--porcelain=v2",
            "--branch",
            "--",
            *CODE_FOLDERS,
        ]
        try:
            done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=10)
            lines = done.stdout.splitlines()
        except (OSError, subprocess.SubprocessError) as error:
            log.warning("the commit is unknown: %s", error)
    commit = next((line.split()[2] for line in lines if line.startswith("# branch.oid ")), None)
    dirty = any(not line.startswith("#") for line in lines)
    return {"commit": commit, "commit_dirty": dirty if commit else None}


@contextmanager
def _more_detail() -> Iterator[None]:
    """Log the package's INFO into log files, and no more than before elsewhere."""
    package, before = (
        logging.getLogger("magicdec"),
        logging.getLogger("magicdec").getEffectiveLevel(),
    )
    others = [
        handler for handler in logging.getLogger().handlers if not isinstance(handler, _LogFile)
    ]
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
    """A log file whose own errors, such as a full disk, do not show on the terminal."""

    @override
    def handleError(self, record: logging.LogRecord) -> None:
        """Lose the record."""

    @override
    def close(self) -> None:
        """Lose what was not written yet."""
        with suppress(OSError):
            super().close()
