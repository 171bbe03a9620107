"""Half an hour on a GPU, in calls of ten minutes: does everything work, how fast is it, what was
predicted wrongly?

    python benchmarks/gpu.py --tar gpu.tar         # all parts; repeat the command to resume
    python benchmarks/gpu.py --tar new.tar --resume gpu.tar  # to resume on another machine
    python benchmarks/gpu.py --plan                # the parts in their order, with their minutes
    python benchmarks/gpu.py --parts doctor,steps  # some of them
    python benchmarks/gpu.py --retry               # measure again what was skipped or has failed
    python benchmarks/gpu.py --page gpu.tar        # publish these points in docs/results; needs no GPU
    python benchmarks/gpu.py --rehearse            # tiny shapes on a CPU, to see that it works

The parts are in the order of their worth: gpu_parts.py has them. Only prefill, serving, pair and
peers prefill; the others fill the KV cache with noise.

A process of its own measures. This one watches it: a point that crashes, hangs or loses the device
is stored as failed, and a new process goes on behind it. Points and a plain page of them go to
runs/gpu/<card>, or to --out. --page turns them into docs/results/gpu.md, its CSV files, and the
card's calibration. A call starts no point after --seconds, and ends GRACE_S later: what is then
under way is left to the next call.
"""  # noqa: E501

import argparse
import json
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from gpu_bench import REHEARSAL, Bench, Sizes
from gpu_parts import PARTS
from gpu_publish import publish
from gpu_store import DONE, OUT_OF_TIME, Record, Store, supervise, work
from page import RESULTS, ROOT, commit

from magicdec.errors import UserError
from magicdec.measure.system import cpu_name
from magicdec.tracking.cells import markdown_table

GRACE_S = 40  # for the end of the point that is under way


def main() -> int:
    """Run the command line. Return the exit code: 1 if a point has failed, 2 for a mistake."""
    options = _parser().parse_args()
    if options.plan:
        print(plan())
        return 0
    options.parts = options.parts.split(",")
    if unknown := [part for part in options.parts if part not in PARTS]:
        return _refuse(f"--parts {','.join(unknown)}: the parts are {','.join(PARTS)}")
    if options.page:
        return _publish(_opened(options.page))
    if not options.rehearse and not torch.cuda.is_available():
        return _refuse(
            "PyTorch sees no CUDA device here; magicdec doctor says why, --rehearse runs on the CPU"
        )
    folder = options.out or (
        Path(tempfile.mkdtemp(prefix="magicdec-gpu-")) if options.rehearse else _folder()
    )
    folder.mkdir(parents=True, exist_ok=True)
    store = Store(folder, commit(), options.tar)
    if options.worker:
        return measure(store, options)
    # As Ctrl-C: what is under way is no failure.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if options.resume:
        store.resume(options.resume)
    if options.retry:
        store.retry(options.parts)
    until, flags = time.time() + options.seconds, ["--rehearse"] if options.rehearse else []
    given = {"cells": options.cells, "tar": options.tar, "magicdec": options.magicdec}
    flags += [f"--{name}={value}" for name, value in given.items() if value]
    worker = [
        __file__,
        "--worker",
        f"--until={until}",
        f"--out={folder}",
        f"--parts={','.join(options.parts)}",
        *flags,
    ]
    code = supervise(worker, store, until + GRACE_S)
    if code == OUT_OF_TIME:
        print("the time is over; repeat the command to resume")
    failed = _write(store, folder / "page.md")
    store.pack()
    print(f"to show this card in docs/results: python benchmarks/gpu.py --page {folder}")
    if code not in (DONE, OUT_OF_TIME):
        return _refuse(
            f"the process that measures ended between two points, with {code}; its output says why"
        )
    return failed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--parts", default=",".join(PARTS), help="some of the parts, in their order"
    )
    parser.add_argument(
        "--cells", type=int, metavar="N", help="only the first N cells of steps and rounds"
    )
    parser.add_argument("--seconds", type=float, default=540, help="start no point after this time")
    parser.add_argument("--plan", action="store_true", help="only show the parts and their minutes")
    parser.add_argument(
        "--tar", type=Path, metavar="FILE", help="write all points into one file, with each new one"
    )
    parser.add_argument(
        "--resume", type=Path, metavar="FILE", help="begin with the points of such a file"
    )
    parser.add_argument(
        "--magicdec", type=Path, metavar="CHECKOUT", help="of the MagicDec authors' software"
    )
    parser.add_argument(
        "--retry", action="store_true", help="measure again what was skipped or has failed"
    )
    parser.add_argument(
        "--page",
        type=Path,
        metavar="FOLDER",
        help="only publish these points, or those of a tar file",
    )
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where points and the page go")
    # The process that measures.
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    return parser


