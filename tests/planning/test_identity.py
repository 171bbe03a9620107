"""The model that a run names, and the architecture that it records."""

import io
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

import magicdec
from magicdec.architectures import ModelConfig
from magicdec.config.choices import ModelChoice
from magicdec.config.load import compose
from magicdec.costmodel.targets import architecture, model_label
from magicdec.errors import UserError
from magicdec.models.checkpoint import read_config
from magicdec.planning.identity import identify
from magicdec.planning.resolve import resolve
from magicdec.scenarios import plan, predict
from magicdec.tracking.progress import progress

TINY = Path(__file__).parents[2] / "magicdec" / "models" / "tiny"
SMALL = ["hardware=cpu", "batch.size=2", "batch.context_len=256", "batch.generate_len=8", "attention=sdpa"]


def copied(folder: Path, original: str = "draft", **config: object) -> Path:
    """A checkpoint of its own: the bundled draft, which is smaller than tiny in every way."""
    shutil.copytree(TINY / original, folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


def described(folder: Path, option: str, **changes: object) -> Path:
    """A folder with the config.json of an option, and no weights."""
    of, keys = architecture(option), ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")
    config = {key: getattr(of, key) for key in (*keys, "rope_theta", "rms_norm_eps", "tie_word_embeddings")}
    config |= {"num_hidden_layers": of.num_layers, "num_attention_heads": of.num_heads}
    scaling = of.rope_scaling and asdict(of.rope_scaling)
    scaling = scaling and {"rope_type": of.rope_scaling.kind} | {k: v for k, v in scaling.items() if v is not None}
    config |= {"model_type": "llama", "num_key_value_heads": of.num_kv_heads, "rope_scaling": scaling}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def predicted(*overrides: str) -> tuple[dict[str, Any], str]:
    """The metrics of a prediction for the paper's Llama, and what it prints."""
    plan = resolve(
        compose(["scenario=predict", "hardware=8xa100", "batch.context_len=32000", "cache.budget=512", *overrides])
    )
    console = Console(file=io.StringIO(), width=500)
    with progress() as bars:
        outcome = predict.run(plan, bars)
    console.print(outcome.view)
    return outcome.metrics, console.file.getvalue()


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


@pytest.mark.parametrize("option", ["tiny", "custom target.name=tiny"])
def test_a_folder_with_the_options_architecture_keeps_its_name(tmp_path, option):
    target = chosen(
        f"target={option}".split()[0], *option.split()[1:], f"target.path={copied(tmp_path / 'a', 'target')}"
    )
    assert (target.name, model_label(target.name, target.path)) == ("tiny", "tiny (a)")
    draft = ["draft=model", "target@draft.model=tiny-draft", f"draft.model.path={copied(tmp_path / 'b')}"]
    model = resolve(compose([*SMALL, *draft])).config.draft.model
    assert (model.name, model_label(model.name, model.path)) == ("tiny-draft", "tiny-draft (b)")


@pytest.mark.parametrize(
    ("name", "path", "shown"),
    [
        ("llama-3.1-8b", None, "llama-3.1-8b"),
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("llama-3.1-8b", "/data/llama-3.1-8b", "llama-3.1-8b"),  # a local copy
        ("llama-3.1-8b", "/data/Llama-3.1-8B/", "llama-3.1-8b"),
        ("smollm2-135m-q4", "{here}/models/smollm2-135m-q4", "smollm2-135m-q4"),
        ("llama-3.1-8b", "someone/Llama-3.1-8B-Tuned@main", "llama-3.1-8b (Llama-3.1-8B-Tuned@main)"),
        ("llama-3.1-8b", "/hub/models--org--Tuned/snapshots/0123abc", "llama-3.1-8b (Tuned)"),
        ("my-model", "/data/my-model", "my-model"),
        ("m" * 5000, "/data/my-model", "m" * 5000),
        ("mine", "/data/my-model", "mine"),
    ],
)
def test_labels(name, path, shown):
    assert model_label(name, path and path.format(here=Path.cwd())) == shown


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
    folder = copied(tmp_path / "my-draft", "target")
    draft = resolve(compose([*SMALL, "draft=model", f"draft.model.path={folder}"])).config.draft
    assert draft.model is not None
    assert (draft.model.name, draft.model.path) == ("my-draft", str(folder))


def test_a_folder_named_after_an_option_of_the_same_architecture_is_that_option(tmp_path):
    folder = described(tmp_path / "smollm2-135m-q4", "smollm2-135m")
    setup = resolve(compose(["scenario=predict", "hardware=a100", "target=smollm2-135m", f"target.path={folder}"]))
    assert setup.config.target.name == "smollm2-135m-q4"


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
        assert note in said
    other = described(tmp_path / "other", "llama-3.1-8b", num_hidden_layers=30)
    metrics, said = predicted(runs, "target=llama-3.1-8b", f"target.path={other}")
    assert metrics["predicted/alpha"] is None
    assert said.startswith("predicted: other, draft self")


def test_own_runs_of_a_copy_in_another_folder_are_evidence(tmp_path):
    runs = f"runs_dir={tmp_path / 'runs'}"
    copy = copied(tmp_path / "smollm2-copy", "target")
    prompts = ["batch.size=1", "batch.context_len=64", "batch.generate_len=8", "data.path=LICENSE", "draft.gamma=2"]
    keys = ["target=tiny", "cache.budget=24", "data=text", *prompts, "tracker=[]", runs]
    one = magicdec.run([*keys, f"target.path={copy}", "hardware=cpu", "attention=sdpa", "scenario.repeats=1"])
    folders = [TINY / "target", copied(tmp_path / "other", "target"), copy]
    for folder in folders:
        metrics, _ = predicted(*keys, f"target.path={folder}", "hardware=a100")
        assert metrics["predicted/alpha"] == pytest.approx(one.metrics["alpha"])
        source = f"run {one.folder.name}, on text"
        assumed = {TINY / "target": "tiny", tmp_path / "other": "tiny (other)"}.get(folder)
        note = f", assuming that {assumed} accepts as tiny (smollm2-copy) does" if assumed else ""
        assert metrics["predicted/acceptance_source"] == source + note


def test_a_plan_for_a_folder_leads_back_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "EXPERIMENTS", tmp_path)
    keys = ["scenario=plan", "hardware=8xa100", "batch.context_len=32000", "batch.size=64", f"runs_dir={tmp_path}"]
    for folder, option in (("snapshot", "llama-3.1-8b"), ("other", "custom")):
        path = described(tmp_path / folder, "llama-3.1-8b", vocab_size=128256 if option != "custom" else 1000)
        config = compose([*keys, "target=llama-3.1-8b", f"target.path={path}"])
        with progress() as bars:
            plan.run(resolve(config), bars)
        found = yaml.safe_load((tmp_path / "planned.yaml").read_text())
        assert {"override /target": option} in found["defaults"]
        assert found["target"] == {"path": str(path)}


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
    setup = resolve(compose(["scenario=predict", "hardware=a100", f"target.path={folder}"])).setup()
    assert (setup.target_name, setup.target) == ("my-model", read_config(folder))
    setup = resolve(compose(["scenario=predict", "hardware=a100", "target=llama-3.1-8b"])).setup()
    assert setup.target_name == "llama-3.1-8b"


def test_predicting_a_named_option_reads_no_checkpoint():
    choice = ModelChoice(
        "llama-3.1-8b", "meta-llama/Llama-3.1-8B", "checkpoint", ModelConfig(1000, 64, 64, 2, 2, 1, 32, 512)
    )
    assert identify("target", choice, loads=False) == (choice, None)
