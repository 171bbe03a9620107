"""The options of conf/ without Hydra: what they set, the keys of a group, and the architectures
that they name.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from pydantic import TypeAdapter

from magicdec.architectures.hugging_face import from_hugging_face
from magicdec.architectures.model_config import ModelConfig
from magicdec.config import registry
from magicdec.config.folders import CONF, option_file, own_folders
from magicdec.config.registry import PACKAGE
from magicdec.config.scenario_settings import SCENARIOS
from magicdec.config.schema import Config
from magicdec.errors import Unsupported, UserError, in_one_line
from magicdec.inputs.rules import parse_json

# Groups whose options differ in their keys.
OPEN = (*registry.GROUPS, "scenario")


def values_of(group: str, option: str) -> dict[str, Any]:
    """Return what an option sets, with what its defaults add; {} if it has no file."""
    file = option_file(group, option)
    return values_in(file) if file else {}


@cache
def values_in(file: Path) -> dict[str, Any]:
    """Return what a file sets, after what its defaults do: its base, or as in /target@model:
    tiny.
    """
    content = _content(file)
    values: dict[str, Any] = {}
    for default in content.pop("defaults", None) or ():
        if isinstance(default, dict):
            for place, option in default.items():
                group, _, key = place.lstrip("/").partition("@")
                if " " not in group:  # an override of another group
                    values[key] = values_of(group, option)
        elif default != "_self_":
            values |= values_of(file.parent.name, default)
    if isinstance(name := content.get("architecture"), str):
        content |= architecture_of(name, [file.parent], str(file))
    return merged(values, content)


def _content(file: Path) -> dict[str, Any]:
    """Return the content of a YAML file. Raise UserError for one that is broken."""
    try:
        content = yaml.safe_load(file.read_text("utf-8")) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(unreadable(str(file), error)) from None
    if not isinstance(content, dict):
        raise UserError(f"{file}: must hold keys and values")
    return content


def unreadable(file: str, error: Exception) -> str:
    """Return the line about a YAML file that cannot be read."""
    if isinstance(error, RecursionError):
        return f"{file}: nested too deeply"
    mark = getattr(error, "problem_mark", None)
    if isinstance(error, yaml.MarkedYAMLError) and mark:
        return f"{file}, line {mark.line + 1}: {error.problem}"
    return f"{file}: {in_one_line(error)}"


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of both; where both have a dictionary, that of both again."""
    result = dict(base)
    for key, value in changes.items():
        before = result.get(key)
        are_both_nested = isinstance(before, Mapping) and isinstance(value, Mapping)
        result[key] = merged(before, value) if are_both_nested else value  # type: ignore[arg-type]
    return result


def architecture_of(name: str, folders: Iterable[Path], where: str) -> dict[str, Any]:
    """Return the keys of a model that a config.json gives, by its name in one of these folders, or
    its path in the package: its architecture or, of a model that our own transformer does not
    cover, the path of the file.

    Raise UserError, which begins with `where`, for a file that is missing or broken. Which tokens
    end a sequence is for the checkpoint to say.
    """
    for path in (*(folder / name for folder in folders), PACKAGE.parent / name):
        if path.is_file():
            try:
                return {"architecture": dict(_architecture_in(path))}
            except Unsupported:
                return {"architecture": None, "config_file": str(path)}
    advice = "no such file next to it; name a config.json, or null"
    raise UserError(f"{where}: architecture={name}: {advice}")


@cache
def _architecture_in(path: Path) -> dict[str, Any]:
    content = parse_json(dict[str, Any], path.read_bytes(), where=str(path))
    architecture = replace(from_hugging_face(content, str(path)), eos_token_ids=())
    return TypeAdapter(ModelConfig).dump_python(architecture, mode="json")


def complete_model(
    model: dict[str, Any], option: str | None, sources: Sequence[Path], key: str
) -> None:
    """Fill in the architecture of a composed model: that of the file it names, and what was changed
    of it.

    `option` is that of the group `target` it was composed from, `sources` the folders that have
    such groups, and `key` the model's own.
    """
    given = model.get("architecture")
    places = [source / "target" for source in sources]
    files = (place / f"{option}.yaml" for place in places)
    file = next((file for file in files if file.is_file()), None)
    if isinstance(given, str):
        model |= architecture_of(given, places, str(file or key))
    elif isinstance(given, dict) and file:
        original = values_in(file).get("architecture") or {}
        model["architecture"] = merged(original, given)


def keys_of_group(group: str) -> set[str]:
    """Return the keys of an open group that are known without PyTorch.

    These are the keys that all choices have, those of the choices that were imported so far, and
    those that readable files set.
    """
    if group == "scenario":
        return {entry.name for keys in SCENARIOS.values() for entry in fields(keys)}
    facts = registry.GROUPS[group].imported()
    classes = [registry.COMMON[group], *map(registry.class_of_keys, facts)]
    keys = {entry.name for keys in classes for entry in fields(keys)}
    for folder in (CONF, *own_folders()):
        for file in (folder / group).glob("*.yaml"):
            with suppress(UserError):  # nobody has chosen it
                keys |= values_in(file).keys()
    return keys


def is_known(group: str, key: str) -> bool:
    """Return whether any choice of an open group has a key. Files are read only for those that not
    all choices have.
    """
    common = registry.COMMON.get(group)
    if common and key in (entry.name for entry in fields(common)):
        return True
    return key in keys_of_group(group)


def read_keys(group: str, choice: str) -> set[str]:
    """Return the keys of an open group that have an effect with a choice. Import its module.

    Raise UserError if there is no such choice.
    """
    if group == "scenario":
        return {entry.name for entry in fields(SCENARIOS[choice])}
    return registry.read_keys(group, choice)


def known_keys() -> Iterator[str]:
    """Yield every key of the configuration, dotted; those of all options."""
    yield from _known(Config, "")
    for group in OPEN:
        yield from (f"{group}.{key}" for key in sorted(keys_of_group(group)))
    yield from (f"draft.cache.{key}" for key in sorted(keys_of_group("cache")))
    targets = (key for key in _known(Config, "") if key.startswith("target."))
    yield from (f"draft.model.{key.removeprefix('target.')}" for key in targets)


def _known(kind: type, prefix: str) -> Iterator[str]:
    for name, hint in get_type_hints(kind).items():
        yield prefix + name
        for inner in (hint, *get_args(hint)):
            is_group = isinstance(inner, type) and "__dataclass_fields__" in vars(inner)
            if name not in OPEN and is_group:
                yield from _known(inner, f"{prefix}{name}.")