def measure(store: Store, options: argparse.Namespace) -> int:
    """Measure the points of the parts, in this process. Return its exit code."""
    sizes = REHEARSAL if options.rehearse else Sizes()
    bench = Bench(store, replace(sizes, cells=sizes.cells[: options.cells]), options.magicdec)
    name = torch.cuda.get_device_name() if bench.device.type == "cuda" else cpu_name()
    facts = {
        "device": name,
        "torch": torch.__version__,
        "rehearsal": options.rehearse,
        "commit": store.commit,
    }
    (store.folder / "machine.json").write_text(json.dumps(facts) + "\n")
    points = (
        point
        for name, part in PARTS.items()
        if name in options.parts
        for point in part.points(bench)
    )
    with torch.inference_mode():
        return work(points, store, options.until, bench.answers)


def _folder() -> Path:
    """Return the folder of this card's points."""
    return (
        ROOT
        / "runs/gpu"
        / re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    )


def _opened(path: Path) -> Store:
    """Return the points of a folder or of a tar file."""
    if not path.is_file():
        return Store(path)
    store = Store(Path(tempfile.mkdtemp(prefix="magicdec-gpu-")))
    store.resume(path)
    return store


def plan() -> str:
    """Return the parts in their order, their minutes, and the minutes until they are done."""
    rows, until = [], 0.0
    for name, part in PARTS.items():
        until += part.minutes
        rows.append([name, part.title, part.minutes, round(until, 1)])
    return markdown_table(["part", "what", "minutes", "until"], rows).rstrip()


def _publish(store: Store) -> int:
    facts = store.points("machine")
    if not facts or facts.get("rehearsal"):
        return _refuse(f"{store.folder} has no figures of a GPU")
    try:
        publish(store.points)
    except UserError as error:
        return _refuse(str(error))
    print(RESULTS / "gpu.md")
    return 0


def _write(store: Store, path: Path) -> int:
    text = page(store.points)
    path.write_text(text)
    print(text)
    return int(any("failed" in point for part in PARTS for point in store.points(part).values()))


def page(points: Callable[[str], dict[str, Record]]) -> str:
    """Return the page as Markdown, with a section for each part, measured or not yet."""
    facts = points("machine")
    lines = [
        f"# On {facts['device']}",
        "",
        f"`python benchmarks/gpu.py`, PyTorch {facts['torch']}.",
        "",
    ]
    lines += ["A REHEARSAL: these figures mean nothing.", ""] if facts.get("rehearsal") else []
    lines += [
        "`predicted_...` is the cost model's or, in the profile, that of docs/predictions/gpu.md.",
        "",
    ]
    for name, part in PARTS.items():
        known = points(name)
        lines += [f"## {part.title}", "", _table(known) if known else "Not yet measured.\n"]
    return "\n".join(lines)


def _table(points: dict[str, Record]) -> str:
    names = dict.fromkeys(
        name for point in points.values() for name in point if name not in ("commit", "text")
    )
    rows = [
        [key, *(point.get(column) for column in (*names, "commit"))]
        for key, point in points.items()
    ]
    texts = [f"\n{point['text']}" for point in points.values() if "text" in point]
    return markdown_table(["", *names, "commit"], rows) + "".join(texts)


def _refuse(reason: str) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
