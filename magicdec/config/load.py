"""Load and validate a configuration that Hydra has composed, or compose one."""

import dataclasses
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, field, fields, is_dataclass, make_dataclass
from functools import cache, reduce
from operator import or_
from types import GenericAlias, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import hydra
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict

from magicdec.config.checks import validate
from magicdec.config.explain import explain
from magicdec.config.schema import CONF, Config
from magicdec.errors import UserError
from magicdec.rules import has_unknown_keys


@cache
def _mutable(frozen: type) -> type:
    """Return a dataclass with the fields and defaults of a frozen one: OmegaConf merges into no frozen node."""
    entries: list[tuple[str, Any, Any]] = []
    hints = get_type_hints(frozen)
    for entry in fields(frozen):
        hint, default, factory = _node(hints[entry.name]), entry.default, entry.default_factory
        if default == () or factory is list:
            value = field(default_factory=list)
        elif is_dataclass(factory):
            value = field(default_factory=hint)
        else:
            value = field(default=MISSING if default is dataclasses.MISSING else default)
        entries.append((entry.name, hint, value))
    mutable = make_dataclass(f"{frozen.__name__}Node", entries, namespace={"frozen": frozen, "__module__": __name__})
    globals()[mutable.__name__] = mutable  # where pickle looks for it: launchers send configurations to other processes
    return mutable


def _node(hint: Any) -> Any:
    """Return the type of a field as OmegaConf takes it: nested dataclasses mutable, tuples as lists."""
    if isinstance(hint, type) and is_dataclass(hint):
        return _mutable(hint)
    if get_origin(hint) is tuple:
        return GenericAlias(list, get_args(hint)[0])
    return reduce(or_, map(_node, get_args(hint))) if isinstance(hint, UnionType) else hint


def _frozen(node: Any, key: str = "") -> Any:
    """Return the frozen dataclass of a mutable one, and of those in it; raise UserError for what it refuses."""
    values = dict(vars(node))
    for name, value in values.items():
        if is_dataclass(value):
            values[name] = _frozen(value, f"{key}.{name}")
    try:
        return node.frozen(**values)
    except UserError as error:
        raise UserError(f"{key[1:]}: {error}") from None


SCHEMA = _mutable(Config)
ConfigStore.instance().store(name="schema", node=SCHEMA)


def load(cfg: DictConfig) -> Config:
    """Return a composed configuration as typed, valid and frozen objects.

    Raise UserError for what `validate` finds, and OmegaConf's errors for unknown keys, wrong types and missing values.
    """
    given = OmegaConf.to_object(cfg)
    if not isinstance(given, SCHEMA) or has_unknown_keys(given):  # plain YAML; a + on the command line
        given = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(SCHEMA), OmegaConf.to_container(cfg)))
    config: Config = _frozen(given)
    validate(config)
    return config


def compose(overrides: Sequence[str]) -> Config:
    """Return conf/ with these overrides, for programs without Hydra's command line. Raise UserError for mistakes."""
    os.environ["MAGICDEC_ROOT"] = str(CONF.parent)  # conf/config.yaml finds sweeps/ by it
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            cfg = hydra.compose("config", list(overrides), return_hydra_config=True)
        with open_dict(cfg):
            grid = cfg.pop("hydra").runtime.choices.get("sweeps")
        if grid:
            raise UserError(f"+sweeps={grid}: a grid needs the command line, as in python launch.py -m +sweeps={grid}")
        return load(cfg)
    except Exception as error:
        explanation = explain(error, list(overrides))
        if explanation is None:
            raise
        raise UserError(" ".join(explanation.split())) from None


def override(key: str, value: Any) -> str:
    """Return KEY=VALUE as it is typed on the command line."""
    if isinstance(value, str):
        plain = re.fullmatch(r"[\w.:/-]+", value)
        return f"{key}={value if plain else QuotedString(value, Quote.single).with_quotes()}"
    return f"{key}={list(value) if isinstance(value, Sequence) else value}"


def to_dict(config: Config) -> dict[str, Any]:
    """Plain nested dictionaries."""
    return asdict(config)
