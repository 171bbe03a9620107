"""The sweeper of grids, which gives launchers the groups of jobs that share a prefill, and its
registration.
"""

import math
from collections.abc import Iterable
from itertools import islice
from typing import Any

from hydra.core.override_parser.types import Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig, OmegaConf
from typing_extensions import override

from hydra_plugins.magicdec._groups import GroupLauncher
from hydra_plugins.magicdec._launcher import ProcessLauncher
from magicdec.config.checks import refuse_secrets
from magicdec.errors import UserError, to_stderr

# Hydra 1.3 runs the modules of its own plugins when it looks for plugins, even those that were
# imported. Import them afterwards: otherwise there are two classes of each name.
Plugins.instance()
from hydra._internal.core_plugins.basic_launcher import BasicLauncher  # noqa: E402
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper  # noqa: E402

# Launchers that group jobs themselves, or run all of them in one process.
WITHOUT_TASKS: tuple[type[Launcher], ...] = (ProcessLauncher, BasicLauncher)
MOST_JOBS = 10_000  # of a grid: Hydra composes each of them before it starts the first


def register() -> None:
    """Let Hydra find, in this process, the launcher and the sweeper that conf/hydra names."""
    for plugin in (ProcessLauncher, GridSweeper):
        Plugins.instance().register(plugin)


class GridSweeper(BasicSweeper):
    """hydra/sweeper=magicdec: a job for every combination of values."""

    def setup(self, **given: Any) -> None:
        """Take the sweep's configuration, and its launcher with the groups of jobs that share a
        prefill. Raise UserError for a secret, which Hydra would write into multirun.yaml.
        """
        plain: Any = OmegaConf.to_container(given["config"])
        refuse_secrets({group: plain[group] for group in plain if group != "hydra"})
        super().setup(**given)
        assert self.launcher is not None
        self.launcher = with_groups(self.launcher, **given)

    @staticmethod
    @override
    def split_arguments(
        overrides: list[Override], max_batch_size: int | None
    ) -> list[list[list[str]]]:
        """Return the jobs. Raise UserError for a grid of more than MOST_JOBS."""
        axes = [axis for axis in overrides if axis.is_discrete_sweep()]
        sizes = {axis.get_key_element(): _size(axis) for axis in axes}
        if math.prod(sizes.values()) > MOST_JOBS:
            listed = ", ".join(f"{key}: {size:,}" for key, size in sizes.items())
            too_many = f"a grid of {listed} values has more than {MOST_JOBS:,} jobs"
            raise UserError(f"-m: {too_many}; choose fewer")
        return BasicSweeper.split_arguments(overrides, max_batch_size)


def _size(axis: Override) -> int:
    """Return the number of values that an override sweeps over, counted up to MOST_JOBS + 1."""
    value: Any = axis.value()
    is_range = isinstance(value, RangeSweep)
    values: Iterable[Any] = value.range() if is_range else axis.sweep_iterator()
    return sum(1 for _ in islice(values, MOST_JOBS + 1))


def with_groups(launcher: Launcher, **given: Any) -> Launcher:
    """Return the launcher of a sweep, which starts a task per group where that is worthwhile."""
    config: DictConfig = given["config"]
    takes_turns = config.sweep.get("turns") and not config.sweep.dry_run
    if takes_turns and not isinstance(launcher, ProcessLauncher):
        only = "sweep.turns: only hydra/launcher=magicdec takes turns"
        to_stderr(f"{only}; each run measures all its repeats at once")
    shares_nothing = config.sweep.share == "none" or config.scenario.name in ("predict", "plan")
    if isinstance(launcher, WITHOUT_TASKS) or shares_nothing:
        return launcher
    launcher = GroupLauncher(launcher)
    launcher.setup(**given)
    return launcher
