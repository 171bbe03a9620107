"""The user's own ./conf, which adds options to every group, for every program that composes a configuration."""

from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from magicdec.config.schema import CONF


class OwnConf(SearchPathPlugin):
    """The folder conf/ of the working directory. Hydra looks for plugins in this namespace."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the folder: where names are the same, magicdec's own option is used."""
        own = Path("conf").resolve()
        if own.is_dir() and own != CONF:
            search_path.append("user", f"file://{own}")
