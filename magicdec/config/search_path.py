"""The place of a user's own options on Hydra's search path: behind conf/, whose options of the same
name win.
"""

from pathlib import Path
from typing import ClassVar

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from typing_extensions import override

from magicdec.config.folders import CONF, own_folders


class OwnOptions(SearchPathPlugin):
    """Adds ./conf of the working directory, and conf/ of plugins, to configurations of ours. Leaves
    others alone.
    """

    ours: ClassVar = {str(CONF)}  # the folders of their primary configurations

    @override
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if any(
            place.provider == "main" and place.path in self.ours for place in search_path.get_path()
        ):
            for folder in own_folders():
                search_path.append("magicdec", f"file://{folder}")


def add_own_options(folder: Path = CONF) -> None:
    """Have Hydra find a user's own options for the primary configurations in a folder."""
    OwnOptions.ours.add(str(folder))
    Plugins.instance().register(OwnOptions)
