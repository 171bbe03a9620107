"""The command line: Hydra composes a configuration, a scenario runs it, the exit code tells how it went.

0: done; 1: a failure, with its traceback; 2: a mistake of the user's, in one line on stderr; 130: interrupted.
"""

import errno
import itertools
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from magicdec import __version__
from magicdec.config.explain import explain
from magicdec.config.load import load
from magicdec.config.schema import CONF
from magicdec.errors import JobFailed, UserError, to_stderr
from magicdec.tracking import sweep
from magicdec.tracking.gpus import gpus_of_its_own
from magicdec.tracking.lock import Busy
from magicdec.tracking.reader import LOG

ROOT = Path(__file__).resolve().parent
USER_ERROR, FAILURE = 2, 1
# How an operating system refuses Hydra the folder of a multirun.
REFUSALS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST}


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def job(cfg: DictConfig) -> float | None:
    """Run one configuration, the only one or one of a multirun's; returns what a sweeper such as Optuna maximises."""
    if not cfg.sweep.dry_run:
        new_folders.clear()
    place = _place()
    fails_fast = place["sweep_dir"] and cfg.sweep.fail_fast and not cfg.sweep.dry_run
    if fails_fast:
        sweep.refuse_if_stopped(place["sweep_dir"], place["number"])
    try:
        if place["sweep_dir"] is None:
            _refuse_a_grid()
        config = load(cfg)
        with gpus_of_its_own(config) if os.environ.get(sweep.JOB) else nullcontext():
            from magicdec.scenarios import Job, run  # here, because --help and mistakes must not wait for PyTorch

            return run(config, Job(**place)).get(config.sweep.objective)
    except Exception as error:
        if os.environ.get(sweep.JOB) and isinstance(error, Busy):
            raise JobFailed(sweep.BUSY) from error  # the launcher comes back to it
        overrides, sweep_dir, number = list(place["overrides"]), place["sweep_dir"], place["number"]
        if sweep_dir and not cfg.sweep.dry_run and sweep.attempt_of(sweep_dir, number) is None:
            with suppress(OSError):
                sweep.record(sweep_dir, number, None, overrides)
        explanation = explain(error, overrides) if isinstance(error, UserError | OmegaConfBaseException) else None
        where = f"job {place['number']} ({' '.join(overrides)}): " if place["sweep_dir"] else ""
        code = report(error, explanation, where, _log(cfg.runs_dir, place))
        if fails_fast:
            sweep.stop(place["sweep_dir"], code)
        raise JobFailed(code) from error


def _place() -> dict[str, Any]:
    """What was typed, and where in a sweep this job stands: of this process's, or of one that started this process."""
    hydra_cfg = HydraConfig.get()
    overrides = tuple(hydra_cfg.overrides.task)
    if number := os.environ.get(sweep.JOB):
        return {"overrides": overrides, "sweep_dir": Path(os.environ[sweep.SWEEP_DIR]), "number": int(number)}
    if hydra_cfg.mode == RunMode.MULTIRUN:
        sweep_dir = Path(hydra_cfg.sweep.dir)
        return {"overrides": overrides, "sweep_dir": sweep_dir, "number": hydra_cfg.job.num, "waits": True}
    return {"overrides": overrides, "sweep_dir": None, "number": 0}


def _refuse_a_grid() -> None:
    """Raise UserError for a grid without -m, which would run its defaults once; warn of an experiment with one."""
    hydra_cfg = HydraConfig.get()
    if grid := hydra_cfg.runtime.choices.get("sweeps"):
        raise UserError(f"+sweeps={grid}: a grid needs -m, as in python launch.py -m +sweeps={grid}")
    if axes := ", ".join(hydra_cfg.sweeper.get("params") or ()):
        experiment = hydra_cfg.runtime.choices.get("experiment")
        to_stderr(f"warning: experiment={experiment} is a grid over {axes}: -m runs all of it")


def _log(runs_dir: str, place: Mapping[str, Any]) -> Path | None:
    """Where the run of a sweep's job has left its traceback, if it came that far."""
    attempt_id = sweep.attempt_of(place["sweep_dir"], place["number"]) if place["sweep_dir"] else None
    return Path(runs_dir, attempt_id, LOG) if attempt_id else None


