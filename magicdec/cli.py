"""The command `magicdec`: a subcommand, or a run. For a run, Hydra composes a configuration and a
scenario runs it.

Exit codes are 0: done; 1: a failure, with its traceback; 2: a mistake of the user's, in one line on
stderr; 130: interrupted; 143: stopped by SIGTERM.
"""

import errno
import os
import re
import sys
import traceback
from argparse import Namespace
from contextlib import nullcontext, suppress
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import NoReturn, cast

from hydra._internal.utils import _run_hydra, get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hydra_plugins.magicdec._sweeper import register
from magicdec import commands
from magicdec.config.checks import refuse_secrets
from magicdec.config.explain import explain
from magicdec.config.folders import CONF
from magicdec.config.hydra_versions import choose_behaviour, register_resolver
from magicdec.config.load import load
from magicdec.config.search_path import add_own_options
from magicdec.errors import (
    USER_ERROR,
    JobFailed,
    Stopped,
    UserError,
    in_one_line,
    is_out_of_memory,
    to_stderr,
)
from magicdec.inputs import plugins
from magicdec.inputs.rules import FileName, did_you_mean, parse
from magicdec.tracking import sweep
from magicdec.tracking.gpus import gpus_of_its_own, refuse_a_share
from magicdec.tracking.lock import Busy
from magicdec.tracking.reader import LOG
from magicdec.tracking.sweep import Job
from magicdec.units import in_minutes
from magicdec.version import VERSION

FAILURE = 1
TERMINATED = 143  # 128 + SIGTERM, as a shell has it
# A subcommand is a module of this package, with a function `main` that gets its arguments.
COMMANDS = {
    name.replace("_", "-"): f"magicdec.commands.{name}" for name in plugins.built_in(commands)
}
# How an operating system refuses Hydra the folder of a multirun.
REFUSALS = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EEXIST,
}
# Replaces the launcher of a dry run, which then starts no process and queues nothing.
LISTING = ["hydra/launcher=basic", "hydra/hydra_logging=none"]

# The folder of this process's multirun and whether it gets figures, known once Hydra has asked for
# it.
sweeps: list[tuple[Path, bool]] = []
# Folders that the multirun creates: Hydra makes them before it looks at the jobs.
new_folders: list[Path] = []


def main() -> int:
    """Run the command line; return the exit code."""
    command, *arguments = sys.argv[1:] or [""]
    try:
        os.getcwd()
    except OSError:
        to_stderr("error: the working directory was removed; change to one that exists")
        return USER_ERROR
    if command in COMMANDS:
        return _subcommand(command, arguments)
    if re.fullmatch(r"[\w-]+", command) and not command.startswith("-"):
        hint = did_you_mean(command, COMMANDS) or "; see --help"
        to_stderr(
            f"error: {command}: neither a command ({', '.join(COMMANDS)}) nor key=value{hint}"
        )
        return USER_ERROR
    return run()


def _subcommand(command: str, arguments: list[str]) -> int:
    """Run a subcommand, which explains mistakes itself; return the exit code."""
    try:
        return import_module(COMMANDS[command]).main(arguments)
    except KeyboardInterrupt:
        to_stderr("interrupted")
        return sweep.INTERRUPTED


def run() -> int:
    """Run one configuration or, with -m, many, whose results are shown at the end; return the exit
    code.
    """
    sweeps.clear()
    sweep.planned.clear()
    code = _launch()
    if any(sweep.planned):
        print(
            f"about {in_minutes(sum(filter(None, sweep.planned)))} in all, without loading and"
            " start-up"
        )
    # A dry run, or a mistake before the first job.
    if new_folders and not (new_folders[0] / sweep.JOBS).exists():
        _remove_new_folders()
    for folder, with_figures in sweeps:
        if (folder / sweep.JOBS).exists():  # not after a dry run
            from magicdec.report.summary import summarize

            summarize(folder, with_figures)
    return code


