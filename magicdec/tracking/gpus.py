"""The GPUs that a job of a sweep has to itself, or the machine if it has none: a file lock for
each.

Jobs of one sweep, or of several on one machine, neither share a GPU nor leave one idle; without
GPUs, they take turns. The kernel releases a lock when its holder dies. Single runs hold none.
"""

import math
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from magicdec import threads
from magicdec.config.schema import Config
from magicdec.errors import UserError
from magicdec.tracking.console import Console
from magicdec.tracking.lock import Busy, locked

VISIBLE = "CUDA_VISIBLE_DEVICES"
POLL_S, SILENT_S = 0.2, 2.0


def locks() -> Path:
    """Return the folder of this user's locks, by which jobs take turns."""
    user = os.getuid() if hasattr(os, "getuid") else ""
    return Path(tempfile.gettempdir(), f"magicdec-gpus-{user}")


def visible_gpus() -> dict[str, str]:
    """Return the visible GPUs: the names of CUDA_VISIBLE_DEVICES, and names that are the same for
    all processes.

    Ask the driver's own tool, so that CUDA does not start in this process.
    """
    listed = ""
    if shutil.which("nvidia-smi"):
        listed = subprocess.run(
            ["nvidia-smi", "--list-gpus"], capture_output=True, text=True
        ).stdout
    uuids = dict(re.findall(r"^GPU (\d+): .*\(UUID: (\S+)\)", listed, re.M))
    named = os.environ.get(VISIBLE)
    if named is None:
        return uuids
    names = [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]
    return {name: uuids.get(name, name) for name in names}


@contextmanager
def gpus_of_its_own(config: Config, own_process: bool) -> Iterator[None]:
    """Wait for as many of the visible GPUs as the run takes, and hold them; hide the others from
    CUDA, if it has not started.

    A run on the CPU holds all GPUs, or the machine if it has none: other jobs would disturb its
    times. In a process that does other jobs too, as the workers of some launchers, CUDA may have
    started: there, GPUs are not held.
    """
    visible = visible_gpus()
    if not measures(config) or (visible and not own_process):
        yield
        return
    machine = visible or {"": "cpu"}
    on_cpu = config.hardware.device == "cpu" or not visible
    wanted = len(machine) if on_cpu else min(config.hardware.tensor_parallel, len(machine))
    folder = locks()
    with ExitStack() as held:
        names: list[str] = []
        # One process at a time takes what becomes free until it has enough, so that no two wait for
        # each other.
        with locked(folder, patience_s=math.inf):
            silent_until = time.monotonic() + SILENT_S
            while len(names) < wanted:
                for name in [name for name in machine if name not in names]:
                    with suppress(Busy):
                        held.enter_context(locked(folder / machine[name], patience_s=0))
                        names.append(name)
                        break
                else:
                    if time.monotonic() > silent_until:
                        silent_until = math.inf
                        what = (
                            f"{wanted} of {len(visible)} GPUs"
                            if visible
                            else "the machine, which another job has"
                        )
                        Console(stderr=True).print(f"waiting for {what}", highlight=False)
                    time.sleep(POLL_S)
        if visible:
            os.environ[VISIBLE] = ",".join(sorted(names, key=list(visible).index))
        yield


def refuse_a_share(config: Config, launcher: str, settings: Mapping[str, Any]) -> None:
    """Raise UserError for a run on the CPU to which a launcher with these settings gives some of
    the threads.

    Its times would be those of fewer threads, and it would have another id.
    """
    usual, remedy = threads.usual(), ""
    if launcher == "ray" and (settings["ray"]["remote"].get("num_cpus") or 1) < usual:
        remedy = f"add +hydra.launcher.ray.remote.num_cpus={usual}"
    if launcher == "joblib" and settings["n_jobs"] != 1:
        remedy = "set hydra.launcher.n_jobs=1"
    if remedy and measures(config) and (config.hardware.device == "cpu" or not visible_gpus()):
        raise UserError(
            f"hydra/launcher={launcher}: gives each job some of the {usual} threads; {remedy}"
        )


def measures(config: Config) -> bool:
    """Return whether a run takes times, which other runs would disturb."""
    return not config.scenario.predicts
