"""Measure what one busy neighbour costs a run: on an idle machine, and next to a process that never
rests.

    python benchmarks/busy.py             # the quick experiment, side by side; exits with 1 above the limit
    python benchmarks/busy.py --pairs 5   # more runs of each, in turns; the fastest of each kind counts
    python benchmarks/busy.py --page      # ten default runs and three busy ones: docs/results/default-run.csv

The neighbour has the lowest priority (nice 19) and one processor. A fair share costs at most twice
the time.
"""  # noqa: E501

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from page import RESULTS, ROOT, setting
from render import write, write_csv

from magicdec.tracking.cells import markdown_table

COLUMNS = {
    "autoregressive_ms": "autoregressive/time_per_output_token_ms",
    "speculative_ms": "speculative/time_per_output_token_ms",
    **{name: name for name in ("speedup", "speedup_wall", "run_s")},
}
TIMES = ("autoregressive_ms", "speculative_ms")
LIMIT = 3.5
IDLE, BUSY = 10, 3  # default runs of each kind


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
    """Run launch.py in a process of its own. Return its figures, and `run_s`, the seconds that the
    command took.
    """
    with TemporaryDirectory() as store:
        command = (
            sys.executable,
            "launch.py",
            *overrides,
            "wandb.mode=disabled",
            f"runs_dir={store}",
        )
        start = time.perf_counter()
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        seconds = time.perf_counter() - start
        (result,) = Path(store).glob("*/result.json")
        found = json.loads(result.read_text()) | {"run_s": seconds}
    return {column: found[key] for column, key in COLUMNS.items()}


def default_runs() -> None:
    """Write docs/results/default-run.csv and its page, after every run."""
    rows: list[dict[str, Any]] = []
    for kind in ["idle"] * IDLE + ["busy"] * BUSY:
        with neighbour() if kind == "busy" else nullcontext():
            rows.append({"kind": kind, "run": len(rows) + 1, **launch(), "measured_by": setting()})
        write_csv(RESULTS / "default-run.csv", rows)
    write("cpu")


def main() -> int:
    """Measure in turns, print the table, and compare with the limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=2, help="runs of each kind")
    parser.add_argument(
        "--page", action="store_true", help="measure the default run, and write its page"
    )
    arguments = parser.parse_args()
    if arguments.page:
        default_runs()
        return 0
    idle, busy = [], []
    for _ in range(arguments.pairs):
        idle.append(launch("experiment=quick"))
        with neighbour():
            busy.append(launch("experiment=quick"))
    fastest = [[min(run[name] for run in runs) for name in TIMES] for runs in (idle, busy)]
    ratios = [slow / fast for fast, slow in zip(*fastest, strict=True)]
    columns = zip(TIMES, *fastest, ratios, strict=True)
    rows = [
        [name, f"{fast:.2f}", f"{slow:.2f}", f"{ratio:.1f}x"] for name, fast, slow, ratio in columns
    ]
    print(markdown_table(["", "idle, ms", "busy, ms", "costs"], rows))
    print(f"`python benchmarks/busy.py`, {setting()}")
    if max(ratios) > LIMIT:
        print(f"error: a busy neighbour costs more than {LIMIT} times", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
