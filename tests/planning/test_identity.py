"""The model that a run names, and the architecture that it records."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from magicdec.architectures.model_config import ModelConfig
from magicdec.config.choices import ModelChoice
from magicdec.config.load import compose
from magicdec.costmodel.round import Setup
from magicdec.costmodel.targets import architecture, model_label
from magicdec.errors import UserError
from magicdec.models.description import read_config
from magicdec.planning.identity import identify
from magicdec.planning.resolve import resolve
from magicdec.planning.setup import setup_of
from magicdec.scenarios import plan
from tests.runs import SMALL, TINY, outcome, run_here, shown


def copied(folder: Path, original: str = "draft", **config: object) -> Path:
    """A checkpoint of its own: the bundled draft, which is smaller than tiny in every way."""
    shutil.copytree(TINY / original, folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


THEIRS = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}


def described(folder: Path, option: str, **changes: object) -> Path:
    """A folder with the config.json of an option, a Llama, and no weights."""
    config = {THEIRS.get(key, key): value for key, value in asdict(architecture(option)).items()}
    if scaling := config["rope_scaling"]:
        scaling["rope_type"] = scaling.pop("kind")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama"} | changes))
    return folder


def predicted(*overrides: str) -> tuple[dict[str, Any], str]:
    """The metrics of a prediction for the paper's Llama, and what it prints."""
    keys = ("scenario=predict", "hardware=8xa100", "batch.context_len=32000", "cache.budget=512")
    found = outcome(*keys, *overrides)
    return found.metrics, shown(found.view, width=500)


def chosen(*overrides: str) -> ModelChoice:
    return resolve(compose([*SMALL, *overrides])).config.target


def test_the_named_option_keeps_its_name_and_records_what_its_checkpoint_says():
    target = chosen()
    assert target.name == "tiny"
    assert target.architecture == read_config(TINY / "target")
    assert chosen(f"target.path={TINY / 'target'}").name == "tiny"


@pytest.mark.parametrize(
    ("name", "path", "shown"),
    [
        ("llama-3.1-8b", None, "llama-3.1-8b"),
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("llama-3.1-8b", "/data/llama-3.1-8b", "llama-3.1-8b"),  # a local copy
        ("llama-3.1-8b", "/data/Llama-3.1-8B/", "llama-3.1-8b"),
        ("smollm2-135m-q4", "{here}/models/smollm2-135m-q4", "smollm2-135m-q4"),
        (
            "llama-3.1-8b",
            "someone/Llama-3.1-8B-Tuned@main",
            "llama-3.1-8b (Llama-3.1-8B-Tuned@main)",
        ),
        ("llama-3.1-8b", "/hub/models--org--Tuned/snapshots/0123abc", "llama-3.1-8b (Tuned)"),
        ("tiny", "/data/a", "tiny (a)"),
        ("my-model", "/data/my-model", "my-model"),
        ("m" * 5000, "/data/my-model", "m" * 5000),
        ("mine", "/data/my-model", "mine"),
    ],
)
def test_labels(name, path, shown):
    assert model_label(name, path and path.format(here=Path.cwd())) == shown


@pytest.mark.parametrize(
    ("folder", "original", "keys", "name"),
    [
        *(
            ("my-model", "draft", [f"target={option}"], "my-model")
            for option in ("tiny", "custom", "llama-3.1-8b")
        ),
        ("a", "draft", ["target.name=mine"], "mine"),
        ("a", "target", ["target=tiny"], "tiny"),  # the option's architecture
        ("a", "target", ["target=custom", "target.name=tiny"], "tiny"),
        # The same architecture under an option's name: a local copy of it.
        ("Tiny", "target", [], "tiny"),
        ("tiny", "draft", [], "x/tiny"),  # another model: its acceptance is not tiny's
        ("models--org--Some-Model/snapshots/0123abc", "draft", [], "Some-Model"),  # the hub's cache
    ],
)
def test_a_folder_gives_name_and_architecture(tmp_path, folder, original, keys, name):
    path = copied(tmp_path / "x" / folder, original)
    assert chosen(*keys, f"target.path={path}") == ModelChoice(
        name, str(path), "checkpoint", "native", architecture=read_config(path)
    )


@pytest.mark.parametrize(
    ("folder", "original", "keys", "name"),
    [
        ("my-draft", "target", [], "my-draft"),
        ("b", "draft", ["target@draft.model=tiny-draft"], "tiny-draft"),
    ],
)
def test_a_draft_of_its_own(tmp_path, folder, original, keys, name):
    path = copied(tmp_path / folder, original)
    draft = resolve(
        compose([*SMALL, "draft=model", *keys, f"draft.model.path={path}"])
    ).config.draft
    assert (draft.model.name, draft.model.path) == (name, str(path))


def predicted_setup(*overrides: str) -> Setup:
    return setup_of(resolve(compose(["scenario=predict", "hardware=a100", *overrides])))


def test_a_folder_named_after_an_option_of_the_same_architecture_is_that_option(tmp_path):
    folder = described(tmp_path / "smollm2-135m-q4", "smollm2-135m")
    assert (
        predicted_setup("target=smollm2-135m", f"target.path={folder}").target_name
        == "smollm2-135m-q4"
    )


