"""Architectures by name, straight from conf/target/*.yaml, without Hydra: for tables and plots."""

from functools import cache
from pathlib import Path

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
    scaling = values.pop("rope_scaling", None)
    return ModelConfig(rope_scaling=scaling and RopeScaling(**scaling), **values)
