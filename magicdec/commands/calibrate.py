"""`magicdec calibrate`: measure what a machine achieves, and write it as an option of the group
hardware.

By default it times steps of our engine here; with --url the steps of a server, with --results those
in files. Every third point is held back first, so that the errors that are reported are those of
points it has not seen; the file is then fitted to all of them.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from magicdec.calibrate.result_files import of_results
from magicdec.calibrate.steps import Measured, measure_here
from magicdec.config.folders import check_is_ours, check_is_read
from magicdec.costmodel.calibration import (
    ON_CPUS,
    OWN,
    SERVED,
    Calibration,
    calibrate,
    errors_of,
    option_yaml,
)
from magicdec.costmodel.hardware import configured
from magicdec.costmodel.stacks import OWN_STACK
from magicdec.costmodel.tables import Row
from magicdec.errors import UserError, exit_code, to_stderr
from magicdec.inputs.rules import FileName, parse
from magicdec.peers.openai import INSTALL
from magicdec.tracking.cells import new_table
from magicdec.tracking.console import Console
from magicdec.tracking.store import shown

OPTIONS = Path("conf", "hardware")  # of the working directory
WRITTEN_BY = "Written by: magicdec calibrate"
HELD_BACK = 3  # every so many points
EXAMPLES = """examples:
  magicdec calibrate                                          about a minute; then hardware=calibrated
  magicdec calibrate --name served --url http://127.0.0.1:8000/v1 target=llama-3.1-8b hardware=h200
  magicdec calibrate --name served --results bench-*.json target=llama-3.1-8b hardware=h200
  magicdec calibrate --name my-h200 --results runs/RUN_ID     of scenario=profile or scenario=serve
"""  # noqa: E501
STEPS = {"target": "T_T", "draft": "T_D", "verify": "T_V", "prefill": "prefill"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        "magicdec calibrate",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--name", default="calibrated", help="name of the option to write: conf/hardware/NAME.yaml"
    )
    parser.add_argument("--url", help="time a server with OpenAI's API, as in engine.url")
    parser.add_argument(
        "--results",
        metavar="FILE",
        nargs="+",
        default=[],
        help="a run's folder or result.json, or files of vllm bench serve, AIPerf or GuideLLM",
    )
    parser.add_argument(
        "override",
        nargs="*",
        help="KEY=VALUE of what is timed, such as target=llama-3.1-8b hardware=h200",
    )
    return exit_code(lambda: _calibrate(parser.parse_intermixed_args(argv)))


def _calibrate(options: argparse.Namespace) -> None:
    parse(FileName, options.name, "--name")  # type: ignore[arg-type]
    path = OPTIONS / f"{options.name}.yaml"
    check_is_ours(path, WRITTEN_BY, f"--name {options.name}")
    check_is_read("hardware", options.name, path, f"--name {options.name}")
    files = [Path(text) for text in options.results if "=" not in text or Path(text).exists()]
    overrides = [*options.override, *(text for text in options.results if Path(text) not in files)]
    if options.url and options.results:
        raise UserError(
            f"--url {options.url}: --results has measured already; leave one of them out"
        )
    if options.results and not files:
        raise UserError(f"--results {' '.join(options.results)}: name a file")
    if options.url:
        write(path, _measure_server(options.url, overrides))
    else:
        write(path, of_results(files, overrides) if files else measure_here(overrides))


def _measure_server(url: str, overrides: Sequence[str]) -> Measured:
    """Time a server, with the client of the extra `openai`."""
    try:
        from magicdec.calibrate.bursts import measure_server
    except ModuleNotFoundError:
        raise UserError(f"--url {url} needs OpenAI's client: {INSTALL}") from None
    return measure_server(url, overrides)


def write(path: Path, measured: Measured) -> None:
    """Fit the machine, show the errors of points that it has not seen, and write the option."""
    console = Console(file=sys.stdout)
    seen = [row for number, row in enumerate(measured.rows) if number % HELD_BACK != 1]
    unseen = [row for number, row in enumerate(measured.rows) if number % HELD_BACK == 1]
    start, device = measured.machine, measured.machine.device
    before = configured(
        start.name, start.count, device.bandwidth / 1e9, device.flops / 1e12, stack=OWN_STACK
    )
    cases = {"before": (before, measured.rows)}
    if unseen:
        cases["held back"] = (_fit(measured, seen).machines[measured.machine.name], unseen)
    calibration = _fit(measured, measured.rows)
    machine = calibration.machines[measured.machine.name]
    cases["after"] = (machine, measured.rows)
    errors = {
        name: [errors_of(candidate, row, measured.models.__getitem__) for row in rows]
        for name, (candidate, rows) in cases.items()
    }
    steps = [step for step in STEPS if any(step in row for row in errors["after"])]
    table = new_table("errors, median and worst", *(STEPS[step] for step in steps))
    for name, rows in errors.items():
        by_step = ([row[step] for row in rows if step in row] for step in steps)
        table.add_row(name, *map(_summary, by_step))
    console.print(table)
    origin = [f"{measured.source}: {calibration.num_rows} points. {WRITTEN_BY}"]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(option_yaml(machine, measured.values, origin), encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot write {shown(path)}: {error.strerror}; run it in a folder of your own"
        ) from error
    console.print(f"{shown(path)}: predictions take it with hardware={path.stem}", soft_wrap=True)
    if measured.disturbed:
        to_stderr(
            f"warning: {measured.disturbed}: predictions with hardware={path.stem} will be too"
            " slow; stop the other programs, then calibrate again"
        )
    if measured.diagnosis:
        console.print(f"diagnosis: {measured.diagnosis}", soft_wrap=True)


def _fit(measured: Measured, rows: Sequence[Row]) -> Calibration:
    priors = SERVED if measured.is_served else OWN
    if measured.machine.is_cpu:
        priors = ON_CPUS
    return calibrate(
        rows, measured.models.__getitem__, {measured.machine.name: measured.machine}, priors
    )


def _summary(errors: Sequence[float]) -> str:
    """Return the median of absolute errors, and the worst with its sign."""
    if not errors:
        return "-"
    return f"{median(map(abs, errors)):.0%}, {max(errors, key=abs):+.0%}"
