"""Compose a configuration, and turn it into typed, frozen objects.

Hydra composes plain YAML and knows no types: the result is validated once, as a whole, by pydantic.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from pathlib import PurePath
from typing import Any, get_type_hints

import hydra
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf, open_dict

from magicdec import plugins
from magicdec.config.checks import refuse_secrets, validate
from magicdec.config.explain import explain, located, unknown_key
from magicdec.config.options import OPEN, has_key, keys_of_group
from magicdec.config.schema import CONF, Config
from magicdec.errors import UserError
from magicdec.rules import BadValue, parse

# Hydra takes any key in the groups: jobs of a sweep over a group's options may set keys of all of them.
SCHEMA = OmegaConf.create({key: {} for key, of in get_type_hints(Config).items() if is_dataclass(of) or key in OPEN})
for group in SCHEMA:
    OmegaConf.set_struct(SCHEMA[group], False)
ConfigStore.instance().store(name="schema", node=SCHEMA)
OmegaConf.register_new_resolver("conf_parent", lambda: str(CONF.parent), replace=True)  # of conf/config.yaml


def _head_name(path: str | None, bundled: str) -> str:
    """Return the last part of a head's path; for the head that ships with its target, the name `bundled`."""
    return bundled if path is None or path.startswith("magicdec/models/") else PurePath(path).name


OmegaConf.register_new_resolver("head_name", _head_name, replace=True)  # of conf/draft/eagle3.yaml


def load(cfg: DictConfig) -> Config:
    """Return a composed configuration as typed, valid and frozen objects.

    Import plugins first. Leave out keys of options that are not chosen. Raise UserError for unknown keys, wrong types,
    and what `validate` finds, and OmegaConf's errors for missing values.
    """
    plain: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    plain.pop("hydra", None)
    refuse_secrets(plain)
    for name in OPEN:
        _keep_own_keys(plain[name], name, name)
    if plain["draft"].get("cache"):
        _keep_own_keys(plain["draft"]["cache"], "cache", "draft.cache")
    plugins.load(plain.get("plugins") or [])
    try:
        config = parse(Config, plain)
    except BadValue as error:
        raise UserError(located(error)) from None
    validate(config)
    return config


def _keep_own_keys(plain: dict[str, Any], group: str, key: str) -> None:
    """Leave out the keys of other options; raise UserError for those of none."""
    chooses = "policy" if group == "cache" else "name"
    option = plain.get(chooses)
    for name in list(plain):
        if name not in keys_of_group(group):
            raise UserError(unknown_key(f"{key}.{name}"))
        if option is not None and not has_key(group, str(option), name):
            del plain[name]


def compose(overrides: Sequence[str]) -> Config:
    """Return conf/ with these overrides, for programs without Hydra's command line. Raise UserError for mistakes."""
    try:
        refuse_secrets(list(overrides))
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
    """Return plain nested dictionaries, as stored with a run."""
    return asdict(config)
