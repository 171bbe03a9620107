"""The trackers behind their protocol, and what TensorBoard gets to see, by its own reader."""

import inspect
import re
import sys
import threading
from dataclasses import replace

import pytest

from magicdec.config.load import compose
from magicdec.errors import UserError
from magicdec.inputs import plugins
from magicdec.tracking import loggers, trackers
from magicdec.tracking.loggers import tensorboard
from magicdec.tracking.reader import load_run
from magicdec.tracking.store import Run
from magicdec.tracking.trackers import FinishedRun, Tracker, chosen
from tests.test_layers import FILES, imports
from tests.tracking.sample import (
    CONFIG,
    GENERATIONS,
    HISTORY,
    METRICS,
    SAMPLES,
    SYSTEM,
    with_changes,
)

LIBRARIES = {"wandb": "wandb", "tensorboard": "tensorboard.compat.proto.event_pb2"}
TRACKERS = plugins.built_in(loggers)
METHODS = ("check", "settings", "in_sweep", "log_run", "log_sweep")


@pytest.fixture
def run(tmp_path):
    run = Run.open(tmp_path, "0123456789ab", CONFIG)
    run.finish(METRICS, GENERATIONS, HISTORY, SAMPLES, SYSTEM)
    return FinishedRun(run.folder, CONFIG, run.result)


@pytest.mark.parametrize("name", TRACKERS)
def test_every_tracker_has_the_protocol(name):
    (tracker,) = chosen({"tracker": name})
    assert isinstance(tracker.NAME, str)
    assert all(isinstance(module, str) for module in tracker.IMPORTS)
    for method in METHODS:
        ours, wanted = (
            inspect.signature(getattr(one, method)).parameters for one in (tracker, Tracker)
        )
        assert list(ours) == [parameter for parameter in wanted if parameter != "self"]


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_fails_loses_nothing(name, run, monkeypatch):
    monkeypatch.setitem(sys.modules, LIBRARIES[name], None)
    (logged,) = trackers.log_run(run.folder, CONFIG | {"tracker": [name]}, run.result)
    assert logged.warning.startswith(f"{logged.tracker} failed, ModuleNotFoundError")
    assert "\n" not in logged.warning
    assert load_run(run.folder)["speedup"] == METRICS["speedup"]


def test_nothing_else_imports_a_tracker():
    """Commands of W&B's own aside."""
    wandb_commands = {"magicdec.commands.sync", "magicdec.commands.dashboard"}
    modules = {f"{loggers.__name__}.{name}" for name in TRACKERS}
    importers = {name for name, path in FILES.items() if set(imports(path)) & modules}
    assert importers - wandb_commands == set()


def test_one_several_or_no_trackers_are_chosen():
    names = [
        [tracker.NAME for tracker in chosen({"tracker": choice})]
        for choice in ("tensorboard", ["wandb"], [])
    ]
    assert names == [["TensorBoard"], ["W&B"], []]
    message = "tracker=tensorbord: must be one of tensorboard, wandb; did you mean tensorboard?"
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        list(chosen({"tracker": "tensorbord"}))


def test_the_key_is_checked():
    assert compose(["hardware=cpu"]).tracker == ["wandb"]
    assert compose(["hardware=cpu", "tracker=tensorboard"]).tracker == "tensorboard"
    with pytest.raises(UserError, match=r"tracker=3: must be a name or a list of names"):
        compose(["hardware=cpu", "tracker=3"])


def test_without_tensorboard_a_run_does_not_start(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(UserError, match=r"pip install 'magicdec\[tensorboard\]'"):
        tensorboard.check(CONFIG)


def test_tensorboard_leaves_no_thread_behind(run):
    before = threading.active_count()
    tensorboard.follow(run)({"live/seconds": 1.0, "live/tokens": 2.0})
    assert tensorboard.log_run(run).warning is None
    assert threading.active_count() == before


def test_tensorboard_reads_what_was_written(run):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    hparams = pytest.importorskip("tensorboard.plugins.hparams.metadata")
    changed = replace(run, config=with_changes(batch={"shares": (0.5, 1.0)}))
    logged = tensorboard.log_run(changed)
    assert logged.warning is None
    assert logged.command == f"tensorboard --logdir {run.folder.parent}"
    assert logged.folder == run.folder / "tensorboard" / "tiny self streaming-128 gamma4 8x4096", (
        "its name there"
    )
    events = reader.EventAccumulator(str(logged.folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    for key in ("speedup", "acceptance_rate"):
        assert events.Scalars(key)[0].value == pytest.approx(METRICS[key])
    accepted = [(event.step, event.value) for event in events.Scalars("accepted")]
    assert accepted == [(row["round"], row["accepted"]) for row in HISTORY]
    assert [event.step for event in events.Scalars("system/cpu")] == [5, 10]
    text = events.Tensors("generated/autoregressive")[0].tensor_proto.string_val[0].decode()
    assert text == "def f(\n\n---\n\nx): pass"
    content = events.SummaryMetadata(hparams.SESSION_START_INFO_TAG).plugin_data.content
    settings = hparams.parse_session_start_info_plugin_data(content).hparams
    assert settings["cache.budget"].number_value == 128
    assert settings["cache.policy"].string_value == "streaming"
    assert settings["batch.shares"].string_value == "[0.5,1.0]"
    assert not [key for key in settings if key.startswith(("wandb", "tracker", "runs_dir"))]
