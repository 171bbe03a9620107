"""Compose a configuration, and turn it into typed, frozen objects.

Hydra composes plain YAML and knows no types: the result is validated once, as a whole, by pydantic.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path, PurePath
from typing import Any, get_type_hints

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf, open_dict

from magicdec.config.checks import refuse_secrets, validate
from magicdec.config.explain import explain, located, unknown_key
from magicdec.config.folders import CONF, own_folders
from magicdec.config.hydra_versions import initialized, register_resolver
from magicdec.config.options import OPEN, complete_model, is_known, read_keys
from magicdec.config.schema import Config
from magicdec.config.search_path import add_own_options
from magicdec.errors import UserError
from magicdec.inputs import plugins
from magicdec.inputs.rules import BadValue, parse

# Hydra takes any key in the groups: jobs of a sweep over a group's options may set keys of all of
# them.
NAMES = [key for key, of in get_type_hints(Config).items() if is_dataclass(of) or key in OPEN]
SCHEMA = OmegaConf.create({name: {} for name in NAMES})
for group in SCHEMA:
    OmegaConf.set_struct(SCHEMA[group], False)
ConfigStore.instance().store(name="magicdec_schema", node=SCHEMA, provider="magicdec")
# Texts that Hydra's grammar reads as they are: it has no letters but those of ASCII.
PLAIN = re.compile(r"[A-Za-z_/][\w.:/-]*", re.ASCII)
NO_TEXTS = ("null", "true", "false", "inf", "nan")  # in whatever case


def _head_name(path: str | None, bundled: str) -> str:
    """Return the last part of a head's path; for the head that ships with its target, the name
    `bundled`.
    """
    return bundled if path is None or path.startswith("magicdec/models/") else PurePath(path).name


register_resolver("magicdec.conf", lambda: str(CONF))  # of conf/config.yaml and conf/hydra/help
register_resolver("magicdec.head_name", _head_name)  # of conf/draft/eagle3.yaml


def load(cfg: DictConfig, hydra_cfg: DictConfig | None = None) -> Config:
    """Return a composed configuration as typed, valid and frozen objects.

    `hydra_cfg` is Hydra's own part of it: what was typed, which options were chosen, and where they
    are. Import plugins first. Leave out keys of options that are not chosen. Raise UserError for
    unknown keys, wrong types, and what `validate` finds, and OmegaConf's errors for missing values.
    """
    plain: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    refuse_secrets(plain)
    plugins.load(plain.get("plugins") or [])
    if hydra_cfg is not None:
        _refuse_unknown(hydra_cfg.overrides.task)
    _complete_models(plain, hydra_cfg)
    for group in OPEN:
        _keep_own_keys(plain[group], group, group)
    if isinstance(inner := plain["draft"].get("cache"), dict):
        _keep_own_keys(inner, "cache", "draft.cache")
    try:
        config = parse(Config, plain)
    except BadValue as error:
        raise UserError(located(error, hydra_cfg)) from None
    validate(config)
    return config


def _refuse_unknown(typed: Sequence[str]) -> None:
    """Raise UserError for a typed key that no option has. What follows imports PyTorch, and finds
    the others.
    """
    for text in typed:
        key = text.lstrip("+~").partition("=")[0]
        group, _, name = key.removeprefix("draft.cache.").partition(".")
        if key.startswith("draft.cache."):
            group, name = "cache", group
        name = name.partition(".")[0]
        if group in OPEN and name and not is_known(group, name):
            raise UserError(unknown_key(key))


def _complete_models(plain: dict[str, Any], hydra_cfg: DictConfig | None) -> None:
    """Replace names of config.json files by the architectures in them."""
    runtime = None if hydra_cfg is None else hydra_cfg.runtime
    sources = [CONF, *own_folders()]
    if runtime is not None:
        sources = [Path(each.path) for each in runtime.config_sources if each.schema == "file"]
    for key, choice in (("target", "target"), ("draft.model", "target@draft.model")):
        group, _, name = key.partition(".")
        model = plain[group].get(name) if name else plain[group]
        if isinstance(model, dict):
            option = None if runtime is None else runtime.choices.get(choice)
            complete_model(model, option, sources, key)


def _keep_own_keys(plain: dict[str, Any], group: str, key: str) -> None:
    """Leave out the keys that only other options have; raise UserError for those of none."""
    choice = plain.get("policy" if group == "cache" else "name")
    if not isinstance(choice, str):  # which is refused where all values are checked
        return
    try:
        read = read_keys(group, choice)
    except KeyError:  # no such scenario
        return
    for name in list(plain):
        if name in read:
            continue
        if not is_known(group, name):
            raise UserError(unknown_key(f"{key}.{name}"))
        del plain[name]


def compose(overrides: Sequence[str]) -> Config:
    """Return conf/ with these overrides, for programs without Hydra's command line. Raise UserError
    for mistakes.
    """
    try:
        refuse_secrets(list(overrides))
        add_own_options()
        with initialized(CONF):
            cfg = hydra.compose("config", list(overrides), return_hydra_config=True)
        with open_dict(cfg):
            hydra_cfg = cfg.pop("hydra")
        if grid := hydra_cfg.runtime.choices.get("sweeps"):
            raise UserError(
                f"+sweeps={grid}: a grid needs the command line, as in magicdec -m +sweeps={grid}"
            )
        return load(cfg, hydra_cfg)
    except Exception as error:
        explanation = explain(error, list(overrides))
        if explanation is None:
            raise
        raise UserError(" ".join(explanation.split())) from None


def override(key: str, value: Any) -> str:
    """Return KEY=VALUE as it is typed on the command line."""
    return f"{key}={_typed(value)}"


def _typed(value: Any) -> str:
    """Return a value in the grammar of Hydra's command line."""
    if isinstance(value, str):
        plain = PLAIN.fullmatch(value) and value.lower() not in NO_TEXTS
        return value if plain else QuotedString(value, Quote.single).with_quotes()
    if isinstance(value, Mapping):
        entries = [f"{key}: {_typed(inner)}" for key, inner in value.items()]
        return "{" + ", ".join(entries) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(_typed, value)) + "]"
    return "null" if value is None else str(value)


def to_dict(config: Config) -> dict[str, Any]:
    """Return plain nested dictionaries, as stored with a run."""
    return asdict(config)
