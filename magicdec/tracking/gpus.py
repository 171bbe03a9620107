"""The GPUs that a job of a sweep has to itself: a file lock for each, with every launcher.

Jobs of one sweep, or of several on one machine, neither share a GPU nor leave one idle. The kernel releases a lock when
its holder dies. Single runs hold none.
"""

import math
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from rich.console import Console

from magicdec.config.schema import Config
from magicdec.tracking.lock import Busy, locked

LOCKS = Path(tempfile.gettempdir(), f"magicdec-gpus-{os.getuid() if hasattr(os, 'getuid') else ''}")
VISIBLE = "CUDA_VISIBLE_DEVICES"
POLL_S, SILENT_S = 0.2, 2.0


def visible_gpus() -> dict[str, str]:
    """Return the visible GPUs: the names of CUDA_VISIBLE_DEVICES, and names that are the same for all processes.

    Ask the driver's own tool, so that CUDA does not start in this process.
    """
    listed = ""
    if shutil.which("nvidia-smi"):
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True).stdout
    found = dict(re.findall(r"^GPU (\d+): .*\(UUID: (\S+)\)", listed, re.M))
    named = os.environ.get(VISIBLE)
    if named is None:
        return found
    names = [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]
    return {name: found.get(name, name) for name in names}


@contextmanager
def gpus_of_its_own(config: Config) -> Iterator[None]:
    """Wait for as many of the visible GPUs as the run takes, and hold them; hide the others from CUDA, if it has not
    started.

    A run on the CPU of a GPU machine holds all of them: other jobs would disturb its times.
    """
    visible = visible_gpus()
    wanted = len(visible) if config.hardware.device == "cpu" else min(config.hardware.tensor_parallel, len(visible))
    if config.scenario.name in ("predict", "plan") or not wanted:
        yield
        return
    with ExitStack() as held:
        names: list[str] = []
        # One process at a time takes what becomes free until it has enough, so that no two wait for each other.
        with locked(LOCKS, patience_s=math.inf):
            silent_until = time.monotonic() + SILENT_S
            while len(names) < wanted:
                for name in [name for name in visible if name not in names]:
                    with suppress(Busy):
                        held.enter_context(locked(LOCKS / visible[name], patience_s=0))
                        names.append(name)
                        break
                else:
                    if time.monotonic() > silent_until:
                        silent_until = math.inf
                        Console(stderr=True).print(f"waiting for {wanted} of {len(visible)} GPUs", highlight=False)
                    time.sleep(POLL_S)
        os.environ[VISIBLE] = ",".join(sorted(names, key=list(visible).index))
        yield
