"""The machine instructions of a compiled kernel, loop by loop.

A multiprocessor issues four instructions of warps a cycle, one from each scheduler: the cycles that
a kernel takes at least, however well it hides latencies.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from functools import cache

import triton

from tests.gpu_rehearsal.compile import GPUS, Launch, Made, printed

SCHEDULERS = 4  # of a multiprocessor
POWER_CYCLES = 8  # of a scheduler, until a warp can compute its next powers of two
TENSOR_FLOPS = 4096  # of a multiprocessor of an H100 in a cycle, in half precision
CLOCK_HZ = 1.755e9  # of an H100 under load
# What a multiprocessor gets of the memory's bandwidth in a cycle, by compute capability: A100 with
# 80 GB, H100, B200.
BYTES_A_CYCLE = {80: 2.04e12 / 108 / 1.41e9, 90: 3.35e12 / 132 / CLOCK_HZ, 100: 8e12 / 148 / 1.85e9}


def loops(made: Made) -> list[Counter[str]]:
    """The instructions of a warp by name: those outside of loops, and those of one turn of each
    loop, but for loops within. Loops are in the order in which they begin.
    """
    lines = disassembled(made.cubin)
    labels = {
        line.rstrip(":"): number for number, line in enumerate(lines) if line.startswith(".L")
    }
    ends = {0: len(lines)}
    for end, line in enumerate(lines):
        # Not the trap at the end.
        if (jump := re.search(r"BRA.* `\((\.L\w+)\)", line)) and labels[jump[1]] < end - 1:
            ends[labels[jump[1]]] = end
    counts: dict[int, Counter[str]] = {start: Counter() for start in sorted(ends)}
    for number, line in enumerate(lines):
        if found := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", line):
            counts[max(start for start, end in ends.items() if start <= number <= end)][
                found[1]
            ] += 1
    return list(counts.values())


def cycles(made: Made, parts: Sequence[Counter[str]], turns: Sequence[float] = (1,)) -> float:
    """The cycles that a multiprocessor needs at least for parts of a program that are run so often:
    to issue their instructions, or to compute their powers of two.
    """
    issued = sum(
        max(part.total(), POWER_CYCLES * part["MUFU"]) * number
        for part, number in zip(parts, turns, strict=True)
    )
    return issued * made.warps / SCHEDULERS


@cache
def disassembled(cubin: bytes) -> list[str]:
    """The lines of the program."""
    return printed(triton.knobs.nvidia.nvdisasm.path, "-c", cubin).splitlines()


def truncation_seconds(launch: Launch, made: Made, rows: int, tiles: int = 1) -> float:
    """The seconds that an H100 needs at least for the instructions of a kernel that cuts the
    distributions of `rows`, of which so many tiles of logits were copied. All loops are counted,
    also those of which one excludes another.
    """
    arguments, parts = launch.arguments, loops(made)
    if launch.name == "find_cut":
        tile = arguments["PARTS"] * arguments["WIDTH"]
        loads = tile // made.warps // 32
        digits = arguments["BITS"] // 2
        blocks = -(-arguments["V"] // tile)
        search = [(digits, 0), (digits * tiles, loads), (tiles, loads)]
        turns = search if arguments["top_k"] is not None else []
        turns = [*turns, *search, (blocks, 1)] if arguments["top_p"] is not None else turns
    else:
        turns = [(-(-arguments["length"] // arguments["BLOCK"]), 1)] * len(parts[1:])
    unrolled = [
        part["LDG"] // loads if loads else 1
        for part, (_, loads) in zip(parts[1:], turns, strict=True)
    ]
    assert all(unrolled)
    turns = [number / times for (number, _), times in zip(turns, unrolled, strict=True)]
    programs = rows * math.prod(launch.grid[1:])
    return -(-programs // GPUS[90].sms) * cycles(made, parts, [1, *turns]) / CLOCK_HZ
