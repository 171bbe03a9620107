"""Compare the cost model with measured speedups, of the MagicDec paper's tables or of any table
like them.

    python benchmarks/costmodel.py [TABLE.csv] [--calibrate]

The table has the columns of magicdec/costmodel/published/magicdec_paper_tables.csv; its acceptance
(omega) is given, its times are predicted. Without a table it takes the paper's, and writes
docs/results/costmodel.md and its CSV files, with the paper's first version (costmodel_versions.py).
`--calibrate` first fits the machines again and writes magicdec/costmodel/calibrated/. The last line
printed is one JSON object. No GPU is needed, and none is used.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from operator import itemgetter
from pathlib import Path
from statistics import fmean

from costmodel_scores import Compared, compare, cross_validate, score
from costmodel_versions import write_versions
from page import RESULTS, ROOT, commit
from render import Row, groups, table, write, write_csv

from magicdec.costmodel import hardware, tables
from magicdec.costmodel.calibration import SHARED, Prior, calibrate, to_yaml, uncalibrated
from magicdec.costmodel.hardware import hardware_named
from magicdec.costmodel.prediction import critical_context, predict
from magicdec.costmodel.round import Setup
from magicdec.costmodel.targets import architecture
from magicdec.errors import UserError
from magicdec.measure.system import cpu_name

STACKS = {"8xA100": "reference-2024-08", "8xH100": "reference-2024-11"}
MACHINES = {name: uncalibrated(name, stack) for name, stack in STACKS.items()}
CALIBRATED_ON = {
    "8xA100": "table 3b (Llama-2-7B, self-speculation)",
    "8xH100": "the streaming self-speculation rows of table 6 (Llama-3.1-8B)",
}
ERRORS = ("speedup:.1%", "T_T:+.1%", "T_D:+.1%", "T_V:+.1%")  # columns of `by_table`
SHORT = 8000  # tokens: the second cross-validation fits up to here and predicts beyond


def fitted_rows() -> list[tables.Row]:
    """Return the rows to fit: table 3b, and the streaming self-speculation rows of table 6."""
    streaming = ("6", "self", "streaming")
    rows = tables.read_table()
    return [
        row for row in rows if row.table == "3b" or (row.table, row.draft, row.policy) == streaming
    ]


def write_calibration() -> None:
    """Fit the machines to `fitted_rows` and store them."""
    calibration = calibrate(fitted_rows(), architecture, MACHINES)
    for name, machine in calibration.machines.items():
        provenance = [
            f"{name}, from published times: MagicDec (arXiv 2408.11049), {CALIBRATED_ON[name]}.",
            (
                "Written by `python benchmarks/costmodel.py --calibrate`, which fits both machines"
                f" together ({calibration.num_rows} rows,"
            ),
            f"root mean square error of a time {calibration.residual:.1%}).",
        ]
        path = hardware.CALIBRATED / f"{name.lower()}.yaml"
        path.write_text(to_yaml(machine, provenance))
        print(f"wrote {path.relative_to(ROOT)}")
    hardware._calibrations.cache_clear()


def fit(rows: Sequence[tables.Row]) -> Mapping[str, hardware.Hardware]:
    """Return the machines that some rows calibrate."""
    return calibrate(rows, architecture, MACHINES).machines


def scores(compared: Sequence[Compared]) -> Iterator[Row]:
    """Yield the scores of all rows, of those not fitted, and of fitted ones by a calibration that
    has not seen them.
    """
    setup = Setup(architecture("llama-3.1-8b"), hardware_named("8xA100"), batch=32, context=4000)
    facts = {
        "critical_context": critical_context(setup, gamma=3),
        "seconds": seconds_per_thousand(),
    }
    yield (
        {"of": "all"}
        | vars(score(compared))
        | facts
        | {"measured_by": f"{cpu_name()}, commit {commit()}"}
    )
    fitted = fitted_rows()
    yield {"of": "not fitted"} | vars(score([c for c in compared if c.row not in fitted]))
    yield {"of": "five folds over the fitted rows"} | vars(
        score(cross_validate(fitted, architecture, fit))
    )
    a100 = [row for row in fitted if row.hardware == "8xA100"]
    short, long = (
        [row for row in a100 if (row.context_len <= SHORT) == is_short]
        for is_short in (True, False)
    )
    name = f"A100 contexts beyond {SHORT:,}, fitted up to it"
    yield {"of": name} | vars(score(cross_validate(a100, architecture, fit, [(short, long)])))


def alternatives() -> list[Row]:
    """Return the errors over all rows and over those not fitted, with other choices of what is not
    fitted.
    """
    matmul = SHARED["matmul_fraction"]
    choices: dict[str, tuple[dict[str, float], dict[str, Prior]]] = {"as chosen": ({}, {})}
    for mean in (0.6, 0.8):
        choices[f"matmul_fraction expected at {mean}"] = (
            {},
            {"matmul_fraction": matmul._replace(mean=mean)},
        )
    for key, values in (("matmul_half_rows", (0.0, 64.0)), ("allreduce_hop_us", (3.0, 8.0))):
        choices |= {f"{key} {value:.0f}": ({key: value}, {}) for value in values}
    rows, fitted, found = tables.read_table(), fitted_rows(), []
    for name, (changes, priors) in choices.items():
        starts = {
            key: replace(m, efficiency=replace(m.efficiency, **changes))
            for key, m in MACHINES.items()
        }
        machines = calibrate(fitted, architecture, starts, priors).machines
        compared = [compare(row, architecture, machines) for row in rows]
        unseen = [c for c in compared if c.row not in fitted]
        scores = {"": score(compared), "_not_fitted": score(unseen)}
        errors = ("median_error", "p90_error")
        found.append(
            {"choice": name}
            | {f"{key}{of}": getattr(s, key) for of, s in scores.items() for key in errors}
        )
    return found


def seconds_per_thousand() -> float:
    """Return the seconds of one core to predict a thousand configurations at 16 gammas each, with
    memory and S*.
    """
    model, machine = architecture("llama-3.1-8b"), hardware_named("8xA100")
    start = time.process_time()
    for i in range(1000):
        predict(Setup(model, machine, 16 + i % 200, 1000 + 60 * i), alpha=0.8).metrics()
    return time.process_time() - start


def by_table(compared: Sequence[Compared]) -> Iterator[Row]:
    """Yield the median error of the speedup and the mean errors of the times by table, draft and
    policy.
    """
    keys = ("table", "hardware", "target", "draft", "policy")
    rows = [{key: getattr(c.row, key) for key in keys} | {"compared": c} for c in compared]
    for names, members in groups(sorted(rows, key=itemgetter(*keys)), *keys):
        found = [row["compared"] for row in members]
        line = dict(zip(keys, names, strict=True)) | {
            "rows": len(found),
            "speedup": score(found).median_error,
        }
        for step, label in (("target", "T_T"), ("draft", "T_D"), ("verify", "T_V")):
            known = [c.time_errors[step] for c in found if step in c.time_errors]
            line |= {label: fmean(known) if known else None}
        yield line


def write_page(compared: Sequence[Compared]) -> None:
    """Write the CSV files of the page, and the page."""
    numbers = {name: vars(hardware_named(name).efficiency) for name in MACHINES}
    fitted = [
        {"number": key} | {name: of[key] for name, of in numbers.items()}
        for key in numbers["8xA100"]
    ]
    files = {
        "scores": scores(compared),
        "tables": by_table(compared),
        "fit": fitted,
        "choices": alternatives(),
    }
    for name, rows in files.items():
        write_csv(RESULTS / f"costmodel-{name}.csv", list(rows))
    write_versions(compared)
    write("costmodel")
    print("wrote docs/results/costmodel.md")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument(
        "table", nargs="?", type=Path, help="a CSV file; the paper's tables where none is given"
    )
    parser.add_argument(
        "--calibrate", action="store_true", help="fit the machines to the paper's tables again"
    )
    arguments = parser.parse_args()
    try:
        if arguments.calibrate:
            write_calibration()
        rows = tables.read_table(arguments.table or tables.PUBLISHED)
        compared = [compare(row, architecture) for row in rows]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(
        table(by_table(compared), "table", "hardware", "target", "draft", "policy", "rows", *ERRORS)
    )
    for note in sorted(
        {f"{c.row.hardware}: {hardware_named(c.row.hardware).note}" for c in compared}
    ):
        print(note)
    if arguments.table is None:
        write_page(compared)
    fitted = set(fitted_rows())
    print(json.dumps(summary(compared, sum(c.row in fitted for c in compared))))
    return 0


def summary(compared: list[Compared], fitted: int) -> dict[str, float | int | None]:
    """Return the object of the last line; a score that cannot be computed is null."""
    values = asdict(score(compared))
    rounded = {
        k: v if isinstance(v, int) else round(v, 5) if v == v else None for k, v in values.items()
    }
    return {"rows": rounded.pop("rows"), "fitted_rows": fitted} | rounded


if __name__ == "__main__":
    sys.exit(main())
