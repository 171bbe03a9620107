"""Live results of a run: a point every few rounds, and each repeat as it ends.

Each is a line of live.jsonl in the run's folder, and goes to the trackers that can show it at once. None of this may
fail a run: a tracker that raises gets no more of these lines.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

from magicdec.errors import in_one_line
from magicdec.tracking.trackers import FinishedRun, Settings, chosen

log = logging.getLogger(__name__)

FILE = "live.jsonl"
Line = Mapping[str, Any]


class Live:
    """The lines of one attempt. Call it with each of them."""

    def __init__(self, folder: Path, config: Settings, result: Mapping[str, Any]):
        self._path, self._start = folder / FILE, perf_counter()
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
            file.write(json.dumps(line) + "\n")
        if self._followers is None:
            self._followers = list(self._opened())
        for follower in list(self._followers):
            try:
                follower(line)
            except Exception as error:
                log.warning("not shown any longer while it runs: %s", in_one_line(error))
                self._followers.remove(follower)

    def _opened(self) -> Iterator[Callable[[Line], None]]:
        """Ask each tracker once, at the first line: a scenario sends one before it measures anything."""
        for tracker in chosen(self._run.config):
            try:
                if follower := tracker.follow(self._run):
                    yield follower
            except Exception as error:
                log.warning("%s does not show the run before its end: %s", tracker.NAME, in_one_line(error))
