"""The JSON schemas by which editors check conf/."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from magicdec import cli
from magicdec.commands import schema as json_schema
from magicdec.commands.schema import schemas
from tests.programs import ROOT

CONF = ROOT / "conf"
FILES = [path for path in sorted(CONF.rglob("*.yaml")) if CONF / "hydra" not in path.parents]


@pytest.fixture(scope="module")
def validators():
    return {group: jsonschema.Draft202012Validator(schema) for group, schema in schemas().items()}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT / "conf")))
def test_every_file_is_valid(validators, path):
    group = path.relative_to(ROOT / "conf").with_suffix("").parts[0]
    assert [
        error.message for error in validators[group].iter_errors(yaml.safe_load(path.read_text()))
    ] == []


def whole_numbers(schema, key=""):
    """The schemas of whole numbers within a schema, with the keys that they are below."""
    if isinstance(schema, dict) and schema.get("type") == "integer" and "enum" not in schema:
        yield key, schema
    inner = schema.items() if isinstance(schema, dict) else enumerate(schema)
    for name, part in inner:
        if isinstance(part, dict | list) and name not in ("enum", "ctx"):
            yield from whole_numbers(part, f"{key}.{name}")


# Those of a model's architecture are checked together.
def test_every_whole_number_has_a_bound_with_which_a_stored_run_can_be_read_back():
    bounds = {
        key: part.get("maximum", part.get("exclusiveMaximum", float("inf")))
        for schema in schemas().values()
        for key, part in whole_numbers(schema)
        if not re.search(r"\bModelConfig|\bRopeScaling", key)
    }
    names = {name for key in bounds for name in key.split(".")}
    assert {"budget", "context_len", "num_sink", "refresh", "tensor_parallel"} <= names
    assert [key for key, bound in bounds.items() if bound > 2**63] == []


@pytest.mark.parametrize(
    ("group", "text"),
    [
        ("cache", "policy: streaming\nbudgt: 3"),
        ("cache", "policy: streming"),
        ("cache", "policy: streaming\npage_size: 16"),  # of another policy
        ("cache", "budgt: 3"),
        ("draft", "name: self\ngamma: two"),
        ("draft", "name: none\ngama: 2"),
        ("draft", "name: model\nmodel: {nam: tiny}"),
        ("hardware", "dtype: float8"),
        ("batch", "size: true"),
        ("data", "name: stdlb"),
        ("scenario", "name: predict\nrepeats: 3"),
        ("target", "architecture: {num_layer: 3}"),
        ("experiment", "cache: {budgt: 3}"),
        ("experiment", "attention: {name: cpp}"),
        ("experiment", "batch: 3"),
        ("local", "run_dir: runs"),
    ],
)
def test_a_mistake_is_found(validators, group, text):
    assert not validators[group].is_valid(yaml.safe_load(text))


@pytest.mark.parametrize(
    ("group", "text"),
    [
        ("cache", "defaults: [streaming, _self_]\nbudget: ${batch.context_len}"),
        ("cache", "policy: streaming\nbudget: ???"),
        ("draft", "name: hierarchical\nmodel: {path: '???'}\ncache: {budget: 64}"),
        ("target", "name: mine\narchitecture: mine.json"),
        (
            "experiment",
            (
                "defaults:\n  - override /cache: quest\nhydra: {sweeper: {params: {draft.gamma:"
                " '1,2'}}}"
            ),
        ),
        (
            "local",
            "tracker: [wandb, tensorboard]\nresume: any_version\nsweep: {name: '${oc.env:NAME}'}",
        ),
    ],
)
def test_what_hydra_fills_in_is_admitted(validators, group, text):
    validators[group].validate(yaml.safe_load(text))


def test_the_command_writes_them_and_the_setting_of_an_editor(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(json_schema, "schemas", lambda: {"cache": {"type": "object"}, "config": {}})
    assert cli.COMMANDS["schema"] == json_schema.__name__
    assert json_schema.main([str(tmp_path / "new")]) == 0
    setting = json.loads(capsys.readouterr().out)["yaml.schemas"]
    assert {Path(file).name: glob for file, glob in setting.items()} == {
        "cache.json": "conf/cache/**/*.yaml",
        "config.json": "conf/config.yaml",
    }
    assert json.loads((tmp_path / "new" / "cache.json").read_text()) == {"type": "object"}
