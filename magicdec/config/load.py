"""Load and validate a configuration that Hydra has composed, or compose one."""

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import hydra
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from magicdec.config.checks import validate
from magicdec.config.schema import CONF, Config
from magicdec.errors import UserError
from magicdec.rules import has_unknown_keys

ConfigStore.instance().store(name="schema", node=Config)


def load(cfg: DictConfig) -> Config:
    """A composed configuration as typed and valid objects.

    Raises UserError for what `validate` finds, and OmegaConf's errors for unknown keys, wrong types and missing values.
    """
    config = OmegaConf.to_object(cfg)
    if not isinstance(config, Config) or has_unknown_keys(config):  # plain YAML; a + on the command line
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.to_container(cfg)))
    assert isinstance(config, Config)
    validate(config)
    return config


def compose(overrides: Sequence[str]) -> Config:
    """conf/ with these overrides, for programs that have a command line of their own. UserError for any mistake."""
    os.environ["MAGICDEC_ROOT"] = str(CONF.parent)  # conf/config.yaml finds sweeps/ by it
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return load(hydra.compose("config", list(overrides)))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(str(error).strip().partition("\n")[0]) from error


def to_dict(config: Config) -> dict[str, Any]:
    """Plain nested dictionaries."""
    return asdict(config)
