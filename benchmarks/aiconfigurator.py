"""Compare predicted decoding steps of models with experts with NVIDIA's AIConfigurator, and write
docs/results/today-aiconfigurator.csv.

    python -m venv ENV && ENV/bin/pip install aiconfigurator==0.12.0    # an environment of its own
    python benchmarks/aiconfigurator.py ENV/bin/python

Its times are sums over kernels that NVIDIA has measured in engines.
"""

import argparse
import json
import subprocess
from itertools import product

from page import RESULTS
from render import Row, table, write_csv
from today import described

from magicdec.costmodel.hardware import hardware_named
from magicdec.costmodel.round import Setup

MODELS = {"qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B", "gpt-oss-120b": "openai/gpt-oss-120b"}
BATCHES, CONTEXTS = (1, 8, 32, 128, 256), (4096, 16384, 32768)
ENGINES = ("vllm", "sglang")
# Run by the other Python: reads the cells to estimate as JSON, and writes milliseconds, or null for
# what it has no table of.
PROGRAM = """
import json, logging, sys
logging.disable(logging.WARNING)
from aiconfigurator.cli.api import cli_estimate
found = []
for name, engine, batch, context in json.load(sys.stdin):
    sizes = dict(isl=context, osl=2, batch_size=batch, stride=1)
    ranks = dict(tp_size=1, moe_tp_size=1, moe_ep_size=1)
    try:
        step = cli_estimate(name, "h100_sxm", mode="static_gen", backend_name=engine, **sizes, **ranks)
        found.append(step.tpot)
    except Exception:
        found.append(None)
print(json.dumps(found))
"""  # noqa: E501


def theirs(python: str, cells: list[tuple[str, str, int, int]]) -> list[float | None]:
    """Return the milliseconds of a decoding step of each cell."""
    asked = json.dumps([(MODELS[model], *others) for model, *others in cells])
    command = [python, "-I", "-c", PROGRAM]  # not from this folder, where this file has its name
    answer = subprocess.run(command, input=asked, capture_output=True, text=True, check=True)
    last = answer.stdout.strip().splitlines()[-1]
    times: list[float | None] = json.loads(last)
    return times


def ours(model: str, engine: str, batch: int, context: int) -> float:
    """Return the milliseconds that we predict."""
    setup = Setup(described(model), hardware_named("h100", engine), batch, context)
    return 1e3 * setup.target_time.total


def main() -> None:
    """Write the CSV file and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("python", metavar="PYTHON", help="of an environment with aiconfigurator")
    options = parser.parse_args()
    cells = list(product(MODELS, ENGINES, BATCHES, CONTEXTS))
    rows: list[Row] = []
    for cell, time in zip(cells, theirs(options.python, cells), strict=True):
        mine = ours(*cell)
        names = dict(zip(("target", "engine", "batch", "context"), cell, strict=True))
        ratio = None if time is None else mine / time
        rows.append({**names, "theirs_ms": time, "ours_ms": mine, "ratio": ratio})
    write_csv(RESULTS / "today-aiconfigurator.csv", rows)
    sizes = ("target", "engine", "batch", "context")
    print(table(rows, *sizes, "theirs_ms=theirs_ms:.1f", "ours_ms=ours_ms:.1f", "ratio=ratio:.2f"))


if __name__ == "__main__":
    main()
