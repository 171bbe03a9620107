"""Our engine against the best of the others: a row for each cell of the ways of decoding in
peers-cpu.csv.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any

Row = dict[str, Any]
PLACE = ("target", "batch", "context")
OURS, ON_PYTORCH, ONE_ROW = "native", ("transformers", "vllm"), ("transformers",)
STEP, PREFILL = "time_per_output_token_ms", "last_row_s"


def races(ways: Iterable[Row]) -> Iterator[Row]:
    """Yield ours against theirs: autoregressive, over PyTorch alone, in any way, and in prefilling
    all rows.
    """

    def place(row: Row) -> tuple:
        return tuple(row[key] for key in PLACE)

    for where, rows in groupby(sorted(ways, key=place), place):
        cell = {name_of(row): row for row in rows}
        plain = {name: row for name, row in cell.items() if "," not in name and name != OURS}
        if OURS not in cell or not plain:
            continue
        mine = fastest(cell, lambda name: name.startswith(OURS))
        any_way = (
            fastest(cell, lambda name: not name.startswith(OURS))
            if all_speculate(cell, plain)
            else None
        )
        best, pytorch = fastest(plain), fastest(plain, ON_PYTORCH.__contains__)
        row = dict(zip(PLACE, where, strict=True))
        row |= {"best_peer": best, "native_to_it": ratio(cell, OURS, best)}
        row |= {"best_on_pytorch": pytorch, "native_to_that": ratio(cell, OURS, pytorch)}
        row |= {
            "our_best_way": mine,
            "best_peer_any_way": any_way,
            "ours_to_it": ratio(cell, mine, any_way),
        }
        first = fastest(plain, key=PREFILL)
        yield row | {
            "prefill_to_best": ratio(cell, OURS, first, PREFILL),
            "measured_by": cell[OURS]["measured_by"],
        }


def name_of(row: Row) -> str:
    """Return the name of a way of decoding: the engine, with its draft where it speculates."""
    return f"{row['engine']}, {row['draft']}" if row.get("way") == "speculative" else row["engine"]


def all_speculate(cell: dict[str, Row], plain: dict[str, Row]) -> bool:
    """Return whether every other engine was measured with speculation too: the missing one may be
    the fastest.
    """
    able = [name for name, row in plain.items() if name not in ONE_ROW or row["batch"] == 1]
    speculating = {name.partition(", ")[0] for name in cell if ", " in name}
    return bool(able) and speculating.issuperset(able)


def fastest(
    cell: dict[str, Row], among: Callable[[str], bool] = bool, key: str = STEP
) -> str | None:
    """Return the way with the least time, or None where there is none."""
    return min(filter(among, cell), key=lambda name: cell[name][key], default=None)


def ratio(
    cell: dict[str, Row], ours: str | None, theirs: str | None, key: str = STEP
) -> float | None:
    """Return how many times as fast ours is as theirs."""
    return float(cell[theirs][key] / cell[ours][key]) if ours and theirs else None
