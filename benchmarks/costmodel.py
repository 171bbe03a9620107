"""Compare the cost model with measured speedups, of the MagicDec paper's tables or of any table like them.

    python benchmarks/costmodel.py [TABLE.csv] [--calibrate]

The table has the columns of magicdec/costmodel/published/magicdec_paper_tables.csv; its acceptance (omega) is given,
its times are predicted. Without a table it takes the paper's, and writes docs/results/costmodel.md, with the paper's
first version (costmodel_versions.py). `--calibrate` first fits the machines again and writes
magicdec/costmodel/calibrated/. The last line printed is one JSON object. No GPU is needed, and none is used.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from costmodel_page import CALIBRATED_ON, page, per_table
from costmodel_scores import Compared, Score, compare, cross_validate, score
from costmodel_versions import sections
from page import RESULTS
from render import Row, rounded, write_csv

from magicdec.costmodel import hardware, tables
from magicdec.costmodel.hardware import hardware_named
from magicdec.costmodel.predict import critical_context, predict
from magicdec.costmodel.round import Setup
from magicdec.costmodel.targets import architecture
from magicdec.errors import UserError

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tools"))
from magicdec.costmodel.calibration import SHARED, Prior, calibrate, to_yaml, uncalibrated  # noqa: E402

MACHINES = {
    "8xA100": uncalibrated("8xA100", "reference-2024-08"),
    "8xH100": uncalibrated("8xH100", "reference-2024-11"),
}
SHORT = 8000  # tokens: the second cross-validation fits up to here and predicts beyond


def fitted_rows() -> list[tables.Row]:
    """Return the rows to fit: table 3b, and the streaming self-speculation rows of table 6."""
    return [
        row
        for row in tables.read_table()
        if row.table == "3b" or (row.table, row.draft, row.policy) == ("6", "self", "streaming")
    ]


def write_calibration() -> None:
    """Fit the machines to `fitted_rows` and store them."""
    calibration = calibrate(fitted_rows(), architecture, MACHINES)
    for name, machine in calibration.machines.items():
        provenance = [
            f"{name}, from published times: MagicDec (arXiv 2408.11049), {CALIBRATED_ON[name]}.",
            f"Written by `python benchmarks/costmodel.py --calibrate`, which fits both machines together "
            f"({calibration.num_rows} rows,",
            f"root mean square error of a time {calibration.residual:.1%}).",
        ]
        path = hardware.CALIBRATED / f"{name.lower()}.yaml"
        path.write_text(to_yaml(machine, provenance))
        print(f"wrote {path.relative_to(ROOT)}")
    hardware._calibrations.cache_clear()


def fit(rows: Sequence[tables.Row]) -> Mapping[str, hardware.Hardware]:
    return calibrate(rows, architecture, MACHINES).machines


def left_out() -> dict[str, Score]:
    """Return the errors on fitted rows, each predicted by a calibration that has not seen it."""
    rows = fitted_rows()
    a100 = [row for row in rows if row.hardware == "8xA100"]
    by_context = [[row for row in a100 if (row.context_len <= SHORT) == short] for short in (True, False)]
    return {
        "five folds over the fitted rows": score(cross_validate(rows, architecture, fit)),
        f"A100 contexts beyond {SHORT:,}, fitted up to it": score(
            cross_validate(a100, architecture, fit, [(by_context[0], by_context[1])])
        ),
    }


def alternatives() -> list[Row]:
    """Return the errors over all rows and over those not fitted, with other choices of what is not fitted."""
    matmul = SHARED["matmul_fraction"]
    choices: dict[str, tuple[dict[str, float], dict[str, Prior]]] = {
        "as chosen": ({}, {}),
        "matmul_fraction expected at 0.6": ({}, {"matmul_fraction": matmul._replace(mean=0.6)}),
        "matmul_fraction expected at 0.8": ({}, {"matmul_fraction": matmul._replace(mean=0.8)}),
        "matmul_half_rows 0": ({"matmul_half_rows": 0.0}, {}),
        "matmul_half_rows 64": ({"matmul_half_rows": 64.0}, {}),
        "allreduce_hop_us 3": ({"allreduce_hop_us": 3.0}, {}),
        "allreduce_hop_us 8": ({"allreduce_hop_us": 8.0}, {}),
    }
    rows, fitted, found = tables.read_table(), fitted_rows(), []
    for name, (changes, priors) in choices.items():
        starts = {key: replace(m, efficiency=replace(m.efficiency, **changes)) for key, m in MACHINES.items()}
        machines = calibrate(fitted, architecture, starts, priors).machines
        compared = [compare(row, architecture, machines) for row in rows]
        unseen = [c for c in compared if c.row not in fitted]
        scores = {"": score(compared), "_not_fitted": score(unseen)}
        errors = ("median_error", "p90_error")
        found.append({"choice": name} | {f"{key}{of}": getattr(s, key) for of, s in scores.items() for key in errors})
    return found


def draw(compared: Sequence[Compared]) -> None:
    """Draw the page's chart: the error of each predicted speedup."""
    from charts import draw_chart

    rows = [{"paper": c.measured, "error": c.error, "rows": f"table {c.row.table}, {c.row.hardware}"} for c in compared]
    labels = ("speedup in the paper", "predicted / paper - 1")
    draw_chart(RESULTS / "costmodel.png", rows, "paper", "error", series="rows", kind="points", labels=labels, level=0)


def seconds_per_thousand() -> float:
    """Return the seconds of one core to predict a thousand configurations at 16 gammas each, with memory and S*."""
    model, machine = architecture("llama-3.1-8b"), hardware_named("8xA100")
    start = time.process_time()
    for i in range(1000):
        predict(Setup(model, machine, 16 + i % 200, 1000 + 60 * i), alpha=0.8).metrics()
    return time.process_time() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", nargs="?", type=Path, help="a CSV file; the paper's tables where none is given")
    parser.add_argument("--calibrate", action="store_true", help="fit the machines to the paper's tables again")
    arguments = parser.parse_args()
    try:
        if arguments.calibrate:
            write_calibration()
        rows = tables.read_table(arguments.table or tables.PUBLISHED)
        compared = [compare(row, architecture) for row in rows]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    fitted = set(fitted_rows())
    print(per_table(compared))
    for note in sorted({f"{c.row.hardware}: {hardware_named(c.row.hardware).note}" for c in compared}):
        print(note)
    if arguments.table is None:
        critical = critical_context(
            Setup(architecture("llama-3.1-8b"), hardware_named("8xA100"), batch=32, context=4000), gamma=3
        )
        unseen = [c for c in compared if c.row not in fitted]
        choices = alternatives()
        write_csv(RESULTS / "costmodel-choices.csv", list(map(rounded, choices)))
        text = page(
            compared,
            score(compared),
            score(unseen),
            left_out(),
            choices,
            critical,
            seconds_per_thousand(),
            sections(compared),
        )
        (RESULTS / "costmodel.md").write_text(text)
        draw(compared)
        print("wrote docs/results/costmodel.md")
    print(json.dumps(_summary(compared, sum(c.row in fitted for c in compared))))
    return 0


def _summary(compared: list[Compared], fitted: int) -> dict[str, float | int | None]:
    """Return the object of the last line; a score that cannot be computed is null."""
    values = asdict(score(compared))
    rounded = {k: v if isinstance(v, int) else round(v, 5) if v == v else None for k, v in values.items()}
    return {"rows": rounded.pop("rows"), "fitted_rows": fitted} | rounded


if __name__ == "__main__":
    sys.exit(main())