def _launch() -> int:
    """Let Hydra run the jobs; return the exit code."""
    # Hydra then raises its errors, where it would print them in many lines.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    overrides: list[str] = []
    try:
        parser = get_args_parser()
        parser.error = _refuse  # type: ignore[method-assign]
        parser._option_string_actions["--version"].version = f"magicdec {VERSION}"  # type: ignore[attr-defined]
        arguments = parser.parse_intermixed_args()  # flags may follow keys
        overrides = list(arguments.overrides)
        _prepare(arguments)
        choose_behaviour()
        register()
        add_own_options(Path(arguments.config_path or CONF))
        _run_hydra(arguments, parser, job, str(CONF), "config")
    except JobFailed as failure:
        return failure.args[0]
    except SystemExit as end:
        return int(end.code or 0)
    except Stopped as stopped:
        to_stderr(f"{stopped}; what was measured is kept")
        return TERMINATED
    except KeyboardInterrupt:
        if not os.environ.get(sweep.JOB):  # otherwise its launcher prints the line
            to_stderr(f"interrupted{'; to resume, run the same command again' if sweeps else ''}")
        return sweep.INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe, such as head, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE
    except Exception as error:
        return report(error, _refusal(error) or explain(error, overrides))
    return 0


def _prepare(arguments: Namespace) -> None:
    """Answer a shell that asks what could follow, refuse what is unsafe, and change what Hydra
    would do otherwise.
    """
    if line := os.environ.get("COMP_LINE"):
        os.environ["COMP_LINE"] = line.replace(" serve ", " ", 1)  # which takes the keys of a run
        for completed in _completed(line):
            print(completed)
    refuse_secrets(arguments.overrides)
    if rerun := arguments.experimental_rerun:
        raise UserError(
            f"--experimental-rerun={rerun}: would load a pickle; repeat the command instead"
        )
    if arguments.multirun and "sweep.dry_run=true" in map(str.lower, arguments.overrides):
        kept = [
            text
            for text in arguments.overrides
            if not text.startswith(("hydra/launcher", "hydra.launcher"))
        ]
        arguments.overrides = kept + LISTING
    # Hydra would resolve a relative path from this file's folder.
    if arguments.config_path and "://" not in arguments.config_path:
        arguments.config_path = str(Path(arguments.config_path).resolve())


def job(cfg: DictConfig) -> float | None:
    """Run one configuration, alone or as a job of a multirun; return the metric that a sweeper such
    as Optuna reads.

    A job that fails prints its error. In a multirun it then raises JobFailed, and Hydra goes on to
    the next job; a single run exits.
    """
    if not cfg.sweep.get("dry_run"):
        new_folders.clear()
    this = _job()
    try:
        return _run(cfg, this)
    except JobFailed as failure:  # not started, because sweep.fail_fast has stopped the sweep
        code = failure.args[0]
    except Exception as error:
        code = _fail(error, cfg, this)
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        raise JobFailed(code)
    sys.exit(code)


def _job() -> Job:
    """Return what was typed, and the job's place in a sweep of this process or of the process that
    started this one.
    """
    hydra_cfg = HydraConfig.get()
    # With ${...} as it is.
    typed = cast(list[str], OmegaConf.to_container(hydra_cfg.overrides.task))
    overrides = tuple(typed)
    if number := os.environ.get(sweep.JOB):
        return Job(overrides, Path(os.environ[sweep.SWEEP_DIR]), int(number))
    if hydra_cfg.mode == RunMode.MULTIRUN:
        return Job(overrides, Path(hydra_cfg.sweep.dir), hydra_cfg.job.num, waits=True)
    return Job(overrides)


def _run(cfg: DictConfig, this: Job) -> float | None:
    if this.sweep_dir is None:
        _refuse_a_grid()
    elif cfg.sweep.get("fail_fast") and not cfg.sweep.get("dry_run"):
        sweep.refuse_if_stopped(this.sweep_dir, this.number)
    config = load(cfg, cast(DictConfig, HydraConfig.get()))
    # Here, because --help and mistakes must not wait for it.
    from magicdec.scenarios import run as run_scenario

    in_sweep = this.sweep_dir is not None and not config.sweep.dry_run
    if in_sweep:
        hydra_cfg = HydraConfig.get()
        launcher = str(hydra_cfg.runtime.choices["hydra/launcher"])
        refuse_a_share(config, launcher, hydra_cfg.launcher)
    with gpus_of_its_own(config, bool(os.environ.get(sweep.JOB))) if in_sweep else nullcontext():
        return run_scenario(config, this).get(config.sweep.objective)


