"""Programs that send runs to W&B, without the credentials and settings of the user who runs the
tests.

Each is a process of its own, because W&B keeps a service and credentials per process, and because
its output is read.
"""

import os
import sys
from pathlib import Path

from magicdec.kernels import library
from tests.programs import ROOT, Program

# Arguments: the store, the mode, the number of attempts, the run's id.
TELL = """
import json, os, sys
from dataclasses import asdict
from magicdec.tracking.loggers import wandb
from magicdec.tracking.store import Run
from magicdec.tracking.trackers import FinishedRun
from tests.tracking.sample import *
wandb.INIT_TIMEOUT_S = wandb.FINISH_TIMEOUT_S = float(os.environ.get("PATIENCE_S", "60"))
config = with_changes(wandb={"mode": sys.argv[2]})
for _ in range(int(sys.argv[3])):
    run = Run.open(sys.argv[1], sys.argv[4], config)
    run.finish(METRICS, GENERATIONS, HISTORY, SAMPLES, SYSTEM)
    print(json.dumps(asdict(wandb.log_run(FinishedRun(run.folder, config, run.result))), default=str))
"""  # noqa: E501

# To be put before: W&B's service is killed where tables would be logged.
KILL = """
import os, signal, subprocess
from magicdec.tracking.loggers import wandb
log_tables = wandb._log_tables
def kill(*arguments):
    wandb._log_tables = log_tables
    children = subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "wandb-core"], capture_output=True, text=True)
    os.kill(int(children.stdout.split()[0]), signal.SIGKILL)
wandb._log_tables = kill
"""  # noqa: E501


def start(*arguments, home, cwd=ROOT, **environment):
    """Start a program whose user has nothing in `home` but our compiled kernels: compiling them
    again takes longer than all tests of W&B.
    """
    kernels = Path(home, ".cache", "magicdec")
    if not kernels.exists():
        kernels.parent.mkdir(parents=True, exist_ok=True)
        kernels.symlink_to(library.path().parent, target_is_directory=True)
    env = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    env |= {"HOME": str(home), "NETRC": str(home / "netrc"), "PYTHONPATH": str(ROOT)}
    # For `wandb agent`, which starts python.
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    return Program(*arguments, cwd=cwd, env=env | environment)


def python(*arguments, home, cwd=ROOT, **environment):
    return start(*arguments, home=home, cwd=cwd, **environment).finish()
