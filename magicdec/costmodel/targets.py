"""Models by name, straight from the options of the group `target`, without Hydra: architectures,
paths and labels.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from magicdec.architectures.model_config import ModelConfig
from magicdec.config.folders import CONF, own_folders
from magicdec.config.options import values_of
from magicdec.errors import UserError, to_stderr
from magicdec.inputs.rules import parse

PACKAGE_ROOT = Path(__file__).resolve().parents[2]


def option(name: str) -> dict[str, Any]:
    """Return what conf/target/NAME.yaml holds, of the package's options or the user's; {} if there
    is none.
    """
    return values_of("target", name)


def options() -> list[dict[str, Any]]:
    """Return what every option holds. Warn about those that cannot be read: nobody has chosen
    them.
    """
    values = []
    for name in _names():
        try:
            values.append(option(name))
        except UserError as error:
            to_stderr(f"warning: {error}; left out")
    return values


def _names() -> list[str]:
    return sorted(
        {
            path.stem
            for folder in (CONF, *own_folders())
            for path in (folder / "target").glob("*.yaml")
        }
    )


@cache
def architecture(name: str) -> ModelConfig:
    """Return the architecture of an option of the group target; raise UserError if there is
    none.
    """
    values = option(name).get("architecture")
    if not values:
        known = [str(other.get("name")) for other in options() if other.get("architecture")]
        what = "leaves its architecture to another file" if option(name) else "is no option"
        raise UserError(f"target={name} {what}; choose one of {', '.join(known)}")
    return from_values(values)


def is_own_path(name: str, path: str | None) -> bool:
    """Return whether a model's path is that of the option of its name, or null."""
    option_path = option(name).get("path")
    if path is None or option_path is None:
        return path is None
    return path == option_path or Path(path).resolve() in (
        Path(option_path).resolve(),
        (PACKAGE_ROOT / option_path).resolve(),
    )


def model_label(name: str, path: str | None) -> str:
    """Return how tables call a model: its name and, where that is an option's, the folder of
    weights from elsewhere.
    """
    if is_own_path(name, path) or not option(name):
        return name
    folder = folder_name(Path(path or ""))
    return name if folder.lower() == name else f"{name} ({folder})"


def folder_name(folder: Path) -> str:
    """Return a folder's name; in the hub's cache, models--ORG--NAME/snapshots/COMMIT, that of the
    repository.
    """
    in_cache = folder.parent.name == "snapshots"
    return folder.parents[1].name.rpartition("--")[2] if in_cache else folder.name


def from_values(values: Mapping[str, Any]) -> ModelConfig:
    """Return the architecture that a configuration describes."""
    return parse(ModelConfig, values, "target.architecture")
