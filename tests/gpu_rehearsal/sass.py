"""The machine instructions of a compiled kernel, loop by loop.

A multiprocessor issues four instructions of warps a cycle, one from each scheduler: the cycles that a kernel takes at
least, however well it hides latencies.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import triton

from tests.gpu_rehearsal.compile import Launch, Made

SCHEDULERS = 4  # of a multiprocessor
TENSOR_FLOPS = 4096  # of a multiprocessor of an H100 in a cycle, in half precision
CLOCK_HZ = 1.755e9  # of an H100 under load


def loops(made: Made) -> list[Counter[str]]:
    """The instructions of a warp by name: those outside of loops, and those of one turn of each loop, but for loops
    within. Loops are in the order in which they begin.
    """
    lines = disassembled(made.cubin)
    labels = {line.rstrip(":"): number for number, line in enumerate(lines) if line.startswith(".L")}
    ends = {0: len(lines)}
    for end, line in enumerate(lines):
        if (jump := re.search(r"BRA.* `\((\.L\w+)\)", line)) and labels[jump[1]] < end - 1:  # not the trap at the end
            ends[labels[jump[1]]] = end
    counts: dict[int, Counter[str]] = {start: Counter() for start in sorted(ends)}
    for number, line in enumerate(lines):
        if found := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", line):
            counts[max(start for start, end in ends.items() if start <= number <= end)][found[1]] += 1
    return list(counts.values())


def cycles(made: Made, parts: Sequence[Counter[str]], turns: Sequence[float] = (1,)) -> float:
    """The cycles in which a multiprocessor issues parts of a program that are run so often."""
    issued = sum(part.total() * number for part, number in zip(parts, turns, strict=True))
    return issued * made.warps / SCHEDULERS


def disassembled(cubin: bytes) -> list[str]:
    """The lines of the program."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", path]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def truncation_seconds(launch: Launch, made: Made, vocabulary: int) -> float:
    """The seconds in which a multiprocessor of an H100 issues a program of `truncate`: a row of so many tokens."""
    blocks, digits = -(-vocabulary // launch.arguments["BLOCK"]), launch.arguments["BITS"] // 2
    search = [digits, digits * blocks]
    by_k, by_p = (search if launch.arguments[name] is not None else [] for name in ("top_k", "top_p"))
    passes = [blocks, *by_k, blocks, *by_p, *([blocks, blocks] if by_p else []), blocks]
    parts = loops(made)
    turns = [number / max(1, part["LDG"]) for number, part in zip([1, *passes], parts, strict=True)]  # unrolled
    return cycles(made, parts, [1, *turns[1:]]) / CLOCK_HZ
