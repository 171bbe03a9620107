"""The command line: Hydra composes a configuration, a scenario runs it, the exit code tells how it went.

0: done; 1: a failure, with its traceback; 2: a mistake of the user's, in one line on stderr; 130: interrupted.
"""

import difflib
import errno
import itertools
import os
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException
from yaml import MarkedYAMLError

from magicdec.config import Config, load
from magicdec.errors import JobFailed, UserError
from magicdec.rules import known_keys
from magicdec.tracking.lock import Busy
from magicdec.tracking.reader import LOG
from magicdec.tracking.sweep import BUSY, INTERRUPTED, JOB, JOBS, SWEEP_DIR, record, run_of

ROOT = Path(__file__).resolve().parent
CONF = ROOT / "conf"
USER_ERROR, FAILURE = 2, 1

# OmegaConf's ways to say that a value does not fit its key, and what would.
MISFITS = {
    "converted to Integer": "must be a whole number",
    "converted to Float": "must be a number",
    "not a valid bool|converted to Boolean": "must be true or false",
    r"type hint 'Union\[int, str\]'": "must be a whole number or auto",
    "not Optional": "must have a value",
    "not a subclass": "cannot be set as a whole, only its keys can",
    "ListConfig": "must be a list, as in [a,b]",
}

# What Hydra's plugins of their own bring, by the extra that installs each.
EXTRAS = {
    "hydra/sweeper=optuna": "optuna",
    "hydra/launcher=joblib": "joblib",
    "hydra/launcher=submitit_local": "submitit",
    "hydra/launcher=submitit_slurm": "submitit",
    "hydra/launcher=ray": "ray",
}

# How an operating system refuses Hydra the folder of a multirun.
REFUSALS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST}


# Of this process's jobs.
failures: list[JobFailed] = []


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def job(cfg: DictConfig) -> float | None:
    """Run one configuration, the only one or one of a multirun's; returns what a sweeper such as Optuna maximises."""
    if not cfg.sweep.dry_run:
        new_folders.clear()
    place = _place()
    if failures and cfg.sweep.fail_fast:
        print(f"sweep.fail_fast: job {place['number']} is not started", file=sys.stderr)
        raise failures[0]
    try:
        config = load(cfg)
        from magicdec.scenarios import Job, run  # here, because --help and mistakes must not wait for PyTorch

        return run(config, Job(**place)).get(config.sweep.objective)
    except Exception as error:
        if os.environ.get(JOB) and isinstance(error, Busy):
            raise JobFailed(BUSY) from error  # the launcher comes back to it
        overrides = list(place["overrides"])
        if place["sweep_dir"] and not cfg.sweep.dry_run and run_of(place["sweep_dir"], place["number"]) is None:
            with suppress(OSError):
                record(place["sweep_dir"], place["number"], None, overrides)
        explanation = explain(error, overrides) if isinstance(error, UserError | OmegaConfBaseException) else None
        where = f"job {place['number']} ({' '.join(overrides)}): " if place["sweep_dir"] else ""
        failures.append(JobFailed(report(error, explanation, where, _log(cfg.runs_dir, place))))
        raise failures[-1] from error


def _place() -> dict[str, Any]:
    """What was typed, and where in a sweep this job stands: of this process's, or of one that started this process."""
    hydra_cfg = HydraConfig.get()
    overrides = tuple(hydra_cfg.overrides.task)
    if number := os.environ.get(JOB):
        return {"overrides": overrides, "sweep_dir": Path(os.environ[SWEEP_DIR]), "number": int(number)}
    if hydra_cfg.mode == RunMode.MULTIRUN:
        sweep_dir = Path(hydra_cfg.sweep.dir)
        return {"overrides": overrides, "sweep_dir": sweep_dir, "number": hydra_cfg.job.num, "waits": True}
    return {"overrides": overrides, "sweep_dir": None, "number": 0}


def _log(runs_dir: str, place: Mapping[str, Any]) -> Path | None:
    """Where the run of a sweep's job has left its traceback, if it came that far."""
    run_id = run_of(place["sweep_dir"], place["number"]) if place["sweep_dir"] else None
    return Path(runs_dir, run_id, LOG) if run_id else None


def main() -> int:
    """Run the command line, and show at its end what has become of a multirun; returns the exit code."""
    sweeps.clear()
    code = _run()
    if new_folders and not (new_folders[0] / JOBS).exists():  # a dry run, or a mistake before the first job
        _remove_new_folders()
    for folder, with_figures in sweeps:
        if (folder / JOBS).exists():  # not after a dry run
            from magicdec.tracking.report.summary import summarize

            summarize(folder, with_figures)
    return code


def _run() -> int:
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises its errors, where it would print them in many lines
    os.environ["MAGICDEC_ROOT"] = str(ROOT)
    # The workers of other launchers are to import this checkout, whatever is installed.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    overrides: list[str] = []
    failures.clear()
    try:
        parser = get_args_parser()
        parser.error = _refuse  # type: ignore[method-assign]
        overrides = parser.parse_args().overrides
        job()
    except JobFailed as failure:
        return failure.args[0]
    except KeyboardInterrupt:
        if not os.environ.get(JOB):  # whose launcher says it
            print(f"interrupted{'; the same command goes on where it stood' if sweeps else ''}", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        return report(error, explain(error, overrides))
    return 0


def report(error: Exception, explanation: str | None, where: str = "", log: Path | None = None) -> int:
    """Tell on stderr what went wrong, in a line where there is an explanation or a log; returns the exit code."""
    if explanation is None:
        if log is None:
            traceback.print_exception(error)
        if where:
            line = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"error: {where}{line}{f'; its traceback is in {log}' if log else ''}", file=sys.stderr)
        return FAILURE
    print(f"error: {where}{' '.join(explanation.split())}", file=sys.stderr)
    return USER_ERROR


