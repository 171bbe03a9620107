"""The options of conf/ without Hydra: what they set, and their keys, so that a wrong one is refused before PyTorch is
imported.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from pydantic import TypeAdapter

from magicdec.architectures import ModelConfig
from magicdec.config.registry import PACKAGE
from magicdec.config.schema import CONF, Config, option_file, own_folders
from magicdec.errors import UserError
from magicdec.hugging_face import from_hugging_face

# Groups whose options differ in their keys.
OPEN = ("cache", "draft", "engine", "scenario", "data")


def values_of(group: str, option: str) -> dict[str, Any]:
    """Return what an option sets, with what its defaults add; {} if it has no file."""
    file = option_file(group, option)
    return _values(file) if file else {}


@cache
def _values(file: Path) -> dict[str, Any]:
    """Return what a file sets, after what its defaults do: its base, or as in /target@model: tiny."""
    own: dict[str, Any] = yaml.safe_load(file.read_text("utf-8")) or {}
    values: dict[str, Any] = {}
    for default in own.pop("defaults", []):
        if isinstance(default, dict):
            places = {name.lstrip("/").partition("@"): option for name, option in default.items()}
            values |= {key: values_of(group, option) for (group, _, key), option in places.items() if " " not in group}
        elif default != "_self_":
            values |= values_of(file.parent.name, default)
    if isinstance(name := own.get("architecture"), str):
        own["architecture"] = architecture_of(name, file)
    return values | own


@cache
def architecture_of(name: str, file: Path) -> dict[str, Any]:
    """Return the architecture of an option: that of the config.json, next to `file` or in the package, which it names.

    Raise UserError for a file that is missing or broken. Which tokens end a sequence is for the checkpoint to say.
    """
    for path in (file.parent / name, PACKAGE.parent / name):
        if path.is_file():
            try:
                content = json.loads(path.read_bytes())
            except ValueError as error:
                raise UserError(f"{path} is not valid JSON ({error})") from None
            found = replace(from_hugging_face(content, str(path)), eos_token_ids=())
            return TypeAdapter(ModelConfig).dump_python(found, mode="json")
    raise UserError(f"{file}: architecture={name}: no such file next to it; name a config.json, or null")


def keys_of_group(group: str) -> set[str]:
    """Return the keys of all options of an open group."""
    files = (file for folder in (CONF, *own_folders()) for file in (folder / group).glob("*.yaml"))
    return {key for file in files for key in _values(file)}


def has_key(group: str, option: str, key: str) -> bool:
    """Return whether an option has a key; one without a file, as in a plugin's test, is taken to have any."""
    values = values_of(group, option)
    return not values or key in values


def known_keys() -> Iterator[str]:
    """Yield every key of the configuration, dotted; those of all options."""
    yield from _known(Config, "")
    for group in OPEN:
        yield from (f"{group}.{key}" for key in sorted(keys_of_group(group)))
    yield from (f"draft.cache.{key}" for key in sorted(keys_of_group("cache")))
    yield from (f"draft.model.{key.removeprefix('target.')}" for key in _known(Config, "") if key.startswith("target."))


def _known(kind: type, prefix: str) -> Iterator[str]:
    for name, hint in get_type_hints(kind).items():
        yield prefix + name
        for inner in (hint, *get_args(hint)):
            if name not in OPEN and isinstance(inner, type) and "__dataclass_fields__" in vars(inner):
                yield from _known(inner, f"{prefix}{name}.")
