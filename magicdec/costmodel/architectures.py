"""Architectures by name, straight from conf/target/*.yaml, without Hydra: for tables and plots."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from magicdec.errors import UserError
from magicdec.models.config import ModelConfig, RopeScaling

TARGETS = Path(__file__).parents[2] / "conf" / "target"


@cache
def architecture(name: str) -> ModelConfig:
    """The architecture that conf/target/NAME.yaml describes. Raises UserError where there is none."""
    path = TARGETS / f"{name}.yaml"
    values = (yaml.safe_load(path.read_text()) if path.is_file() else {}).get("architecture")
    if not values:
        known = ", ".join(sorted(p.stem for p in TARGETS.glob("*.yaml")))
        raise UserError(f"target={name} has no architecture in {TARGETS}; one of: {known or 'none found'}")
    return from_values(values)


def from_values(values: Mapping[str, Any]) -> ModelConfig:
    """An architecture as a configuration writes it."""
    scaling = values.get("rope_scaling")
    return ModelConfig(**{**values, "rope_scaling": scaling and RopeScaling(**scaling)})
