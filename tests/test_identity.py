"""Which model a run names, and whose architecture it records."""

import json
import shutil
from pathlib import Path

import pytest

from magicdec.architectures import ModelConfig
from magicdec.config.load import compose
from magicdec.drafting import ModelChoice
from magicdec.errors import UserError
from magicdec.models.checkpoint import read_config
from magicdec.planning.identity import identify
from magicdec.planning.prediction import plan_prediction
from magicdec.planning.resolve import resolve

TINY = Path(__file__).parents[1] / "magicdec" / "models" / "tiny"
SMALL = ["hardware=cpu", "batch.size=2", "batch.context_len=256", "batch.generate_len=8", "attention=sdpa"]


def copied(folder: Path, original: str = "draft", **config: object) -> Path:
    """A checkpoint of its own: the bundled draft, which is smaller than tiny in every way."""
    shutil.copytree(TINY / original, folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


def chosen(*overrides: str) -> ModelChoice:
    return resolve(compose([*SMALL, *overrides])).config.target


def test_a_folder_gives_name_and_architecture(tmp_path):
    folder = copied(tmp_path / "my-model")
    config = read_config(folder)
    for overrides in (["target=tiny"], ["target=custom"], ["target=llama-3.1-8b"]):
        target = chosen(*overrides, f"target.path={folder}")
        assert (target.name, target.path) == ("my-model", str(folder))
        assert target.architecture is not None
        assert target.architecture == config


def test_the_named_option_keeps_its_name_and_records_what_its_checkpoint_says():
    target = chosen()
    assert target.name == "tiny"
    assert target.architecture == read_config(TINY / "target")
    assert chosen(f"target.path={TINY / 'target'}").name == "tiny"


def test_a_name_that_was_given_stays(tmp_path):
    assert chosen(f"target.path={copied(tmp_path / 'a')}", "target.name=mine").name == "mine"


@pytest.mark.parametrize(
    ("folder", "original", "name"),
    [
        ("Tiny", "target", "tiny"),  # the same architecture under an option's name: a local copy of it
        ("tiny", "draft", "x/tiny"),  # another model: its acceptance is not tiny's
        ("models--org--Some-Model/snapshots/0123abc", "draft", "Some-Model"),  # the hub's cache
    ],
)
def test_names_of_folders(tmp_path, folder, original, name):
    path = copied(tmp_path / "x" / folder, original)
    assert chosen(f"target.path={path}").name == name


def test_a_draft_of_its_own(tmp_path):
    folder = copied(tmp_path / "my-draft")
    draft = resolve(compose([*SMALL, "draft=model", f"draft.model.path={folder}"])).config.draft
    assert draft.model is not None
    assert (draft.model.name, draft.model.path) == ("my-draft", str(folder))


@pytest.mark.parametrize("weights", ["checkpoint", "random"])
def test_an_override_that_the_checkpoint_contradicts(tmp_path, weights):
    folder = copied(tmp_path / "my-model")
    overrides = [f"target.path={folder}", f"target.weights={weights}", "draft.synthetic_acceptance=0.5", "data=random"]
    with pytest.raises(UserError) as error:
        chosen(*overrides, "target.architecture.num_layers=3")
    line = str(error.value)
    assert line.startswith("target.architecture.num_layers=3: the checkpoint")
    assert f"{folder} has 2" in line
    assert chosen(*overrides, "target.architecture.num_layers=2").name == "my-model"
    with pytest.raises(UserError, match=r"target.architecture.sliding_window=64: the checkpoint .* has null"):
        chosen(*overrides, "target.architecture.sliding_window=64")


def test_an_override_of_a_named_option():
    with pytest.raises(UserError, match=r"target.architecture.num_layers=3: the checkpoint .*target has 6"):
        chosen("target.architecture.num_layers=3")
    random = ["target.weights=random", "draft.synthetic_acceptance=0.5", "data=random"]
    target = chosen(*random, "target.architecture.num_layers=3")
    assert target.architecture is not None
    assert (target.name, target.architecture.num_layers) == ("tiny", 3)


def test_custom_needs_a_path():
    with pytest.raises(UserError, match=r"target.path=null: give a local Hugging Face folder"):
        chosen("target=custom")


def test_predictions_are_of_the_folder_too(tmp_path):
    folder = copied(tmp_path / "my-model")
    setup = plan_prediction(compose(["scenario=predict", "hardware=a100", f"target.path={folder}"])).setup
    assert (setup.target_name, setup.target) == ("my-model", read_config(folder))
    setup = plan_prediction(compose(["scenario=predict", "hardware=a100", "target=llama-3.1-8b"])).setup
    assert setup.target_name == "llama-3.1-8b"


def test_predicting_a_named_option_reads_no_checkpoint():
    choice = ModelChoice(
        "llama-3.1-8b", "meta-llama/Llama-3.1-8B", "checkpoint", ModelConfig(1000, 64, 64, 2, 2, 1, 32, 512)
    )
    assert identify("target", choice, loads=False) == (choice, None)
