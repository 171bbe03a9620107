"""The shares of their roofline that matmuls of serving engines reach, from published tables.

NVIDIA's AIConfigurator measures the kernels of engines; benchmarks/matmul_shares.py condenses its
tables. A share depends on the rows and on the elements of the weights: small ones leave a GPU
partly idle.
"""

import csv
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np

TABLE = Path(__file__).parent / "published" / "matmul_shares.csv"
TILE = 16.0  # rows at which a tensor core's tile is half full
# The share of its vector units' rate at which a GPU multiplies weights that it decodes for each
# row, in llama.cpp and MLX: 0.2 to 0.4, on cards of 2017 to 2025.
VECTOR_SHARE = 0.35


class Shares:
    """The shares of one device, by rows and by elements of the weights."""

    def __init__(self, cells: Mapping[tuple[float, float], float], scale: float = 1.0):
        """Take shares by (elements, rows). `scale` converts rows: the ridge of the table's device
        over that of the device in question.
        """
        self.scale = scale
        self.elements = sorted({elements for elements, _ in cells})
        self.rows = sorted({rows for _, rows in cells})
        self._table = [
            [min(1.0, cells[size, rows]) for rows in self.rows] for size in self.elements
        ]
        self._log_rows = np.log(self.rows)
        self._log_elements = np.log(self.elements)

    def of(self, rows: float, elements: float) -> float:
        """Return the share at these rows, interpolated in the logs of both; at the ends as at the
        last one measured.
        """
        place = np.log(rows * self.scale)
        by_size = [np.interp(place, self._log_rows, line) for line in self._table]
        return float(np.interp(np.log(elements), self._log_elements, by_size))

    def seconds(
        self, rows: float, elements: float, reading_s: float, computing_s: float, is_exact: bool
    ) -> float:
        """Return the time of a matmul whose bytes and FLOPs take this long at the datasheet's
        rates.

        The tables are of exact weights. Codes are read at the speed of a matmul of one row, and
        multiplied at that of one of many rows.
        """
        if is_exact:
            return max(reading_s, computing_s) / self.of(rows, elements)
        tile = rows / (rows + TILE)
        most = self.of(self.rows[-1] / self.scale, elements)
        return max(reading_s / self.of(1, elements), computing_s / (most * tile))


@cache
def shares_of(device: str, scale: float = 1.0) -> Shares | None:
    """Return the shares of a device; None where its table is not published."""
    tables: dict[str, dict[tuple[float, float], float]] = defaultdict(dict)
    with TABLE.open(newline="") as lines:
        for row in csv.DictReader(lines):
            cell = float(row["elements"]), float(row["rows"])
            tables[row["device"]][cell] = float(row["share"])
    return Shares(tables[device], scale) if device in tables else None
