"""Adds a user's own options to Hydra's search path: ./conf of the working directory, and conf/ of installed plugins.

Files that YAML's aliases make endless are refused: Hydra would write every alias out.
"""

import math
from pathlib import Path

import yaml
from hydra._internal.core_plugins import file_config_source
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from typing_extensions import override

from magicdec.config.options import architecture_of
from magicdec.config.schema import own_folders
from magicdec.errors import UserError

MOST_NODES = 100_000  # of a file with its aliases written out


class OwnOptions(SearchPathPlugin):
    """The folders behind conf/, so that options of the package win over options of the same name."""

    @override
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for folder in own_folders():
            search_path.append("magicdec", f"file://{folder}")


class FileConfigSource(file_config_source.FileConfigSource):
    """Hydra's own source of files, without those that would take it for ever."""

    def load_config(self, config_path: str) -> ConfigResult:
        """Load a file, and the architecture that an option of the group `target` names.

        Raise UserError for a file that is nested too deeply, or too large with its aliases.
        """
        file = Path(self.path, self._normalize_file_name(config_path))
        try:
            if file.is_file() and _num_nodes(file) > MOST_NODES:
                raise UserError(f"{file}: its aliases are endless, or stand for more than {MOST_NODES:,} values")
            found = super().load_config(config_path)
        except RecursionError:
            raise UserError(f"{file}: nested too deeply") from None
        if file.parent.name == "target" and isinstance(name := found.config.get("architecture"), str):
            found.config["architecture"] = architecture_of(name, file)
        return found


def _num_nodes(file: Path) -> float:
    """Return the values in a YAML file with every alias written out; infinity for one that holds itself."""
    if b"*" not in file.read_bytes():  # and so no alias
        return 0
    known: dict[int, float] = {}

    def count(node: yaml.Node | None) -> float:
        if id(node) not in known:
            known[id(node)] = math.inf  # while its own parts are counted
            parts = node.value if isinstance(node, yaml.CollectionNode) else ()
            flat = (part for entry in parts for part in (entry if isinstance(entry, tuple) else (entry,)))
            known[id(node)] = 1 + sum(map(count, flat))
        return known[id(node)]

    with file.open(encoding="utf-8") as text:
        return count(yaml.compose(text, yaml.SafeLoader))


SourcesRegistry.instance().types["file"] = FileConfigSource  # which a class of the same name does not replace
