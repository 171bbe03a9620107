"""Processes that tell W&B of runs, without the credentials and settings of whoever runs the tests.

Processes of their own, because W&B keeps a service and credentials per process, and whatever it prints is to be seen.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Arguments: the store, the mode, the number of attempts, the run's id.
TELL = """
import json, os, sys
from dataclasses import asdict
from magicdec.tracking import wandb
from magicdec.tracking.store import Run
from magicdec.tracking.trackers import FinishedRun
from tests.tracking.sample import *
wandb.INIT_TIMEOUT_S = wandb.FINISH_TIMEOUT_S = float(os.environ.get("PATIENCE_S", "60"))
config = with_changes(wandb={"mode": sys.argv[2]})
for _ in range(int(sys.argv[3])):
    run = Run.open(sys.argv[1], sys.argv[4], config)
    run.finish(METRICS, GENERATIONS, HISTORY, SAMPLES, SYSTEM)
    print(json.dumps(asdict(wandb.log_run(FinishedRun(run.folder, config, run.result))), default=str))
"""

# To be put before: W&B's service is killed where tables would be logged.
KILL = """
import os, signal, subprocess
from magicdec.tracking import wandb
log_tables = wandb._log_tables
def kill(*arguments):
    wandb._log_tables = log_tables
    children = subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "wandb-core"], capture_output=True, text=True)
    os.kill(int(children.stdout.split()[0]), signal.SIGKILL)
wandb._log_tables = kill
"""


def start(*arguments, home, cwd=ROOT, **environment):
    """A Python process whose home is `home`, as subprocess.Popen."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    env |= {"HOME": str(home), "NETRC": str(home / "netrc"), "PYTHONPATH": str(ROOT)}
    env["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), env["PATH"]]
    )  # for `wandb agent`, which starts python
    command = [sys.executable, *map(str, arguments)]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=cwd, env=env | environment, **pipes)


def finished(process):
    """What became of it, as subprocess.run has it."""
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def python(*arguments, home, cwd=ROOT, **environment):
    """Run it to its end."""
    return finished(start(*arguments, home=home, cwd=cwd, **environment))
