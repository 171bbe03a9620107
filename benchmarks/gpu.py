"""The first hour on a GPU in one command: does everything work, how fast is it, and what was predicted wrongly?

    python benchmarks/gpu.py                       # all parts; repeat the command to resume
    python benchmarks/gpu.py --parts doctor,steps  # some of them
    python benchmarks/gpu.py --retry               # measure again what was skipped or has failed
    python benchmarks/gpu.py --page FOLDER         # publish the points of a folder in docs/results; needs no GPU
    python benchmarks/gpu.py --rehearse            # tiny shapes on a CPU, to see that it works

The parts, in this order: doctor; correct, a reduced matrix of the tests that need a GPU, and the bundled pair audited;
ceilings of this card; profile, a round kernel by kernel next to docs/predictions/gpu.md; prefill of Llama-3.1-8B with
random weights; steps, its T_T, T_D and T_V; rounds at a synthetic acceptance; sampling; policies of the cache; ranks,
where there are several GPUs; attention by every backend; pair, the bundled one with its real acceptance; peers,
transformers on the same prompts; tests, all that need a GPU. Only prefill, pair and peers prefill; the others fill the
KV cache with noise.

A process of its own measures. This one watches it: a point that crashes, hangs or loses the device is stored as failed,
and a new process goes on behind it. Points and a plain page of them go to runs/gpu/<card>, or to --out. --page turns
them into docs/results/gpu.md, its CSV files, and the card's calibration. A call starts no point after --seconds. The
first one spends minutes on compiling.
"""

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


def main() -> int:
    """Run the command line. Return the exit code: 1 if a point has failed, 2 for a mistake."""
    options = _parser().parse_args()
    options.parts = options.parts.split(",")
    if unknown := [part for part in options.parts if part not in PARTS]:
        return _refuse(f"--parts {','.join(unknown)}: the parts are {','.join(PARTS)}")
    if options.page:
        return _publish(Store(options.page))
    if not options.rehearse and not torch.cuda.is_available():
        return _refuse("PyTorch sees no CUDA device here; magicdec doctor says why, --rehearse runs on the CPU")
    folder = options.out or (Path(tempfile.mkdtemp(prefix="magicdec-gpu-")) if options.rehearse else _folder())
    folder.mkdir(parents=True, exist_ok=True)
    store = Store(folder, commit())
    if options.worker:
        return measure(store, options)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what is under way is no failure
    if options.retry:
        store.retry(options.parts)
    until, flags = time.time() + options.seconds, ["--rehearse"] if options.rehearse else []
    flags += [f"--cells={options.cells}"] if options.cells else []
    worker = [__file__, "--worker", f"--until={until}", f"--out={folder}", f"--parts={','.join(options.parts)}", *flags]
    code = supervise(worker, store)
    if code == OUT_OF_TIME:
        print("the time is over; repeat the command to resume")
    failed = _write(store, folder / "page.md")
    print(f"to show this card in docs/results: python benchmarks/gpu.py --page {folder}")
    if code not in (DONE, OUT_OF_TIME):
        return _refuse(f"the process that measures ended between two points, with {code}; its output says why")
    return failed


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="some of the parts, in their order")
    parser.add_argument("--cells", type=int, metavar="N", help="only the first N cells of steps and rounds")
    parser.add_argument("--seconds", type=float, default=3600, help="start no point after this time")
    parser.add_argument("--retry", action="store_true", help="measure again what was skipped or has failed")
    parser.add_argument("--page", type=Path, metavar="FOLDER", help="only publish the points stored there")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where points and the page go")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)  # the process that measures
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    return parser


def measure(store: Store, options: argparse.Namespace) -> int:
    """Measure the points of the parts, in this process. Return its exit code."""
    sizes = REHEARSAL if options.rehearse else Sizes()
    bench = Bench(store, replace(sizes, cells=sizes.cells[: options.cells]))
    name = torch.cuda.get_device_name() if bench.device.type == "cuda" else cpu_name()
    facts = {"device": name, "torch": torch.__version__, "rehearsal": options.rehearse, "commit": store.commit}
    (store.folder / "machine.json").write_text(json.dumps(facts) + "\n")
    points = (point for part, (_, yielding) in PARTS.items() if part in options.parts for point in yielding(bench))
    with torch.inference_mode():
        return work(points, store, options.until, bench.answers)


def _folder() -> Path:
    """Return the folder of this card's points."""
    return ROOT / "runs/gpu" / re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")


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
    lines = [f"# On {facts['device']}", "", f"`python benchmarks/gpu.py`, PyTorch {facts['torch']}.", ""]
    lines += ["A REHEARSAL: these figures mean nothing.", ""] if facts.get("rehearsal") else []
    lines += ["`predicted_...` is the cost model's or, in the profile, that of docs/predictions/gpu.md.", ""]
    for part, (title, _) in PARTS.items():
        known = points(part)
        lines += [f"## {title}", "", _table(known) if known else "Not yet measured.\n"]
    return "\n".join(lines)


def _table(points: dict[str, Record]) -> str:
    names = dict.fromkeys(name for point in points.values() for name in point if name not in ("commit", "text"))
    rows = [[key, *(point.get(column) for column in (*names, "commit"))] for key, point in points.items()]
    texts = [f"\n{point['text']}" for point in points.values() if "text" in point]
    return markdown_table(["", *names, "commit"], rows) + "".join(texts)


def _refuse(reason: str) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
