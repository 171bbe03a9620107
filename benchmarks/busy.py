"""What one busy neighbour costs: the quick experiment on an idle machine, and next to a process that never rests.

    python benchmarks/busy.py             # prints both side by side; exits with 1 above the limit
    python benchmarks/busy.py --pairs 5   # more runs of each, in turns; the fastest of each kind counts

The neighbour has the lowest priority (nice 19) and one processor. A fair share costs at most twice the time.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from page import ROOT, provenance

from magicdec.tracking.cells import markdown_table

TIMES = ("autoregressive/time_per_output_token_ms", "speculative/time_per_output_token_ms")
LIMIT = 3.5


@contextmanager
def neighbour() -> Iterator[None]:
    """Run a process that computes all the time."""
    process = subprocess.Popen(["nice", "-n", "19", sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def launch(*overrides: str) -> dict[str, Any]:
    """Run launch.py in a process of its own. Return its result, and `run_s`, the seconds that the command took."""
    with TemporaryDirectory() as store:
        command = (sys.executable, "launch.py", *overrides, "wandb.mode=disabled", f"runs_dir={store}")
        start = time.perf_counter()
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        seconds = time.perf_counter() - start
        (result,) = Path(store).glob("*/result.json")
        return json.loads(result.read_text()) | {"run_s": seconds}


def measure() -> list[float]:
    """Run the experiment and return its times per token, in ms."""
    found = launch("experiment=quick")
    return [found[name] for name in TIMES]


def main() -> int:
    """Measure in turns, print the table, and compare with the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=2, help="runs of each kind")
    pairs = parser.parse_args().pairs
    idle, busy = [], []
    for _ in range(pairs):
        idle.append(measure())
        with neighbour():
            busy.append(measure())
    fastest = [[min(times) for times in zip(*runs, strict=True)] for runs in (idle, busy)]
    ratios = [slow / fast for fast, slow in zip(*fastest, strict=True)]
    columns = zip(TIMES, *fastest, ratios, strict=True)
    rows = [[name, f"{fast:.2f}", f"{slow:.2f}", f"{ratio:.1f}x"] for name, fast, slow, ratio in columns]
    print(
        markdown_table(["", "idle, ms", "busy, ms", "costs"], rows), provenance("python benchmarks/busy.py"), sep="\n"
    )
    if max(ratios) > LIMIT:
        print(f"error: a busy neighbour costs more than {LIMIT} times", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
