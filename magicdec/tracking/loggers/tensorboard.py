"""The tracker for TensorBoard: event files in each run's folder. The only module that imports
tensorboard.

Rounds, levels of load and samples of the machine are time series, generated text is under Text, and
the settings and metrics of all runs are one table under HParams.
"""

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from time import time
from typing import Any

from magicdec.errors import UserError, in_one_line
from magicdec.shell import command_line
from magicdec.tracking.columns import NOT_METRICS, flatten, is_setting
from magicdec.tracking.store import shown
from magicdec.tracking.trackers import STEP_KEYS, FinishedRun, Logged, Settings
from magicdec.units import is_number

NAME = "TensorBoard"
IMPORTS = ("tensorboard.summary.writer.event_file_writer",)
_opened: dict[Path, Any] = {}  # the writers of runs that are shown while they run, by folder


def check(config: Settings) -> None:
    """Raise UserError if TensorBoard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise UserError(
            "tracker=tensorboard: tensorboard is not installed; pip install 'magicdec[tensorboard]'"
        )


def settings(config: Settings, sweep: str | None) -> dict[str, Any]:
    """Add nothing: a sweep's runs lie next to each other."""
    return dict(config)


def in_sweep() -> bool:
    """Return False: TensorBoard starts no runs."""
    return False


def follow(run: FinishedRun) -> Callable[[Mapping[str, Any]], None]:
    """Return a function that writes a line into an event file, which TensorBoard reads with the one
    of the end.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(_folder(run)), filename_suffix=".live")
    _opened[run.folder] = writer

    def show(line: Mapping[str, Any]) -> None:
        writer.add_event(
            Event(wall_time=time(), step=round(line["live/seconds"]), summary=_scalars(line))
        )
        writer.flush()

    return show


def log_run(run: FinishedRun) -> Logged:
    """Write the event file of a run, and close the one that was written while it ran."""
    live = _opened.pop(run.folder, None)
    folder = _folder(run)
    command = command_line(["tensorboard", "--logdir", shown(run.folder.parent)])
    try:
        if live:
            live.close()  # and end its thread
        _write(folder, run)
    except Exception as error:
        return Logged(NAME, warning=f"{NAME} failed, {in_one_line(error)}")
    return Logged(NAME, folder, command=command, command_label=NAME)


def log_sweep(folder: Path, config: Settings, files: Iterable[Path]) -> None:
    """Log nothing: TensorBoard shows the runs of a sweep together."""


def _folder(run: FinishedRun) -> Path:
    """Return the folder of a run's event files: TensorBoard calls the run by its name."""
    return run.folder / "tensorboard" / run.name.replace("/", "-")


def _write(folder: Path, run: FinishedRun) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    finished = datetime.fromisoformat(run.result["finished"]).timestamp()
    writer = EventFileWriter(str(folder))
    try:
        for step, summary in _summaries(run):
            writer.add_event(Event(wall_time=finished, step=step, summary=summary))
    finally:
        writer.close()


def _summaries(run: FinishedRun) -> Iterator[tuple[int, Any]]:
    """Yield what TensorBoard shows, with its step: settings, metrics, time series, text."""
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb
    from tensorboard.plugins.text.summary_v2 import text_pb

    row = flatten({"config": dict(run.config)})
    chosen = {key: row[key] for key in row if is_setting(key) and ".architecture." not in key}
    yield 0, hparams_pb(chosen, trial_id=f"{run.name} {run.id}")
    yield 0, _scalars({key: value for key, value in run.result.items() if key not in NOT_METRICS})
    for name in ("history", "system"):
        for number, row in enumerate(run.rows(name)):
            along = next((key for key in STEP_KEYS if key in row), None)
            yield round(row[along]) if along else number, _scalars(row)
    for sample in run.rows("samples"):
        for way in ("autoregressive", "speculative"):
            if sample.get(way):
                text = f"{sample.get('prompt_end', '')}\n\n---\n\n{sample[way]}"
                yield sample["row"], text_pb(f"generated/{way}", text)


def _scalars(values: Mapping[str, Any]) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    numbers = {key: float(value) for key, value in values.items() if is_number(value)}
    return Summary(
        value=[Summary.Value(tag=key, simple_value=value) for key, value in numbers.items()]
    )
