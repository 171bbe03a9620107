"""Hydra's launcher of all jobs in one process, without composing every job from its files again.

Hydra composes each job of a sweep twice, before the first one starts and when its turn comes, and either takes longer
than a prediction does. But most jobs choose the same options, and differ in a few values alone.
"""

import copy
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from hydra._internal.config_loader_impl import get_overrides_dirname
from hydra._internal.core_plugins import basic_launcher
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.utils import JobReturn
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf


class Composer:
    """Hydra's config loader, which composes each choice of options once; its copies get the jobs' own values."""

    def __init__(self, loader: ConfigLoader):
        self.loader = loader
        self.composed: dict[tuple[str, ...], DictConfig] = {}

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: Sequence[str]) -> DictConfig:
        """What Hydra makes of a job's overrides."""
        with suppress(Exception):
            overrides = [_parsed(text) for text in sweep_overrides]
            if all(_sets_value(override) or _chooses(override) for override in overrides):
                return self._copy(master_config, overrides)
        return self.loader.load_sweep_config(master_config, list(sweep_overrides))  # which says what is wrong

    def _copy(self, master_config: DictConfig, overrides: list[Override]) -> DictConfig:
        """As Hydra does it: options first, then values in their order, then what they were is noted."""
        options = tuple(str(override.input_line) for override in overrides if _chooses(override))
        if options not in self.composed:
            self.composed[options] = self.loader.load_sweep_config(master_config, list(options))
        config = copy.deepcopy(self.composed[options])
        for override in filter(_sets_value, overrides):
            OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
        own = [override for override in overrides if not override.is_hydra_override()]
        config.hydra.overrides.task = [override.input_line for override in own]
        config.hydra.job.override_dirname = get_overrides_dirname(own, **config.hydra.job.config.override_dirname)
        OmegaConf.copy_cache(from_config=master_config, to_config=config)
        return config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


@cache
def _parsed(text: str) -> Override:
    return OverridesParser.create().parse_override(text)


def _sets_value(override: Override) -> bool:
    """Whether it is of the form key.key=value."""
    is_one = override.type == OverrideType.CHANGE and not override.package and not override.is_sweep_override()
    return is_one and "." in override.key_or_group and not override.is_hydra_override()


def _chooses(override: Override) -> bool:
    """Whether it chooses an option, or sets what has no keys of its own: it may as well come before all values."""
    whole = "." not in override.key_or_group and not isinstance(override.value(), dict)
    return override.is_hydra_override() or (whole and override.type in (OverrideType.CHANGE, OverrideType.ADD))


class BasicLauncher(basic_launcher.BasicLauncher):
    """hydra/launcher=basic."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Called before the sweeper composes."""
        hydra_context.config_loader = Composer(hydra_context.config_loader)  # type: ignore[assignment]
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)


def list_jobs(
    context: HydraContext, task: TaskFunction, config: DictConfig, job_overrides: Sequence[Sequence[str]], first: int
) -> Sequence[JobReturn]:
    """A dry run of any launcher's: a line a job takes no process of its own, nor another machine."""
    basic_launcher.log.setLevel(logging.WARNING)  # the list says it all
    basic = BasicLauncher()
    basic.setup(hydra_context=context, task_function=task, config=config)
    return basic.launch(job_overrides, first)


@dataclass
class BasicLauncherConf:
    """hydra/launcher=basic, in place of Hydra's own."""

    _target_: str = "hydra_plugins.basic_launcher.BasicLauncher"


ConfigStore.instance().store(group="hydra/launcher", name="basic", node=BasicLauncherConf)