def _refuse_a_grid() -> None:
    """Raise UserError for a grid without -m, which would run its defaults once; warn of an
    experiment with one.
    """
    hydra_cfg = HydraConfig.get()
    if grid := hydra_cfg.runtime.choices.get("sweeps"):
        raise UserError(f"+sweeps={grid}: a grid needs -m, as in magicdec -m +sweeps={grid}")
    if axes := ", ".join(hydra_cfg.sweeper.get("params") or ()):
        experiment = hydra_cfg.runtime.choices.get("experiment")
        to_stderr(f"warning: experiment={experiment} is a grid over {axes}: -m runs all of it")


def _fail(error: Exception, cfg: DictConfig, this: Job) -> int:
    """Report why a job has failed, and note in its sweep that it has; return its exit code."""
    if os.environ.get(sweep.JOB) and isinstance(error, Busy):
        return sweep.BUSY  # its launcher starts it again later
    overrides, sweep_dir = list(this.overrides), this.sweep_dir
    is_expected = isinstance(error, UserError | OmegaConfBaseException) or is_out_of_memory(error)
    explanation = explain(error, overrides) if is_expected else None
    if sweep_dir is None:
        return report(error, explanation)
    attempt_id = sweep.attempt_of(sweep_dir, this.number)
    if attempt_id is None and not cfg.sweep.get("dry_run"):
        with suppress(OSError):
            sweep.record(sweep_dir, this.number, None, overrides)
    log = Path(cfg.runs_dir, attempt_id, LOG) if attempt_id else None
    code = report(error, explanation, f"job {this.number} ({' '.join(overrides)}): ", log)
    if cfg.sweep.get("fail_fast") and not cfg.sweep.get("dry_run"):
        sweep.stop(sweep_dir, code)
    return code


def report(
    error: Exception, explanation: str | None, where: str = "", log: Path | None = None
) -> int:
    """Print an error: one line if there is an explanation or a log, otherwise its traceback. Return
    the exit code.
    """
    if explanation is not None:
        to_stderr(f"error: {where}{' '.join(explanation.split())}")
        return USER_ERROR
    if log is None:
        traceback.print_exception(error)
    if where:
        to_stderr(
            f"error: {where}{in_one_line(error)}{f'; its traceback is in {log}' if log else ''}"
        )
    return FAILURE


def _refusal(error: Exception) -> str | None:
    """Explain why a multirun's folder cannot be made; None for any other error."""
    if not (isinstance(error, OSError) and error.errno in REFUSALS and sweeps):
        return None
    folder = sweeps[-1][0]
    what = f"cannot write {error.filename or folder}: {error.strerror}"
    return f"runs_dir={folder.parents[1]}: {what}; choose a folder with runs_dir=FOLDER"


def _completed(line: str) -> list[str]:
    """Return the commands that the first word of a command line could become."""
    typed = re.fullmatch(r"(?:python\S* )?\S+ ([\w-]*)", line)
    return [command for command in COMMANDS if typed and command.startswith(typed[1])]


def _refuse(message: str) -> NoReturn:
    hint = "; keys are set without dashes: key=value" if "unrecognized" in message else ""
    raise UserError(f"{message}{hint}")


def _sweep_folder(runs_dir: str, name: str | None, grid: str | None, with_figures: bool) -> str:
    """Return a new folder for a multirun. conf/config.yaml asks for it, once in a process."""
    parse(FileName, name, "sweep.name")  # type: ignore[arg-type]
    title = name or (grid or "").replace("/", "-")
    end = f"_{title}" if title else ""
    folder = Path(runs_dir, "sweeps", f"{datetime.now():{sweep.TIME}}{end}")
    new_folders[:] = [
        path for path in (folder, folder.parent, folder.parent.parent) if not path.exists()
    ]
    sweeps[:] = [(folder, with_figures)]
    return str(folder)


register_resolver("magicdec.sweep_folder", _sweep_folder, use_cache=True)


def _remove_new_folders() -> None:
    """Remove new folders that hold nothing except what Hydra writes into them first."""
    for folder in new_folders:
        with suppress(OSError):
            if [path.name for path in folder.iterdir()] == ["multirun.yaml"]:
                (folder / "multirun.yaml").unlink()
            folder.rmdir()
