"""Write magicdec/costmodel/published/matmul_shares.csv: the share of its roofline that a matmul of
bf16 reaches, by its rows and the elements of its weights, from the tables of AIConfigurator.

    git clone https://github.com/ai-dynamo/aiconfigurator CHECKOUT   # Apache-2.0
    python benchmarks/matmul_shares.py CHECKOUT                      # needs pyarrow

NVIDIA measures kernels of serving engines for it. Its times are medians over shapes here.
"""

import argparse
import io
import subprocess
from collections.abc import Iterator
from itertools import pairwise

import pandas
from page import ROOT
from render import Row, write_csv

from magicdec.costmodel.hardware import DEVICES

COMMIT = "095f58a51c4ca8e61b66ec108d86f223f8d559ce"
FOLDER = "aic-core/src/aiconfigurator_core/systems/data"
TABLES = {
    "A100": "a100_sxm/gemm/vllm/0.14.0",
    "H100": "h100_sxm/gemm/vllm/0.24.0",
    "H200": "h200_sxm/gemm/vllm/0.24.0",
    "L40S": "l40s/gemm/vllm/0.24.0",
}
ROWS = (1, 16, 32, 64, 128, 192, 256, 512, 768, 1024, 2048, 4096)
ELEMENTS = (2e6, 8e6, 2e7, 5e7, 2e8)  # bounds of the classes of weights
SIDES = (1000, 35_000)  # of a weight; narrower ones are of experts
OUT = ROOT / "magicdec/costmodel/published/matmul_shares.csv"


def shares(checkout: str) -> Iterator[Row]:
    """Yield the median share of each device, class of weights and number of rows."""
    for device, table in TABLES.items():
        path = f"{COMMIT}:{FOLDER}/{table}/gemm_perf.parquet"
        content = subprocess.check_output(["git", "-C", checkout, "show", path])
        found = pandas.read_parquet(io.BytesIO(content))
        found = found[found.gemm_dtype == "bfloat16"]
        found = found[found[["n", "k"]].min(axis=1).ge(SIDES[0])]
        found = found[found[["n", "k"]].max(axis=1).lt(SIDES[1])]
        weights = found.n * found.k
        moved = 2 * (weights + found.m * (found.n + found.k))
        reading = moved / DEVICES[device].bandwidth
        computing = 2 * found.m * weights / DEVICES[device].flops
        share = reading.combine(computing, max) / (found.latency * 1e-3)
        for low, high in pairwise(ELEMENTS):
            for rows in ROWS:
                is_here = weights.ge(low) & weights.lt(high) & (found.m == rows)
                yield {
                    "device": device,
                    "elements": round((low * high) ** 0.5),
                    "rows": rows,
                    "share": round(float(share[is_here].median()), 3),
                    "source": f"ai-dynamo/aiconfigurator at {COMMIT[:7]}, {table} (Apache-2.0)",
                }


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("checkout", help="of AIConfigurator, or its git directory")
    write_csv(OUT, list(shares(parser.parse_args().checkout)))


if __name__ == "__main__":
    main()
