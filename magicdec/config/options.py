"""The keys of conf/, as its YAML has them: a wrong key is refused before anything of PyTorch is imported."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

from magicdec.config.schema import CONF, Config, option_file, own_folders

# Groups whose options differ in their keys.
OPEN = ("cache", "draft", "engine", "scenario", "data")


@cache
def keys_of_option(file: Path) -> frozenset[str]:
    """Return the keys of an option, with those that its defaults add: of its base, or as in /target@model: tiny."""
    option: dict[str, Any] = yaml.safe_load(file.read_text("utf-8")) or {}
    keys = set(option) - {"defaults"}
    for default in option.get("defaults", []):
        if isinstance(default, dict):
            keys |= {name.partition("@")[2] for name in default if not name.startswith("override ")}
        elif default != "_self_":
            base = option_file(file.parent.name, default)
            keys |= keys_of_option(base) if base else set()
    return frozenset(keys)


def keys_of_group(group: str) -> set[str]:
    """Return the keys of all options of an open group."""
    files = (file for folder in (CONF, *own_folders()) for file in (folder / group).glob("*.yaml"))
    return {key for file in files for key in keys_of_option(file)}


def has_key(group: str, option: str, key: str) -> bool:
    """Return whether an option has a key; one without a file, as in a plugin's test, is taken to have any."""
    file = option_file(group, option)
    return file is None or key in keys_of_option(file)


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
