"""Trackers: where people look at runs, such as Weights & Biases. `tracker` chooses them by name.

A run's folder is complete before a tracker reads it, so that a tracker which fails loses nothing.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol, cast

from magicdec.config.registry import has_cache
from magicdec.costmodel.targets import model_label
from magicdec.errors import UserError, in_one_line
from magicdec.inputs import plugins
from magicdec.inputs.rules import did_you_mean
from magicdec.tracking import loggers
from magicdec.tracking.run_files import ROW, read_lines
from magicdec.tracking.whole_files import json_line
from magicdec.units import LOADS

log = logging.getLogger(__name__)

Line = Mapping[str, Any]
Settings = Mapping[str, Any]  # a run's configuration, as config.yaml holds it
# The x axis of a row of numbers that has one of these.
STEP_KEYS = ("round", "live/seconds", *LOADS, "system/seconds")


@dataclass(frozen=True)
class FinishedRun:
    """A run that is done or has failed, as its folder holds it."""

    folder: Path
    config: Settings
    result: Mapping[str, Any]

    @property
    def id(self) -> str:
        """Return the id of this attempt: the name of its folder."""
        return self.folder.name

    @property
    def name(self) -> str:
        """Return a name that says what ran, short enough for a legend."""
        draft = self.config["draft"]
        cache = self.config["cache"]
        batch = self.config["batch"]
        context_len = self.result.get("data/context_len_mean") or batch["context_len"]
        parts = [model_label(self.config["target"]["name"], self.config["target"].get("path"))]
        if draft["name"] != "none":
            over = [f"{cache['policy']}-{cache['budget']}"] if has_cache(draft["name"]) else []
            parts += [draft["name"], *over, f"gamma{draft['gamma']}"]
        return " ".join([*parts, f"{batch['size']}x{context_len:.0f}"])

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of history.jsonl, samples.jsonl or system.jsonl, by the name without its
        ending.
        """
        return read_lines(self.folder / f"{name}.jsonl", ROW)


@dataclass(frozen=True)
class Logged:
    """The place where a tracker shows a run, or what went wrong."""

    tracker: str  # its name for people
    folder: Path | None = None  # the tracker's files of this run
    url: str | None = None
    command: str | None = None  # to type, in order to send or see the run
    command_label: str = ""  # "send to" the tracker, where it is not given
    warning: str | None = None  # one line


class Tracker(Protocol):
    """A module that logs runs with one library. It is one of magicdec/tracking/loggers/."""

    NAME: str  # for people
    IMPORTS: tuple[str, ...]  # modules that `log_run` imports, for launchers that start many runs

    def check(self, config: Settings) -> None:
        """Raise UserError, before the work starts, if this tracker cannot be used."""

    def settings(self, config: Settings, sweep: str | None) -> dict[str, Any]:
        """Return what config.yaml holds: `config` and what the tracker adds to it. `sweep` names
        the run's sweep.
        """

    def in_sweep(self) -> bool:
        """Return True if a sweep of the tracker has started this process."""

    def follow(self, run: FinishedRun) -> Callable[[Line], None] | None:
        """Return a function that shows a line of a run that has begun; None if only finished runs
        are logged.
        """

    def log_run(self, run: FinishedRun) -> Logged | None:
        """Log a run. Never raise: a failure is the warning of the result. Return None if logging is
        switched off.
        """

    def log_sweep(self, folder: Path, config: Settings, files: Iterable[Path]) -> Logged | None:
        """Log the report of a sweep, by its folder, the configuration of one of its runs, and
        files. Never raise.
        """


def chosen(config: Settings) -> Iterator[Tracker]:
    """Import the trackers that a configuration names."""
    names = config.get("tracker", "wandb")  # runs of earlier versions have no such key
    trackers = plugins.built_in(loggers)
    for name in [names] if isinstance(names, str) else names or ():
        if name not in trackers:
            hint = did_you_mean(name, trackers)
            raise UserError(f"tracker={name}: must be one of {', '.join(trackers)}{hint}")
        yield cast(Tracker, import_module(f"{loggers.__name__}.{name}"))


class Live:
    """Live results of a run: a point every few rounds, and each repeat as it ends. Call it with
    each line.

    Each is a line of live.jsonl in the run's folder, and goes to the trackers that can show it at
    once. None of this may fail a run: a tracker that raises gets no more of these lines.
    """

    def __init__(self, folder: Path, config: Settings, result: Mapping[str, Any]):
        self._path = folder / "live.jsonl"
        self._start = perf_counter()
        self._run = FinishedRun(folder, config, result)
        self._followers: list[Callable[[Line], None]] | None = None

    @property
    def is_shown(self) -> bool:
        """Return whether a tracker shows this attempt already."""
        return bool(self._followers)

    def __call__(self, line: Line) -> None:
        """Add the seconds since the run began, keep the line, and show it."""
        line = {"live/seconds": perf_counter() - self._start} | dict(line)
        with suppress(OSError), self._path.open("a", encoding="utf-8") as file:  # a full disk
            file.write(json_line(line))
        if self._followers is None:
            self._followers = list(self._opened())
        for follower in list(self._followers):
            try:
                follower(line)
            except Exception as error:
                log.warning("not shown any longer while it runs: %s", in_one_line(error))
                self._followers.remove(follower)

    def _opened(self) -> Iterator[Callable[[Line], None]]:
        """Ask each tracker once, at the first line: a scenario sends one before it measures
        anything.
        """
        for tracker in chosen(self._run.config):
            try:
                if follower := tracker.follow(self._run):
                    yield follower
            except Exception as error:
                log.warning(
                    "%s does not show the run before its end: %s", tracker.NAME, in_one_line(error)
                )


def is_logged(result: Mapping[str, Any]) -> bool:
    """Return True for a run that has ended, unless it was mistyped or stopped, which says nothing
    of it.
    """
    return result["status"] != "running" and result.get("kind") not in ("invalid", "interrupted")


def log_run(folder: Path, config: Settings, result: Mapping[str, Any]) -> list[Logged]:
    """Log a run that has ended to every chosen tracker."""
    run = FinishedRun(folder, config, result)
    places = [tracker.log_run(run) for tracker in chosen(config)]
    return [place for place in places if place is not None]
