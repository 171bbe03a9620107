"""Measure what this project claims about a GPU, on one; every point is stored once it is measured.

    python benchmarks/gpu.py                  # all parts; repeat the command to resume
    python benchmarks/gpu.py --parts bc       # some of them
    python benchmarks/gpu.py --retry          # measure again what was skipped or has failed
    python benchmarks/gpu.py --page FOLDER    # write the page of points stored elsewhere; needs no GPU
    python benchmarks/gpu.py --rehearse       # tiny shapes on a CPU, to see that it works

a correctness (the gpu tests; the bundled pair audited), b ceilings of this card, c attention, d the steps T_T, T_D and
T_V of Llama-3.1-8B, e rounds at a synthetic acceptance against the formula, f the bundled pair's real acceptance,
g transformers on the same prompts. Parts c to e fill the KV cache with noise instead of prefilling it.
Points go to benchmarks/gpu/<card>/<part>.json and the page to docs/results/<card>.md; with --out, all to that folder.
A call takes at most --seconds and what its last point takes; the first one spends minutes on compiling.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import torch
from gpu_bench import REHEARSAL, Bench, DeviceLost, OutOfTime, Sizes
from gpu_page import page
from gpu_parts import RUN
from page import ROOT, commit

from magicdec.measure.system import cpu_name

PARTS = "bcdeafg"  # those that need a GPU most come first


def card(device: str) -> str:
    """Return a device's name as a file name."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def machine(bench: Bench) -> None:
    """Store what the points are measured on."""
    name = torch.cuda.get_device_name(bench.device) if bench.device.type == "cuda" else cpu_name()
    facts = {"device": name, "commit": bench.commit, "torch": torch.__version__, "rehearsal": bench.sizes is REHEARSAL}
    (bench.folder / "machine.json").write_text(json.dumps(facts) + "\n")


def measure(bench: Bench, parts: str) -> None:
    """Measure the parts until the time is over."""
    try:
        with torch.inference_mode():
            for part in parts:
                RUN[part](bench)
    except OutOfTime:
        print("the time is over; repeat the command to resume")
    except DeviceLost:
        print("the device has failed; a new process continues after that point", flush=True)
        again = [argument for argument in sys.argv if argument != "--retry"]
        os.execv(sys.executable, [sys.executable, *again, f"--seconds={bench.seconds_left:.0f}"])


def main() -> int:
    """Run the command line. Return the exit code: 1 if a point has failed, 2 for a mistake."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--parts", default=PARTS, help=f"some of {PARTS}, in their order")
    parser.add_argument("--seconds", type=float, default=400, help="start no point after this time")
    parser.add_argument("--retry", action="store_true", help="measure again what was skipped or has failed")
    parser.add_argument("--page", type=Path, metavar="FOLDER", help="only write the page of the points stored there")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on the CPU; no page in docs/")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where points and the page go")
    options = parser.parse_args()
    if options.page:
        return _publish(Bench(options.page, REHEARSAL))
    if not options.rehearse and not torch.cuda.is_available():
        return _refuse("PyTorch sees no CUDA device here; --rehearse runs it on the CPU")
    if options.rehearse:
        sizes, folder = REHEARSAL, options.out or Path(tempfile.mkdtemp(prefix="magicdec-gpu-"))
    else:
        sizes = Sizes().within(torch.cuda.mem_get_info()[1])
        folder = options.out or ROOT / "benchmarks" / "gpu" / card(torch.cuda.get_device_name())
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(folder, sizes, time.monotonic() + options.seconds, commit())
    machine(bench)
    if options.retry:
        bench.retry()
    measure(bench, options.parts)
    if not options.out and not options.rehearse:
        return _publish(bench)
    return _write(bench, folder / "page.md")


def _publish(bench: Bench) -> int:
    facts = bench.points("machine")
    if not facts or facts.get("rehearsal"):
        return _refuse(f"{bench.folder} has no figures of a GPU")
    return _write(bench, ROOT / "docs" / "results" / f"{card(facts['device'])}.md")


def _write(bench: Bench, path: Path) -> int:
    text = page(bench.points)
    path.write_text(text)
    print(text)
    return int(any("failed" in point for part in PARTS for point in bench.points(part).values()))


def _refuse(reason: str) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
