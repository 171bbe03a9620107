"""Hydra's own sweeper of a grid, which also refuses a grid that is too large to be listed."""

import math
from collections.abc import Iterable
from itertools import islice
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper, BasicSweeperConf
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override, RangeSweep
from typing_extensions import override

from hydra_plugins.job_groups import with_groups
from magicdec.errors import UserError

MOST_JOBS = 10_000  # Hydra composes each of them before it starts the first


class GridSweeper(BasicSweeper):
    """hydra/sweeper=basic: a job for every combination of values."""

    def setup(self, **given: Any) -> None:
        """Take the sweep's configuration, and its launcher with the groups of jobs that share a prefill."""
        super().setup(**given)
        assert self.launcher is not None
        self.launcher = with_groups(self.launcher, **given)

    @staticmethod
    @override
    def split_arguments(overrides: list[Override], max_batch_size: int | None) -> list[list[list[str]]]:
        """Return the jobs. Raise UserError for a grid of more than MOST_JOBS."""
        sizes = {override.get_key_element(): _size(override) for override in overrides if override.is_discrete_sweep()}
        if math.prod(sizes.values()) > MOST_JOBS:
            axes = ", ".join(f"{key}: {size:,}" for key, size in sizes.items())
            raise UserError(f"-m: a grid of {axes} values has more than {MOST_JOBS:,} jobs; choose fewer")
        return BasicSweeper.split_arguments(overrides, max_batch_size)


def _size(override: Override) -> int:
    """Return the number of values that an override sweeps over, counted up to MOST_JOBS + 1."""
    value: Any = override.value()
    values: Iterable[Any] = value.range() if isinstance(value, RangeSweep) else override.sweep_iterator()
    return sum(1 for _ in islice(values, MOST_JOBS + 1))


node = BasicSweeperConf(_target_=f"{GridSweeper.__module__}.{GridSweeper.__name__}")
ConfigStore.instance().store(group="hydra/sweeper", name="basic", node=node, provider="magicdec")
