import json
from dataclasses import replace
from pathlib import Path

import pytest

from magicdec.architectures.hugging_face import from_hugging_face
from magicdec.architectures.layer_facts import TokenMemory
from magicdec.config.load import compose
from magicdec.config.options import values_of
from magicdec.costmodel.targets import architecture
from magicdec.errors import UserError
from magicdec.planning.identity import identify
from tests.architectures.test_hugging_face import LLAMA
from tests.inputs.test_plugins import written

TARGETS = Path(__file__).parents[2] / "conf" / "target"

# Parameters in billions, as the models' own pages state them.
PUBLISHED = {
    "llama-2-7b-32k": 6.74,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.55,
    "llama-3.2-1b": 1.24,
    "tinyllama-1.1b": 1.10,
    "mistral-7b-v0.1": 7.24,
    "mistral-7b-v0.3": 7.25,
    "qwen2.5-7b": 7.62,
    "qwen2.5-14b": 14.77,
    "qwen2.5-32b": 32.76,
    "qwen3-1.7b": 1.72,
    "qwen3-8b": 8.19,
    "qwen3-14b": 14.77,
    "yi-1.5-6b": 6.06,
    "yi-1.5-34b": 34.39,
    "smollm2-135m": 0.13,
    "smollm2-135m-q4": 0.13,
}
BUNDLED = ("tiny", "tiny-draft")
# The same of those that run as transformers' modules; GLM's without the layer that predicts a
# second token.
MODULES = {
    "qwen3-30b-a3b": 30.53,
    "mixtral-8x7b": 46.70,
    "gpt-oss-20b": 20.91,
    "gpt-oss-120b": 116.83,
    "deepseek-v3": 671.03,
    "qwen3.5-27b": 26.90,
    "glm-4.5-air": 106.85,
    "gemma-2-9b": 9.24,
    "gemma-3-1b": 1.00,
    "phi-3-mini-4k": 3.82,
    "olmo-2-7b": 7.30,
}


@pytest.mark.parametrize("target", PUBLISHED)
def test_targets_have_the_published_number_of_parameters(target):
    assert round(architecture(target).num_parameters / 1e9, 2) == PUBLISHED[target]


@pytest.mark.parametrize("target", MODULES)
def test_targets_of_other_families_have_the_published_number_of_parameters(target):
    """Their config.json is described by transformers' modules, where the weights are not read."""
    keys = [f"target={target}", "target.weights=random", "draft.synthetic_acceptance=0.5"]
    choice = compose([*keys, "data=random"]).target
    assert choice.architecture is None
    choice, folder = identify("target", choice, loads=False)
    assert folder is None
    assert choice.config_file is None
    assert (choice.name, choice.implementation) == (target, "transformers")
    assert round(choice.architecture.num_parameters / 1e9, 2) == MODULES[target]


def test_the_architectures_that_an_error_offers_are_there():
    with pytest.raises(UserError) as raised:
        architecture("deepseek-v3")
    offered = str(raised.value).partition("choose one of ")[2].split(", ")
    assert {*offered} >= {*PUBLISHED, *BUNDLED}
    assert not {*offered} & {*MODULES}


@pytest.mark.parametrize("target", [*PUBLISHED, *BUNDLED, *MODULES, "custom"])
def test_targets_say_who_they_are_and_open_with_a_comment(target):
    content = values_of("target", target)
    assert (TARGETS / f"{target}.yaml").read_text().startswith("# ")
    extra = {"implementation", "config_file", "rollback"}
    assert set(content) - extra == {"name", "path", "weights", "architecture"}
    assert (content["name"], content["weights"]) == (target, "checkpoint")


def test_every_target_is_checked_here():
    assert {path.stem for path in TARGETS.glob("*.yaml")} == {
        *PUBLISHED,
        *BUNDLED,
        *MODULES,
        "custom",
    }


def test_an_option_of_ones_own_names_its_config_json(here):
    option = "name: mine\npath: null\nweights: random\narchitecture: theirs.json\n"
    folder = written(here, {"conf/target/mine.yaml": option}) / "conf" / "target"
    with pytest.raises(
        UserError, match=r"mine.yaml: architecture=theirs.json: no such file next to it"
    ):
        compose(["target=mine"])
    for broken in ("{", "[1]"):
        (folder / "theirs.json").write_text(broken)
        with pytest.raises(UserError, match=r"theirs.json: .*JSON"):
            compose(["target=mine"])
    (folder / "theirs.json").write_text(json.dumps(LLAMA))
    keys = ["target=mine", "draft.synthetic_acceptance=0.5"]
    found = compose([*keys, "target.architecture.num_layers=2"]).target.architecture
    assert found == replace(from_hugging_face(LLAMA), num_layers=2, eos_token_ids=())
    assert compose(keys).target.architecture == architecture("mine")


def test_a_decode_step_reads_no_more_than_the_window_of_a_layer():
    memories = (TokenMemory(2, entry=64, window=100), TokenMemory(1, entry=64))
    for tokens, entries in ((50, 3 * 50), (1000, 2 * 100 + 1000)):
        assert sum(memory.read_bytes(tokens, 2) for memory in memories) == 64 * 2 * entries
    sparse = TokenMemory(1, entry=64, index_entry=8, selected=10, state_bytes=5)
    assert sparse.read_bytes(1000, 2) == 2 * (64 * 10 + 8 * 1000) + 5
