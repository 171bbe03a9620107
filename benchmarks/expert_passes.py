"""Compare passes of N tokens over passes of one with experts, as others have published them, with
what is predicted; write docs/results/today-passes.csv, and print it.

    python benchmarks/expert_passes.py    # seconds; needs scipy; then python benchmarks/today.py

A pass of N rows with a token each touches the experts that a verification of N independent tokens
touches. expert_passes.csv has the times and where they are from. The machine is calibrated by the
dense model of the same source. Tokens choose experts uniformly, or by a power law, whose exponent
is the only number that is fitted to models with experts: to their passes at the shortest context.
"""

import argparse
import json
from functools import cache
from math import log
from pathlib import Path
from statistics import fmean

from page import RESULTS, ROOT
from render import Row, read_csv, table, write_csv

from magicdec.architectures.model_config import ModelConfig
from magicdec.config.groups import Efficiency
from magicdec.costmodel.calibration import OWN, Prior, calibrate
from magicdec.costmodel.hardware import Hardware, configured
from magicdec.costmodel.routing import Routing
from magicdec.costmodel.stacks import OWN_STACK
from magicdec.costmodel.tables import Row as Timed
from magicdec.models.description import describe

MEASURED = Path(__file__).with_suffix(".csv")
DENSE, MACHINE = "qwen2.5-7b", "gb10"
BANDWIDTH_GBS, TFLOPS = 273, 125  # of its datasheet: LPDDR5X, and dense bf16
EXPONENTS = [step / 20 for step in range(31)]  # of the power law: 0 to 1.5
# Of a weight in GGUF; the experts of MXFP4 files are stored in that, everything else in Q8_0.
BYTES = {"q8_0": 34 / 32, "mxfp4": 34 / 32}


@cache
def described(target: str) -> ModelConfig:
    """Return a target of conf/target, the gpt-oss models in MXFP4."""
    folder = ROOT / "conf" / "target"
    plain = json.loads((folder / f"{target}.json").read_text())
    if target.startswith("gpt-oss"):
        stored = json.loads((folder / "gpt-oss-120b.json").read_text())
        plain["quantization_config"] = stored["quantization_config"]
    return describe(plain, target, runs=False).as_predicted()


def timed(row: Row) -> Timed:
    """Return a published pass as a row to fit: a decoding step."""
    return Timed(
        target=row["target"],
        draft="self",
        policy="streaming",
        hardware=MACHINE,
        context_len=row["context"],
        batch_size=row["tokens"],
        gamma=1,
        kv_budget=512,
        autoregressive_ms=1e3 * row["seconds"] / row["steps"],
        weight_bytes=BYTES[row["weights"]],
    )


def calibrated(rows: list[Row]) -> Hardware:
    """Return the machine that the dense model's passes describe."""
    efficiency = Efficiency(matmul_half_rows=0.0)
    start = configured(MACHINE, 1, BANDWIDTH_GBS, TFLOPS, efficiency=efficiency, stack=OWN_STACK)
    priors = OWN | {"layer_overhead_us": Prior(0.0, 1e5, 10.0, 10.0)}
    dense = [timed(row) for row in rows if row["target"] == DENSE]
    return calibrate(dense, described, {MACHINE: start}, priors).machines[MACHINE]


def routing_of(row: Row, exponent: float) -> Routing:
    """Return the routing in which the i-th most popular expert is chosen i to the power of
    -exponent times as often.
    """
    experts = max(matrices.experts for matrices in described(row["target"]).matrices)
    return Routing(tuple((place + 1) ** -exponent for place in range(experts)))


def predicted_ms(row: Row, machine: Hardware, exponent: float = 0.0) -> float:
    """Return the milliseconds that are predicted of a pass."""
    setup = timed(row).setup(described, machine)
    if exponent and row["target"] != DENSE:
        setup = setup.at(routing=routing_of(row, exponent))
    return 1e3 * setup.target_time.total


def ratios(rows: list[Row], machine: Hardware, exponent: float = 0.0) -> list[float]:
    """Return the time that is predicted of each pass over that of one token."""
    times = [predicted_ms(row, machine, exponent) for row in rows]
    return [time / times[index] for time, index in zip(times, ones(rows), strict=True)]


def ones(rows: list[Row]) -> list[int]:
    """Return, for each pass, the index of the pass of one token of its target and context."""
    places = [(row["target"], row["context"]) for row in rows]
    first = {place: index for index, place in enumerate(places) if rows[index]["tokens"] == 1}
    return [first[place] for place in places]


def fitted_exponent(rows: list[Row], machine: Hardware) -> float:
    """Return the exponent with the least mean error of the ratios at the shortest context."""
    shortest = min(row["context"] for row in rows)
    short = [row for row in rows if row["context"] == shortest and row["target"] != DENSE]
    measured = measured_ratios(short)

    def error(exponent: float) -> float:
        pairs = zip(ratios(short, machine, exponent), measured, strict=True)
        return fmean(abs(log(ours / theirs)) for ours, theirs in pairs)

    return min(EXPONENTS, key=error)


def measured_ratios(rows: list[Row]) -> list[float]:
    """Return the time of each pass over that of one token."""
    seconds = [row["seconds"] for row in rows]
    return [time / seconds[index] for time, index in zip(seconds, ones(rows), strict=True)]


def with_predictions(rows: list[Row]) -> list[Row]:
    """Return each pass with its time over that of one token, measured and predicted both ways."""
    machine = calibrated(rows)
    exponent = fitted_exponent(rows, machine)
    uniform = ratios(rows, machine)
    skewed = ratios(rows, machine, exponent)
    compared = []
    for row, ratio, even, skew in zip(rows, measured_ratios(rows), uniform, skewed, strict=True):
        figures = {
            "ms": 1e3 * row["seconds"] / row["steps"],
            "predicted_ms": predicted_ms(row, machine),
            "ratio": ratio,
            "uniform": even,
            "power_law": skew,
            "exponent": exponent,
        }
        errors = {"uniform_error": even / ratio - 1, "power_law_error": skew / ratio - 1}
        kept = ("target", "context", "tokens", "machine", "source", "date")
        compared.append({key: row[key] for key in kept} | figures | errors)
    return compared


def main() -> None:
    """Write the CSV file and print it."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    compared = with_predictions(read_csv(MEASURED))
    write_csv(RESULTS / "today-passes.csv", compared)
    figures = [f"{name}={name}:.2f" for name in ("ratio", "uniform", "power_law", "exponent")]
    print(table(compared, "target", "context", "tokens", "ms=ms:.1f", *figures))


if __name__ == "__main__":
    main()
