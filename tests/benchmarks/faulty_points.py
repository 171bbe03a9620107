"""Points of benchmarks/gpu.py of which some go wrong in the ways that GPUs make processes go
wrong.
"""

import atexit
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from gpu_store import Point, Store, work

FOLDER = Path(sys.argv[1])


def logged(name: str, measure: Callable[[], object]) -> dict:
    with (FOLDER / "tried").open("a") as log:
        log.write(f"{name}\n")
    measure()
    return {"ms": 1.0}


def out_of_memory() -> None:
    raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")


def lost() -> None:
    (FOLDER / "lost").touch()


def device_answers() -> bool:
    there = not (FOLDER / "lost").exists()
    (FOLDER / "lost").unlink(missing_ok=True)
    return there


MEASURES = {
    "first": lambda: None,
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hangs": lambda: time.sleep(600),
    "out of memory": out_of_memory,
    "segfault": lambda: ctypes.string_at(0),
    "exits": lambda: os._exit(7),
    "wrong": lambda: 1 / 0,
    "loses the device": lost,
    "last": lambda: None,
}

if __name__ == "__main__":
    if "stuck" in sys.argv:
        atexit.register(time.sleep, 600)
    if "broken" in sys.argv:
        sys.exit("an import that fails")
    points = (
        Point("x", name, lambda n=name, m=m: logged(n, m), limit_s=1)
        for name, m in MEASURES.items()
    )
    only = [argument for argument in sys.argv[2:] if argument in MEASURES]
    points = [point for point in points if not only or point.key in only]
    sys.exit(work(points, Store(FOLDER, "abc"), time.time() + 60, device_answers))
