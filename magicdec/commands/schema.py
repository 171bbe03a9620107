"""`magicdec schema FOLDER`: JSON schemas by which an editor completes and checks conf/.

Write a schema for each group. They come from the classes that check a run, with those of installed
plugins and of the named modules. They admit what Hydra fills in: `defaults`, ${...} and ???, and
keys that are left to another option.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter

from magicdec.config.choices import DraftConfig
from magicdec.config.registry import BACKENDS, DRAFTS, GROUPS, keys_of
from magicdec.config.scenario_settings import SCENARIOS, Scenario
from magicdec.config.schema import Config
from magicdec.errors import exit_code
from magicdec.inputs import plugins
from magicdec.inputs.others import given_path

Schema = dict[str, Any]
# What Hydra fills in, or asks for.
LATER = {"type": "string", "pattern": r"\$\{.+\}|^\?\?\?$"}
DEFAULTS = {"type": "array", "items": {"type": ["string", "object"]}}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the schemas, print VS Code's setting for them, and return the exit code."""
    parser = argparse.ArgumentParser(
        "magicdec schema", description=(__doc__ or "").split("\n\n")[1]
    )
    parser.add_argument("folder", type=given_path, help="where to write GROUP.json")
    parser.add_argument(
        "modules", nargs="*", metavar="MODULE", help="plugins, as in plugins=[MODULE]"
    )
    options = parser.parse_args(arguments)
    return exit_code(lambda: _write(options.folder, options.modules))


def _write(folder: Path, modules: Sequence[str]) -> int:
    plugins.load(modules, are_arguments=True)
    folder.mkdir(parents=True, exist_ok=True)
    places = {}
    for group, schema in schemas().items():
        file = folder / f"{group}.json"
        file.write_text(json.dumps(schema, indent=1) + "\n", encoding="utf-8")
        places[file.as_posix()] = (
            f"conf/{group}.yaml" if group == "config" else f"conf/{group}/**/*.yaml"
        )
    print(json.dumps({"yaml.schemas": places}, indent=2))
    return 0


def schemas() -> dict[str, Schema]:
    """Return the schema of each group; those of `config`, `experiment` and `local` are of a whole
    run.
    """
    kinds = get_type_hints(Config, include_extras=True)
    groups = {name: group_schema(name, kind) for name, kind in kinds.items()}
    definitions = {
        name: definition
        for schema in groups.values()
        for name, definition in schema.pop("$defs", {}).items()
    }
    keys = {
        name: schema if "properties" in schema else {"anyOf": [schema, LATER]}
        for name, schema in groups.items()
    }
    whole = {
        "type": "object",
        "properties": keys | {"hydra": {}, "defaults": DEFAULTS},
        "additionalProperties": False,
    }
    of_groups = {name: schema for name, schema in groups.items() if "properties" in schema}
    of_groups |= dict.fromkeys(("config", "experiment", "local"), whole)
    return {name: schema | {"$defs": definitions} for name, schema in of_groups.items()}


def group_schema(name: str, kind: Any) -> Schema:
    """Return the schema of a group or key; its definitions are those of pydantic."""
    if name in GROUPS:
        registry = GROUPS[name]
        kinds = {choice: keys_of(registry, choice) for choice in registry}
        kinds |= {registry.keyword: DraftConfig} if registry is DRAFTS else {}
        return _chosen(registry.attribute, {choice: _of(kind) for choice, kind in kinds.items()})
    if kind == Scenario:
        return _chosen("name", {scenario: _of(keys) for scenario, keys in SCENARIOS.items()})
    if name == "attention":
        return {"enum": [BACKENDS.keyword, *BACKENDS]}
    return _of(kind)


def _chosen(attribute: str, choices: dict[str, Schema]) -> Schema:
    """Return the schema of a group whose keys depend on what `attribute` chooses."""
    properties: Schema = {key: {} for schema in choices.values() for key in schema["properties"]}
    rules: list[Schema] = []
    definitions: Schema = {}
    for choice, schema in choices.items():
        definitions |= schema.pop("$defs", {})
        of_choice = {"properties": {attribute: {"const": choice}}, "required": [attribute]}
        schema["properties"][attribute] = {"const": choice}
        rules.append({"if": of_choice, "then": schema})
    properties[attribute] = {"enum": [*choices]}
    whole = {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "allOf": rules,
    }
    return whole | {"$defs": definitions}


def _of(kind: Any) -> Schema:
    """Return pydantic's schema, with what Hydra admits."""
    return _open(TypeAdapter(kind).json_schema())


def _open(schema: Schema) -> Schema:
    """Return a schema whose keys may all be missing, or come later."""
    opened = {
        key: value for key, value in schema.items() if key not in ("required", "default", "title")
    }
    if "properties" in opened:
        opened["properties"] = {
            key: {"anyOf": [_open(schema), LATER]} for key, schema in opened["properties"].items()
        }
        opened["properties"]["defaults"] = DEFAULTS
    if "architecture" in opened.get("properties", {}):  # the name of a config.json, too
        opened["properties"]["architecture"]["anyOf"].append({"type": "string"})
    if "$defs" in opened:
        opened["$defs"] = {name: _open(schema) for name, schema in opened["$defs"].items()}
    return opened
