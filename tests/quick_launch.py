"""launch.py with a plan and a scenario that take a moment, and no PyTorch; the process launcher's
jobs are this, too.

It says in the folder QUICK_STARTS, by an empty file, each time that a run is begun, and takes
QUICK_SECONDS. It waits QUICK_PATIENCE_S for W&B. draft.gamma=6 crashes, 7 is killed.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import magicdec.planning
import magicdec.scenarios
from magicdec.cli import main
from magicdec.config.prediction_settings import Assumed
from magicdec.tracking.loggers import wandb

CPU = SimpleNamespace(type="cpu")


def quick(plan, run, progress):
    config = plan.config
    gamma, budget = config.draft.gamma, config.cache.budget
    Path(
        os.environ["QUICK_STARTS"], f"{gamma}-{budget}-{time.monotonic_ns()}-{os.getpid()}"
    ).touch()
    begin = time.monotonic()
    time.sleep(float(os.environ.get("QUICK_SECONDS", "0.02")))
    if gamma == 6:
        raise RuntimeError("gamma 6 is unlucky")
    if gamma == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    tokens = [random.Random(f"{gamma} {budget}").randrange(1000) for _ in range(2000)]
    return SimpleNamespace(
        metrics={
            "repeats": getattr(config.scenario, "repeats", 1),
            "speedup": gamma + budget / 1000,
            "begin": begin,
            "end": time.monotonic(),
        }
        | {"gpus": os.environ.get("CUDA_VISIBLE_DEVICES")},
        generations=[
            {"row": 0, "context_len": 64, "autoregressive": tokens, "speculative": tokens}
        ],
        history=[{"round": 0, "accepted": 1.0}],
        samples=[{"row": 0, "autoregressive": "text"}],
        view="done",
    )


run = quick


def prepare(config):
    return SimpleNamespace(
        config=config,
        fingerprints={},
        device_name="a device",
        num_ranks=1,
        warnings=list,
        device=CPU,
        predicts=True,
    )


def fitting(plan, asked):
    return plan


def num_bytes(plan):
    return 3 << 30


def seconds(plan, attempts):
    return 90.0


if __name__ in ("__main__", "__mp_main__"):  # the command, and its jobs
    magicdec.scenarios._scenario = lambda config: sys.modules[__name__]
    Assumed.reads_store = False  # what is done is skipped, as after a measurement
    # Which a dry run asks for num_bytes and seconds.
    magicdec.planning.fits = magicdec.planning.duration = sys.modules[__name__]
    if patience := os.environ.get("QUICK_PATIENCE_S"):
        wandb.INIT_TIMEOUT_S = wandb.FINISH_TIMEOUT_S = float(patience)

if __name__ == "__main__":
    sys.exit(main())