def test_the_acceptance_of_an_option_is_assumed_for_a_folder_of_its_architecture(tmp_path):
    runs = f"runs_dir={tmp_path / 'runs'}"
    plain, said = predicted(runs, "target=llama-3.1-8b")
    assert "assuming" not in said
    folder = described(tmp_path / "snapshot", "llama-3.1-8b")
    for overrides in (["target=llama-3.1-8b"], ["target=custom", "target.name=llama-3.1-8b"]):
        metrics, said = predicted(runs, *overrides, f"target.path={folder}")
        note = ", assuming that llama-3.1-8b (snapshot) accepts as llama-3.1-8b does"
        assert metrics["predicted/acceptance_source"] == plain["predicted/acceptance_source"] + note
        assert metrics["predicted/speedup"] == plain["predicted/speedup"]
        assert said.startswith("predicted: llama-3.1-8b (snapshot), draft self")
        assert note in " ".join(said.split())
    other = described(tmp_path / "other", "llama-3.1-8b", num_hidden_layers=30)
    metrics, said = predicted(runs, "target=llama-3.1-8b", f"target.path={other}")
    assert metrics["predicted/alpha"] is None
    assert said.startswith("predicted: other, draft self")


def test_own_runs_of_a_copy_in_another_folder_are_evidence(tmp_path):
    runs = f"runs_dir={tmp_path / 'runs'}"
    copy = copied(tmp_path / "smollm2-copy", "target")
    keys = ["batch.size=1", "batch.context_len=64", "cache.budget=24", "draft.gamma=2"]
    keys += ["data=text", "data.path=LICENSE"]
    one = run_here(tmp_path / "runs", *keys, f"target.path={copy}")
    other = copied(tmp_path / "other", "target")
    for folder, assumed in ((TINY / "target", "tiny"), (other, "tiny (other)"), (copy, "")):
        metrics, _ = predicted(*keys, f"target.path={folder}", "hardware=a100", runs)
        assert metrics["predicted/alpha"] == pytest.approx(one.metrics["alpha"])
        note = assumed and f", assuming that {assumed} accepts as tiny (smollm2-copy) does"
        assert metrics["predicted/acceptance_source"] == f"run {one.folder.name}, on text{note}"


def test_a_plan_for_a_folder_leads_back_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "EXPERIMENTS", tmp_path)
    keys = [
        "scenario=plan",
        "scenario.save_as=of-a-test",
        "hardware=8xa100",
        "batch.context_len=32000",
        "batch.size=64",
        f"runs_dir={tmp_path}",
    ]
    for folder, option in (("snapshot", "llama-3.1-8b"), ("other", "custom")):
        path = described(
            tmp_path / folder, "llama-3.1-8b", vocab_size=128256 if option != "custom" else 1000
        )
        outcome(*keys, "target=llama-3.1-8b", f"target.path={path}")
        found = yaml.safe_load((tmp_path / "of-a-test.yaml").read_text())
        assert {"override /target": option} in found["defaults"]
        assert found["target"] == {"path": str(path)}


@pytest.mark.parametrize("weights", ["checkpoint", "random"])
def test_an_override_that_the_checkpoint_contradicts(tmp_path, weights):
    folder = copied(tmp_path / "my-model")
    overrides = [
        f"target.path={folder}",
        f"target.weights={weights}",
        "draft.synthetic_acceptance=0.5",
        "data=random",
    ]
    with pytest.raises(
        UserError, match=f"^target.architecture.num_layers=3: the checkpoint.*{folder} has 2"
    ):
        chosen(*overrides, "target.architecture.num_layers=3")
    assert chosen(*overrides, "target.architecture.num_layers=2").name == "my-model"
    with pytest.raises(
        UserError, match=r"target.architecture.sliding_window=64: the checkpoint .* has null"
    ):
        chosen(*overrides, "target.architecture.sliding_window=64")


def test_an_override_of_a_named_option():
    with pytest.raises(
        UserError, match=r"target.architecture.num_layers=3: the checkpoint .*target has 6"
    ):
        chosen("target.architecture.num_layers=3")
    random = ["target.weights=random", "draft.synthetic_acceptance=0.5", "data=random"]
    target = chosen(*random, "target.architecture.num_layers=3")
    assert (target.name, target.architecture.num_layers) == ("tiny", 3)


def test_an_option_of_ones_own_may_leave_out_what_it_does_not_set(tmp_path, monkeypatch):
    """And it need not be the chosen one."""
    folder = tmp_path / "conf" / "target"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("name: mine\n")
    monkeypatch.chdir(tmp_path)
    assert chosen("target=custom", f"target.path={TINY / 'draft'}").architecture is not None


def test_custom_needs_a_path():
    with pytest.raises(UserError, match=r"target.path=null: give a local Hugging Face folder"):
        chosen("target=custom")


def test_predictions_are_of_the_folder_too(tmp_path):
    folder = copied(tmp_path / "my-model")
    setup = predicted_setup(f"target.path={folder}")
    assert (setup.target_name, setup.target.sizes) == ("my-model", read_config(folder).sizes)
    assert predicted_setup("target=llama-3.1-8b").target_name == "llama-3.1-8b"


def test_predicting_a_named_option_reads_no_checkpoint():
    config = ModelConfig(1000, 64, 64, 2, 2, 1, 32, 512)
    choice = ModelChoice(
        "llama-3.1-8b", "meta-llama/Llama-3.1-8B", "checkpoint", "auto", architecture=config
    )
    resolved = replace(choice, implementation="native")
    assert identify("target", choice, loads=False) == (resolved, None)
