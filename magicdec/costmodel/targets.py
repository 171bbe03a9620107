"""Architectures by name, straight from the options of the group `target`, without Hydra: for tables and plots."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from magicdec.architectures import ModelConfig, RopeScaling
from magicdec.config.schema import CONF, option_file, own_folders
from magicdec.errors import UserError


def option(name: str) -> dict[str, Any]:
    """Return what conf/target/NAME.yaml holds, of the package's options or the user's; {} if there is none."""
    path = option_file("target", name)
    return _read(path) if path else {}


@cache
def _read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def options() -> list[dict[str, Any]]:
    """Return what every option holds."""
    return [option(name) for name in _names()]


def _names() -> list[str]:
    return sorted({path.stem for folder in (CONF, *own_folders()) for path in (folder / "target").glob("*.yaml")})


@cache
def architecture(name: str) -> ModelConfig:
    """Return the architecture that conf/target/NAME.yaml describes; raise UserError if there is none."""
    values = option(name).get("architecture")
    if not values:
        raise UserError(f"target={name} has no architecture in conf/target; one of: {', '.join(_names())}")
    return from_values(values)


def from_values(values: Mapping[str, Any]) -> ModelConfig:
    """Return the architecture that a configuration describes."""
    scaling = values.get("rope_scaling")
    return ModelConfig(**{**values, "rope_scaling": scaling and RopeScaling(**scaling)})
