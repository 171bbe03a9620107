"""What the measurements of benchmarks/peers.py come to: rows of CSV files, and the page."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import render
from page import RESULTS, setting
from render import Row, rounded, write_csv

OURS = "native"
PLAIN = ("llamacpp", "openvino", "transformers", "vllm")
ON_PYTORCH = ("transformers", "vllm")
REDUCED = ("llamacpp, F16", "openvino, 8-bit KV")
FOLDER = RESULTS
PLACE = ("target", "batch", "context")

Figures = dict[str, Any]
Cell = dict[str, Figures]
Where = tuple[str, int, int]  # model, rows, context
Time = Callable[[Figures], float]


def name_of(model: str, rows: int, context: int) -> str:
    """Return a cell's name."""
    return f"{model}, {rows} x {context:,}"


def write(found: dict[str, Cell], wanted: dict[Where, list[str]]) -> None:
    """Write the CSV files and the page of the cells that have been measured, of those wanted with these ways."""
    measured = {where: found[name_of(*where)] for where in sorted(wanted) if OURS in found.get(name_of(*where), {})}
    plain = {w: cell for w, cell in measured.items() if {*PLAIN}.intersection(wanted[w]) <= cell.keys()}
    every = [row for where, cell in measured.items() for row in ways_of(where, cell)]
    races = [race(where, at_their_best(cell, wanted[where])) for where, cell in plain.items()]
    for name, rows in (("peers-cpu", every), ("peers-cpu-races", races)):
        write_csv(FOLDER / f"{name}.csv", [rounded(row | {"measured_by": setting()}) for row in rows])
    render.write("peers-cpu")


def at_their_best(cell: Cell, wanted: Sequence[str]) -> Cell:
    """Return a cell without the others' speculation where a way of theirs is missing: it may be the fastest."""
    if set(wanted) <= {*cell, *REDUCED}:
        return cell
    return {way: row for way, row in cell.items() if way.startswith(OURS) or way in PLAIN}


def race(where: Where, cell: Cell) -> Row:
    """Return ours against the best of the others: autoregressive, over PyTorch alone, in any way, and in prefilling."""
    own, plain, pytorch = mine(cell), fastest(cell, PLAIN), fastest(cell, ON_PYTORCH)
    best, first = fastest(cell, others(cell)), fastest(cell, PLAIN, prefill_s)
    row: Row = dict(zip(PLACE, where, strict=True))
    row |= {"best_peer": plain, "native_to_it": plain and ratio(cell, OURS, plain)}
    row |= {"best_on_pytorch": pytorch, "native_to_that": pytorch and ratio(cell, OURS, pytorch)}
    row |= {"our_best_way": own, "best_peer_any_way": best, "ours_to_it": best and ratio(cell, own, best)}
    return row | {"prefill_to_best": first and ratio(cell, OURS, first, prefill_s)}


def ways_of(where: Where, cell: Cell) -> Iterator[Row]:
    """Yield a line for each way of decoding."""
    own = cell[OURS]
    for way, row in cell.items():
        length, step = row["acceptance_length"], row["time_per_output_token_ms"]
        line = dict(zip(PLACE, where, strict=True)) | {"engine": way, "version": row["version"]}
        line |= {"tokens_per_second": row["tokens_per_second"], "to_native": ratio(cell, way, OURS)}
        line |= {"time_per_output_token_ms": step, "of_limit": None if length else own["limit_ms"] / step}
        line |= {"time_to_first_token_s": row["time_to_first_token_ms"] / 1e3, "last_row_s": prefill_s(row)}
        same, gap = agreement(row["tokens"], own)
        yield line | {"acceptance_length": length, "same_rows": same, "gap": gap}


def agreement(tokens: list[list[int]], own: Figures) -> tuple[str, str]:
    """Return how many rows are ours, and the target's largest gap between its choice and another engine's.

    Each row counts where it first differs. A token that is not the target's second choice lies further behind than
    that one, which `>` says.
    """
    gaps = []
    for row, expected, seconds in zip(tokens, own["tokens"], own["second_choices"], strict=True):
        differs = (i for i, (a, b) in enumerate(zip(row, expected, strict=True)) if a != b)
        if (at := next(differs, None)) is not None:
            second, gap = seconds[at]
            gaps.append((gap, row[at] != second))
    gap, further = max(gaps, default=(0.0, False))
    return f"{len(tokens) - len(gaps)}/{len(tokens)}", f"{'> ' * further}{gap:.1e}" if gaps else ""


def mine(cell: Cell) -> str:
    """Return the fastest of our ways of decoding."""
    return fastest(cell, [way for way in cell if way.startswith(OURS)]) or OURS


def others(cell: Cell) -> list[str]:
    """Return the ways of the other engines that compete with ours at its best: none where none of them speculated."""
    ways = [way for way in cell if not way.startswith(OURS) and way not in REDUCED]
    return ways if set(ways) - set(PLAIN) else []


def tpot_ms(row: Figures) -> float:
    """Return a way's time per output token, in milliseconds."""
    return float(row["time_per_output_token_ms"])


def prefill_s(row: Figures) -> float:
    """Return the seconds after which all rows have their first token."""
    return float(row["wall_s"] - row["decode_s"])


def fastest(cell: Cell, ways: Sequence[str], time: Time = tpot_ms) -> str | None:
    """Return the fastest of these ways, or None where none of them was measured."""
    return min((way for way in ways if way in cell), key=lambda way: time(cell[way]), default=None)


def ratio(cell: Cell, way: str, other: str, time: Time = tpot_ms) -> float:
    """Return how many times as fast a way is as another."""
    return time(cell[other]) / time(cell[way])