def main() -> int:
    """Run the command line, and show at its end what has become of a multirun; returns the exit code."""
    if os.environ.pop(sweep.FOLLOWS, None):
        threading.Thread(target=_follow_stdin, daemon=True).start()
    sweeps.clear()
    code = _run()
    if new_folders and not (new_folders[0] / sweep.JOBS).exists():  # a dry run, or a mistake before the first job
        _remove_new_folders()
    for folder, with_figures in sweeps:
        if (folder / sweep.JOBS).exists():  # not after a dry run
            from magicdec.tracking.report.summary import summarize

            summarize(folder, with_figures)
    return code


def _follow_stdin() -> None:
    sys.stdin.read()
    os._exit(FAILURE)


def _run() -> int:
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises its errors, where it would print them in many lines
    os.environ["MAGICDEC_ROOT"] = str(ROOT)
    # The workers of other launchers are to import this checkout, whatever is installed.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    overrides: list[str] = []
    try:
        parser = get_args_parser()
        parser.error = _refuse  # type: ignore[method-assign]
        parser._option_string_actions["--version"].version = f"magicdec {__version__}"  # type: ignore[attr-defined]
        overrides = parser.parse_args().overrides
        job()
    except JobFailed as failure:
        return failure.args[0]
    except KeyboardInterrupt:
        if not os.environ.get(sweep.JOB):  # whose launcher says it
            to_stderr(f"interrupted{'; the same command goes on where it stood' if sweeps else ''}")
        return sweep.INTERRUPTED
    except Exception as error:
        return report(error, _refusal(error) or explain(error, overrides))
    return 0


def report(error: Exception, explanation: str | None, where: str = "", log: Path | None = None) -> int:
    """Tell on stderr what went wrong, in a line where there is an explanation or a log; returns the exit code."""
    if explanation is None:
        if log is None:
            traceback.print_exception(error)
        if where:
            line = f"{type(error).__name__}: {error}".splitlines()[0]
            to_stderr(f"error: {where}{line}{f'; its traceback is in {log}' if log else ''}")
        return FAILURE
    to_stderr(f"error: {where}{' '.join(explanation.split())}")
    return USER_ERROR


def _refusal(error: Exception) -> str | None:
    """Why there can be no folder for a multirun."""
    if not (isinstance(error, OSError) and error.errno in REFUSALS and sweeps):
        return None
    what = f"cannot write {error.filename or sweeps[-1][0]}: {error.strerror}"
    return f"runs_dir={sweeps[-1][0].parents[1]}: {what}; choose a folder with runs_dir=FOLDER"


def _refuse(message: str) -> NoReturn:
    hint = "keys are set without dashes: key=value" if " -" in message else "flags such as -m come before all keys"
    raise UserError(f"{message}; {hint}" if "unrecognized" in message else message)


# A multirun's folders that are not there before it: Hydra makes them before it has looked at the jobs.
new_folders: list[Path] = []


# The multirun's folder, and whether it is to have figures: once Hydra has asked where it is.
sweeps: list[tuple[Path, bool]] = []


def _sweep_folder(runs_dir: str, name: str | None, grid: str | None, with_figures: bool) -> str:
    end = f"_{name or grid}" if name or grid else ""
    times = (f"{datetime.now():%Y-%m-%d_%H-%M-%S}{f'-{count}' if count else ''}" for count in itertools.count())
    folders = (Path(runs_dir, "sweeps", time + end) for time in times)
    folder = next(path for path in folders if not path.exists())
    new_folders[:] = [path for path in (folder, folder.parent, folder.parent.parent) if not path.exists()]
    sweeps[:] = [(folder, with_figures)]
    return str(folder)


def _remove_new_folders() -> None:
    """Those that hold nothing but what Hydra writes into them at once."""
    for folder in new_folders:
        with suppress(OSError):
            if [path.name for path in folder.iterdir()] == ["multirun.yaml"]:
                (folder / "multirun.yaml").unlink()
            folder.rmdir()


def _result(ret: JobReturn) -> Any:
    """What a job returned. Hydra's own property announces a failure on stderr, where `report` has been already."""
    if ret.status == JobStatus.FAILED:
        raise ret._return_value
    return ret._return_value


JobReturn.return_value = JobReturn.return_value.getter(_result)  # type: ignore
OmegaConf.register_new_resolver("sweep_folder", _sweep_folder, use_cache=True, replace=True)

if __name__ == "__main__":
    sys.exit(main())
