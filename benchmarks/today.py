"""Predict where speculation pays on today's targets: write docs/results/today.csv and the page.

    python benchmarks/today.py    # about a minute; needs altair and transformers

Everything is a prediction from config.json files. benchmarks/aiconfigurator.py writes the table
that compares two targets with another model of engines.
"""

import argparse
import json
from collections.abc import Iterator
from functools import cache
from itertools import product

from page import RESULTS, ROOT
from render import Row, write, write_csv

from magicdec.architectures.model_config import ModelConfig
from magicdec.costmodel.growth import experts_touched, kv_share
from magicdec.costmodel.hardware import hardware_named
from magicdec.costmodel.prediction import Prediction, predict
from magicdec.costmodel.round import Setup
from magicdec.models.description import describe

TARGETS = (
    "llama-3.1-8b",
    "qwen3-30b-a3b",
    "gpt-oss-20b",
    "gpt-oss-120b",
    "qwen3.5-27b",
    "deepseek-v3",
)
MACHINES = ("h100", "8xh100", "8xh200")
BATCHES, CONTEXTS = (1, 8, 32, 128, 256), (4096, 16384, 32768, 65536, 131072)
STACK, ALPHA, GAMMAS = "vllm", 0.8, range(1, 9)
FIXED_GAMMA = 3  # of the verification whose time is shown


@cache
def described(target: str) -> ModelConfig:
    """Return a target of conf/target as engines run it."""
    plain = json.loads((ROOT / "conf" / "target" / f"{target}.json").read_text())
    return describe(plain, target, runs=False).as_predicted()


def setup_at(target: str, machine: str, batch: int, context: int) -> Setup:
    """Return self-speculation over a streaming cache with a budget of 512."""
    return Setup(described(target), hardware_named(machine, STACK), batch, context)


def cells() -> Iterator[Row]:
    """Yield a row for each target, machine, batch and context within the target's own."""
    for target, machine, batch, context in product(TARGETS, MACHINES, BATCHES, CONTEXTS):
        if context <= described(target).max_position_embeddings:
            setup = setup_at(target, machine, batch, context)
            yield row_of(target, predict(setup, GAMMAS, ALPHA))


def row_of(target: str, prediction: Prediction) -> Row:
    """Return what the page shows of a prediction."""
    setup, best = prediction.setup, prediction.best
    verify = prediction.by_gamma[GAMMAS.index(FIXED_GAMMA)].times.verify.total
    return {
        "target": target,
        "machine": setup.hardware.name,
        "batch": setup.batch,
        "context": setup.context,
        "kv_share": kv_share(setup),
        "speedup": best.speedup,
        "gamma": best.gamma,
        # As the page's maps show it: in brackets where memory does not hold the cell.
        "shown_gamma": str(best.gamma) if prediction.fits else f"({best.gamma})",
        "step_ms": 1e3 * setup.target_time.total,
        "verify_over_step": verify / setup.target_time.total,
        "experts_of_step": experts_touched(setup, 1),
        "experts_of_verification": experts_touched(setup, FIXED_GAMMA + 1),
        "critical_context": prediction.critical_context,
        "gib": prediction.memory.total / 2**30,
        "fits": prediction.fits,
    }


def main() -> None:
    """Predict, and write the page."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    write_csv(RESULTS / "today.csv", list(cells()))
    write("today")


if __name__ == "__main__":
    main()
