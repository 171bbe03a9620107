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

import logging
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from magicdec.tracking.lock import Busy, locked
from magicdec.tracking.reader import LOG, attempts, folder_of_lock, lost, number_of, read_result
from magicdec.tracking.run_log import logging_to
from magicdec.tracking.software import commit, software
from magicdec.tracking.whole_files import explained, json_line, json_text, plain, write_atomically
from magicdec.version import VERSION

log = logging.getLogger(__name__)


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
        # We hold its lock: the process that ran it was killed.
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
                write_atomically(
                    self._config_file() | {self._result_path: [json_text(self.result)]}
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
            write_atomically({path: [json_line(content)]})

    def read_only(self) -> "Run":
        """Return a handle that writes nothing, for ranks that do the same work."""
        return replace(self, writes=False)

    def write_lines(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Replace a .jsonl file of a run that may yet fail; `finish` replaces it once more."""
        if self.writes:
            with explained(self.runs_dir):
                write_atomically({self.folder / f"{name}.jsonl": map(json_line, rows)})

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
            self.folder / f"{name}.jsonl": map(json_line, lines) for name, lines in rows.items()
        }
        with explained(self.runs_dir):
            # The result comes last: a run that is done is complete.
            write_atomically(files | self._config_file() | {self._result_path: [json_text(result)]})
        self.result = result

    def annotate(self, metrics: Mapping[str, Any]) -> None:
        """Add metrics that are no measurements to the result, such as predictions."""
        self.result = plain(self.result | dict(metrics))
        with explained(self.runs_dir):
            write_atomically({self._result_path: [json_text(self.result)]})

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
            write_atomically({self._result_path: [json_text(self.result)]})
            for name, rows in (("history", history), ("generations", generations)):
                if rows:
                    write_atomically({self.folder / f"{name}.jsonl": map(json_line, rows)})
        except OSError as error:
            log.warning("%s could not be marked as failed: %s", self.folder, error)

    @contextmanager
    def log_to_file(self) -> Iterator[None]:
        """Append the program's log to log.txt, and the traceback of an exception that passes
        through. Raise StorageError where that is impossible.
        """
        with ExitStack() as open_files:
            with explained(self.runs_dir):
                open_files.enter_context(logging_to(self.folder / LOG, self.id))
            yield

    def _end(self) -> dict[str, Any]:
        """Return when the attempt ended, and how long its sessions took if this process has run the
        last one.
        """
        finished = _now()
        if not self.facts:  # another process has run it, and nobody knows when it was killed
            return {"finished": finished}
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


def _process(overrides: Sequence[str]) -> dict[str, Any]:
    """Return what describes this process and its software."""
    process = {"host": socket.gethostname(), "pid": os.getpid(), "overrides": list(overrides)}
    return process | {"version": VERSION} | commit() | software()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
