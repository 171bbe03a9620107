"""Look up one of a sweep's runs in the store: it has a result that suffices, a folder to continue
in, or nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magicdec.config.scenario_settings import Compare
from magicdec.config.schema import Config
from magicdec.scenarios.repeats import Goal
from magicdec.tracking import sweep
from magicdec.tracking.reader import attempts, read_result, run_of
from magicdec.tracking.software import software
from magicdec.tracking.sweep import Job


@dataclass(frozen=True)
class Found:
    """The part of the store that concerns a job."""

    result: Mapping[str, Any]  # of a run that is done, as far as it goes; {} if there is none
    folder: Path | None = None  # to add repeats to; None: the run gets a new one
    before: int = 0  # repeats in that folder that do not count towards those asked for
    suffices: bool = False  # nothing is to be measured


def look_up(config: Config, name: str, job: Job) -> Found:
    """Return what the store has of a run. A run by hand finds nothing: it measures in a folder of
    its own.
    """
    if job.sweep_dir is None:
        return Found({})
    # Of an earlier turn, or of this job before it was killed.
    line = sweep.last_line(job.sweep_dir, job.number)
    if line is not None and line["id"] is not None and run_of(line["id"]) == name:
        attempt = Path(config.runs_dir, line["id"])
        return _judged(config, attempt, read_result(attempt), line.get("before", 0))
    return of_store(config, name)


def of_store(config: Config, name: str) -> Found:
    """Return what earlier runs have left of a run: nothing of a prediction, which is made again."""
    may_skip = config.resume and not config.scenario.reads_store
    latest = _latest(config, name) if may_skip else None
    if latest is None:
        return Found({})
    result = read_result(latest)
    return _judged(config, latest, result, _repeats_before(config, result))


def _latest(config: Config, name: str) -> Path | None:
    """Return the latest attempt of this software, one that is done first; with resume=any_version,
    of any software.
    """
    mine = {} if config.resume == "any_version" else software()
    folders = [
        (folder, read_result(folder)) for folder in reversed(attempts(config.runs_dir, name))
    ]
    same = [(folder, result) for folder, result in folders if mine.items() <= result.items()]
    for folder, result in same:
        if result.get("status") == "done":
            return folder
    same = [(folder, result) for folder, result in folders if software().items() <= result.items()]
    return same[0][0] if same else None


def _judged(config: Config, folder: Path, result: Mapping[str, Any], before: int) -> Found:
    """Return whether a run suffices, and otherwise whether it can be added to."""
    is_done = result.get("status") == "done"
    goal = Goal(config.scenario, before) if isinstance(config.scenario, Compare) else None
    done = result if is_done else {}
    if is_done and (goal is None or goal.is_met_by(result)):
        return Found(done, folder, before, suffices=True)
    is_same = software().items() <= result.items()
    return Found(done, folder, before) if config.stores_units and is_same else Found({})


def _repeats_before(config: Config, result: Mapping[str, Any]) -> int:
    """Return the repeats of a disturbed run that resume=noisy pools with as many new ones;
    otherwise 0.

    A run whose speedup is known as precisely as asked for is not measured again.
    """
    if (
        config.resume != "noisy"
        or result.get("status") != "done"
        or not isinstance(config.scenario, Compare)
    ):
        return 0
    reached = result.get("speedup_precision")
    is_precise = reached is not None and reached <= config.scenario.precision
    if is_precise or not (result.get("noisy") or config.scenario.repeats == "auto"):
        return 0
    return Goal.number_of(result)