def explain(error: Exception, overrides: list[str]) -> str | None:
    """The helpful part of what we, Hydra or OmegaConf say of a configuration; None if it is not about a mistake."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, MarkedYAMLError) and error.problem_mark:
        return f"{error.problem_mark.name}, line {error.problem_mark.line + 1}: {error.problem}"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: not of the form key=value; a value with spaces, commas or brackets needs quotes"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options is not None:
        return _explain_option(error.missing_cfg_file, error.options, overrides)
    origin = _omegaconf_error(error)
    if origin is not None:
        file = re.match(r"In '(.*?)'", str(error))
        return (f"{file[1]}.yaml: " if file else "") + _explain_key(origin)
    if isinstance(error, HydraException | ValueError | AssertionError):
        return _explain_text(error)
    if isinstance(error, OSError) and error.errno in REFUSALS and sweeps:
        what = f"cannot write {error.filename or sweeps[-1][0]}: {error.strerror}"
        return f"runs_dir={sweeps[-1][0].parents[1]}: {what}; choose a folder with runs_dir=FOLDER"
    return None


def _explain_key(error: OmegaConfBaseException) -> str:
    """OmegaConf's errors: they know their key, and usually its value."""
    key, text = error.full_key or "", str(error).partition("\n")[0]
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        return f"unknown key {key}; {_known_instead(key)}"
    if isinstance(error, MissingMandatoryValue):
        return f"{key} is missing a value"
    for pattern, valid in MISFITS.items():
        if re.search(pattern, text):
            return f"{key}={'null' if error.value is None else error.value}: {valid}"
    return f"{key}: {text}" if key else text


def _known_instead(key: str) -> str:
    """What an unknown key was probably meant to be: a sibling, its namesake in another group, a similar key."""
    keys, (parent, _, name) = list(known_keys(Config)), key.rpartition(".")
    siblings = [known.rpartition(".")[2] for known in keys if known.rpartition(".")[0] == parent]
    namesakes = [known for known in keys if known.endswith(f".{name}")]
    close = difflib.get_close_matches(name, siblings, n=1)
    if close or namesakes:
        return f"did you mean {f'{parent}.{close[0]}'.lstrip('.') if close else namesakes[0]}?"
    return f"{parent or 'there'} {'has' if parent else 'are'}: {', '.join(siblings)}" if siblings else "see --help"


def _explain_text(error: Exception) -> str | None:
    """Hydra's errors: they say it in words, and know their override only while they are raised."""
    text, override = str(error), _current_override(error)
    key, _, value = override.lstrip("+").partition("=")
    parent = key.rpartition(".")[0]
    if "root: NoneType" in text:  # from OmegaConf, about a key within a null
        instead = "use draft=model" if parent == "draft.model" else "nothing can be set in it"
        return f"{override}: {parent} is null; {instead}"
    if "Could not override 'target@draft.model'" in text:
        return "target@draft.model: this draft has no model of its own; use draft=model"
    if "must be a string or a list" in text and key:
        return f"{override}: {_no_such_option(value, sorted(path.stem for path in (CONF / key).glob('*.yaml')))}"
    if found := re.match(r"Ambiguous value for argument '(.*)'|Sweep parameters '(.*)' requires", text):
        return f"{found[1] or found[2]}: several values need -m; a list is written [a,b], a text \"key='a,b'\""
    if found := re.match(r"Multiple values for (\S+)\.|Could not append to config. An item is already at '(.*)'", text):
        return f"{found[1] or found[2]} is there already: leave out the +"
    if found := re.search(r"use (\+\S+=\S+)", text):
        return f"{found[1][1:]}: write {found[1]}"
    if isinstance(error, AssertionError):
        return None
    return re.split(r"(?:Config s|S)earch path:|See http", text)[0]


def _explain_option(missing: str, options: Sequence[str], overrides: list[str]) -> str:
    """An option that is not there, GROUP/OPTION: those of its group and of the folders in it, or what would install it.

    It is called as on the command line, which may say more than group and name: target@draft.model=NAME.
    """
    group, _, option = missing.rpartition("/")
    typed = f"{group}={option}"
    for override in overrides:
        key, _, value = override.partition("=")
        name = key.lstrip("+").partition("@")[0]
        within = missing.removeprefix(f"{name}/")  # experiment=paper/table9
        if within != missing and within in value.split(","):
            group, option, typed = name, within, f"{key}={within}"
    if extra := EXTRAS.get(f"{group}={option}"):
        return f"{typed}: needs pip install 'magicdec[{extra}]'"
    within_group = (path.relative_to(CONF / group).with_suffix("") for path in (CONF / group).glob("*/**/*.yaml"))
    return f"{typed}: {_no_such_option(option, [*options, *sorted(path.as_posix() for path in within_group)])}"


def _no_such_option(option: str, options: Sequence[str]) -> str:
    """Of options in folders, the last part is compared, too."""
    names = {name.rpartition("/")[2]: name for name in options} | {name: name for name in options}
    close = difflib.get_close_matches(option, names, n=1, cutoff=0.7)
    return f"no such option; one of: {', '.join(options)}{f'; did you mean {names[close[0]]}?' if close else ''}"


def _omegaconf_error(error: BaseException | None) -> OmegaConfBaseException | None:
    """The one that Hydra has wrapped, if any."""
    while error is not None and not isinstance(error, OmegaConfBaseException):
        error = error.__cause__ or error.__context__
    return error


def _current_override(error: Exception) -> str:
    """The override that Hydra was applying when it gave up; its errors do not all name it."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        override = frame.f_locals.get("override")
        if isinstance(override, Override):
            return override.input_line or ""
    return ""


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
