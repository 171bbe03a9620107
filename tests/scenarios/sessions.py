"""Sessions of a run, each of which measures what the earlier ones have left, until it is killed."""

from pathlib import Path

from magicdec import api
from magicdec.scenarios import Job
from tests.runs import run_here


class Killed(BaseException):
    """The end of a process, for which nothing in it is prepared."""


def session(folder: Path, *keys: str) -> api.Result:
    """Do a run as the only job of a sweep of its own, in a store that the sessions share."""
    job = Job((), folder / f"sweep {len(list(folder.iterdir()))}")
    return run_here(folder / "runs", *keys, job=job)
