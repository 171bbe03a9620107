"""What one busy neighbour costs: the quick experiment on an idle machine, and next to a process that never rests.

    python benchmarks/busy.py             # prints both side by side; exits with 1 above the limit
    python benchmarks/busy.py --pairs 5   # more runs of each, in turns; the fastest of each kind counts

The neighbour has the lowest priority (nice 19) and one processor. A fair share costs at most twice the time.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from page import ROOT, provenance

from magicdec.tracking.cells import markdown_table

COMMAND = (sys.executable, "launch.py", "experiment=quick", "wandb.mode=disabled")
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


def measure() -> list[float]:
    """Run the experiment and return its times per token, in ms."""
    with TemporaryDirectory() as store:
        subprocess.run([*COMMAND, f"runs_dir={store}"], cwd=ROOT, check=True, capture_output=True)
        (result,) = Path(store).glob("*/result.json")
        found = json.loads(result.read_text())
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
