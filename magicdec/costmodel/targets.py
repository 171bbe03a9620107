"""Architectures by name, straight from conf/target/*.yaml, without Hydra: for tables and plots."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import yaml

from magicdec.architectures import ModelConfig, RopeScaling
from magicdec.config.schema import CONF
from magicdec.errors import UserError

TARGETS = CONF / "target"


@cache
def option(name: str) -> dict[str, Any]:
    """Return what conf/target/NAME.yaml holds, {} where there is none."""
    path = TARGETS / f"{name}.yaml"
    return yaml.safe_load(path.read_text()) if path.is_file() else {}


def options() -> list[dict[str, Any]]:
    """Return what every file in conf/target holds."""
    return [option(path.stem) for path in sorted(TARGETS.glob("*.yaml"))]


@cache
def architecture(name: str) -> ModelConfig:
    """Return the architecture that conf/target/NAME.yaml describes; raise UserError where there is none."""
    values = option(name).get("architecture")
    if not values:
        known = ", ".join(sorted(p.stem for p in TARGETS.glob("*.yaml")))
        raise UserError(f"target={name} has no architecture in {TARGETS}; one of: {known or 'none found'}")
    return from_values(values)


def from_values(values: Mapping[str, Any]) -> ModelConfig:
    """Return the architecture that a configuration describes."""
    scaling = values.get("rope_scaling")
    return ModelConfig(**{**values, "rope_scaling": scaling and RopeScaling(**scaling)})
