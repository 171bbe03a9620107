"""The parts of benchmarks/gpu.py that run programs of their own: the doctor, tests, and runs on
several GPUs.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from gpu_bench import Bench, cell_name
from gpu_store import Point, Record
from page import ROOT

SAID = 5  # lines of a program's output that are kept
# Exit codes of pytest; 5: nothing to run, because a module was skipped for a missing library.
PASSED = (0, 5)
# Processes that run tests, each with a context on the GPU: together they compile hundreds of
# kernels.
WORKERS = 8
TESTS_S, LARGE_S = 900, 600


def doctor(bench: Bench) -> Iterator[Point]:
    """Check the machine: every kernel, a compiled layer, a captured round, the sums of several
    GPUs.
    """

    def measured() -> Record:
        done = _run("-m", "magicdec", "doctor", "--markdown")
        failed = [line for line in done.stdout.splitlines() if line.startswith("| FAILED")]
        return {"text": done.stdout} | (
            {"failed": " / ".join(failed) or done.stderr[-300:]} if done.returncode else {}
        )

    yield Point("doctor", "magicdec doctor", measured)


def correct(bench: Bench) -> Iterator[Point]:
    """Run some of the tests that need a GPU, and audit the bundled pair."""
    for file, some in bench.sizes.tests:
        yield Point("correct", f"{file}, some", partial(_tests, file, some), TESTS_S)
    for draft in ("self", "model"):
        for dtype in dict.fromkeys(("float32", bench.sizes.dtype)):  # in fp32 tokens must be equal
            yield Point(
                "correct",
                f"lossless, draft={draft}, {dtype}",
                partial(_lossless, bench, draft, dtype),
            )


def tests(bench: Bench) -> Iterator[Point]:
    """Run all tests that need a GPU."""
    for file, _ in bench.sizes.tests:
        yield Point("tests", file, partial(_tests, file, ""), TESTS_S)


def _tests(file: str, some: str) -> Record:
    workers = str(min(WORKERS, os.cpu_count() or 1))
    found = _program(
        "-m", "pytest", "-q", "-n", workers, "-m", "gpu", *(["-k", some] if some else []), file
    )
    return {"said": found["failed"]} if found.get("code") in PASSED else found


def _program(*arguments: str) -> Record:
    """Run a program of Python's; return the end of what it said, as a failure unless its exit code
    is 0.
    """
    done = _run(*arguments)
    lines = (done.stdout + done.stderr).strip().splitlines()
    bad = [line for line in lines if line.startswith(("FAILED", "E  "))]
    said = " / ".join([*bad[:SAID], *lines[-SAID:]])
    return {"said": said} if done.returncode == 0 else {"failed": said, "code": done.returncode}


def _run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


def _lossless(bench: Bench, draft: str, dtype: str) -> Record:
    sizes = [
        f"batch.size={bench.sizes.pair_batches[-1]}",
        f"batch.context_len={bench.sizes.pair_context // 2}",
    ]
    found = bench.run(f"draft={draft}", "scenario.repeats=1", f"hardware.dtype={dtype}", *sizes)
    return {
        key.removeprefix("lossless/"): value
        for key, value in found.items()
        if key.startswith("lossless/")
    }


def ranks(bench: Bench) -> Iterator[Point]:
    """Run the large model on all GPUs together, as a user would."""
    count = torch.cuda.device_count() if bench.device.type == "cuda" else 2
    cell = (*bench.cells[0], bench.sizes.budgets[0], bench.sizes.gammas[0])
    if count > 1:
        yield Point(
            "ranks",
            f"{count} ranks, {cell_name(*cell)}",
            partial(_ranks, bench, count, *cell),
            LARGE_S,
        )


def _ranks(bench: Bench, count: int, *cell: int) -> Record:
    own = [f"hardware.tensor_parallel={count}", "scenario.repeats=2"]
    names = (
        "speedup",
        "speedup_wall",
        "time/target_decode_ms",
        "time/draft_ms",
        "time/verify_ms",
        "time/round_ms",
    )
    names += ("predicted/speedup", "predicted/round_ms")
    return _launched([*bench.settings, *bench.large_settings(*cell), *own], names)


def serving(bench: Bench) -> Iterator[Point]:
    """Serve the bundled pair to a few clients, as a user would."""
    batch, context = bench.sizes.pair_batches[1], bench.sizes.pair_context // 2
    sizes = [
        f"batch.size={batch}",
        f"batch.context_len={context}",
        f"batch.generate_len={bench.sizes.new_tokens}",
    ]
    device = [f"hardware.device={bench.sizes.device}", f"hardware.dtype={bench.sizes.dtype}"]
    names = (
        "lossless/identical",
        "autoregressive/tokens_per_second",
        "speculative/tokens_per_second",
    )
    overrides = ["scenario=serve", f"scenario.concurrencies=[{batch}]", *device, *sizes]
    yield Point("serving", cell_name(batch, context), partial(_launched, overrides, names))


def _launched(overrides: list[str], names: tuple[str, ...]) -> Record:
    """Do a run as a user would; return these of its results."""
    with tempfile.TemporaryDirectory() as folder:
        found = _program("launch.py", *overrides, "tracker=[]", f"runs_dir={folder}")
        results = [json.loads(path.read_text()) for path in Path(folder).glob("*/result.json")]
    if "failed" in found or not results:
        return found
    return {name: results[0].get(name) for name in names}


def last_line(*command: str) -> Record:
    """Run a program whose last line is its result, as JSON."""
    done = _run(*command)
    if done.returncode:
        return {
            "failed": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        }
    return json.loads(done.stdout.splitlines()[-1])
