"""Adds a user's own options to Hydra's search path: ./conf of the working directory, and conf/ of installed plugins."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from magicdec.config.schema import own_folders


class OwnOptions(SearchPathPlugin):
    """The folders behind conf/, so that options of the package win over options of the same name."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """See SearchPathPlugin."""
        for folder in own_folders():
            search_path.append("magicdec", f"file://{folder}")
