"""Load and validate a configuration that Hydra has composed, or compose one."""

import re
from collections.abc import Sequence
from dataclasses import MISSING as NO_DEFAULT
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

from magicdec import plugins
from magicdec.config.checks import validate
from magicdec.config.explain import explain
from magicdec.config.schema import CONF, REGISTRIES, Config
from magicdec.drafting import DraftConfig
from magicdec.errors import UserError
from magicdec.policies import CacheConfig
from magicdec.registry import EngineConfig

BASES = {"cache": CacheConfig, "draft": DraftConfig, "engine": EngineConfig}
Choices = tuple[tuple[str, type], ...]  # the class of each of these groups, by key


@cache
def _mutable(frozen: type, choices: Choices, prefix: str = "") -> type:
    """Return a dataclass with the fields and defaults of a frozen one: OmegaConf merges into no frozen node."""
    entries: list[tuple[str, Any, Any]] = []
    hints = get_type_hints(frozen)
    for entry in fields(frozen):
        hint, default = _node(hints[entry.name], choices, prefix + entry.name), entry.default
        value: Any
        if default == () or entry.default_factory is list:
            value = field(default_factory=list)
        elif isinstance(hint, type) and is_dataclass(hint):
            value = field(default_factory=hint)
        else:
            value = field(default=MISSING if default is NO_DEFAULT else default)
        entries.append((entry.name, hint, value))
    name = "_".join([frozen.__name__, *prefix.split("."), *(chosen.__name__ for _, chosen in choices)])
    mutable = make_dataclass(name, entries, namespace={"frozen": frozen, "__module__": __name__})
    globals()[name] = mutable  # where pickle looks for it: launchers send configurations to other processes
    return mutable


def _node(hint: Any, choices: Choices, key: str) -> Any:
    """Return the type of a field as OmegaConf takes it: nested dataclasses mutable, tuples as lists."""
    if isinstance(hint, type) and is_dataclass(hint):
        chosen = dict(choices).get(key, hint)
        return dict[str, Any] if chosen is dict else _mutable(chosen, choices, f"{key}.")
    if get_origin(hint) is tuple:
        return GenericAlias(list, get_args(hint)[0])
    if isinstance(hint, UnionType):
        return reduce(or_, (_node(part, choices, key) for part in get_args(hint)))
    return hint


def _all_options() -> Choices:
    """Return for each group a class with the keys of all its options: Hydra composes before the choice is known."""
    found: list[tuple[str, type]] = [("draft.cache", dict)]
    for key, base in BASES.items():
        own = [(entry.name, entry.type, entry) for entry in REGISTRIES[key].own_fields().values()]
        found.append((key, make_dataclass(base.__name__, own, bases=(base,), frozen=True)))
    return tuple(found)


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


SCHEMA = OmegaConf.structured(_mutable(Config, _all_options()))
for group in ("cache", "draft", "engine"):
    OmegaConf.set_struct(SCHEMA[group], False)  # plugins, whose options have other keys, are imported by `load`
ConfigStore.instance().store(name="schema", node=SCHEMA)
OmegaConf.register_new_resolver("conf_parent", lambda: str(CONF.parent), replace=True)  # of conf/config.yaml


def load(cfg: DictConfig) -> Config:
    """Return a composed configuration as typed, valid and frozen objects.

    Import plugins first. Leave out keys of options that are not chosen. Raise UserError for what `validate` finds, and
    OmegaConf's errors for unknown keys, wrong types and missing values.
    """
    plugins.load(cfg.plugins)
    given: Any = OmegaConf.to_container(cfg)
    choices = []
    for key, registry in REGISTRIES.items():
        if (group := _at(cfg, key)) is None:
            continue
        name = group[registry.attribute]
        facts = DraftConfig if key == "draft" and name == "none" else registry[name].facts
        choices.append((key, facts))
        plain, known = _at(given, key), {entry.name for entry in fields(facts)}
        for unread in registry.own_fields().keys() - known:
            plain.pop(unread, None)
    schema = OmegaConf.structured(_mutable(Config, tuple(choices)))
    config: Config = _frozen(OmegaConf.to_object(OmegaConf.merge(schema, given)))
    validate(config)
    return config


def _at(values: Any, key: str) -> Any:
    return reduce(lambda node, name: node and node.get(name), key.split("."), values)


def compose(overrides: Sequence[str]) -> Config:
    """Return conf/ with these overrides, for programs without Hydra's command line. Raise UserError for mistakes."""
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            cfg = hydra.compose("config", list(overrides), return_hydra_config=True)
        with open_dict(cfg):
            grid = cfg.pop("hydra").runtime.choices.get("sweeps")
        if grid:
            raise UserError(f"+sweeps={grid}: a grid needs the command line, as in magicdec -m +sweeps={grid}")
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
    """Return plain nested dictionaries, as stored with a run: with the defaults of what other built-in options have."""
    plain = asdict(config)
    for key, registry in REGISTRIES.items():
        if (group := _at(plain, key)) is not None:
            for name, entry in registry.own_fields(built_in=True).items():
                group.setdefault(name, entry.default)
    return plain
