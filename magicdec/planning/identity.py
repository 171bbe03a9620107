"""Find the model that a configuration means: its name, and its architecture, from the checkpoint if that is read."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from magicdec.architectures import ModelConfig
from magicdec.costmodel.targets import from_values, option, options
from magicdec.drafting import ModelChoice
from magicdec.errors import UserError

PACKAGE_ROOT = Path(__file__).resolve().parents[2]


def identify(key: str, choice: ModelChoice, loads: bool) -> tuple[ModelChoice, Path | None]:
    """Return a choice with the name and the architecture of the model that runs, and the checkpoint's folder.

    A checkpoint is read if its weights are loaded (`loads`), or if the path is not that of the named option: then
    the folder names the model. Otherwise the choice is returned as it is, without a folder. `key` is the model's key
    in the configuration. Raise UserError for a missing path, and for values that the checkpoint contradicts.
    """
    origin = _origin(choice)
    is_own = choice.path is None or _is_same(choice.path, origin.get("path"))
    if not loads and is_own and choice.architecture is not None:
        return choice, None
    if choice.path is None:
        raise UserError(f"{key}.path=null: give a local Hugging Face folder or a hub id such as org/name")
    from magicdec.models import checkpoint  # here, because it imports PyTorch, and named targets need it not

    folder = checkpoint.locate(choice.path, f"{key}.path", weights=loads)
    config = checkpoint.read_config(folder)
    if choice.architecture is not None:
        written = origin.get("architecture")
        _check_overrides(f"{key}.architecture", choice.architecture, written and from_values(written), config, folder)
    is_named = choice.name != origin.get("name")  # by the user
    name = choice.name if is_own or is_named else _name_of(folder.resolve(), config)
    return replace(choice, name=name, architecture=config), folder


def _origin(choice: ModelChoice) -> dict[str, Any]:
    """Return the option that a choice was made from: that of its name, its path, or its architecture; else {}."""
    if found := option(choice.name):
        return found
    given = choice.architecture
    for one in options():
        if choice.path == one["path"] or (one["architecture"] and from_values(one["architecture"]) == given):
            return one
    return {}


def _is_same(path: str, other: str | None) -> bool:
    return other is not None and (path == other or Path(path).resolve() == (PACKAGE_ROOT / other).resolve())


def _check_overrides(
    key: str, given: ModelConfig, written: ModelConfig | None, theirs: ModelConfig, folder: Path
) -> None:
    """Raise UserError for a value that is neither the option's own (`written`) nor the checkpoint's."""
    for name in (entry.name for entry in fields(ModelConfig)):
        value, read = getattr(given, name), getattr(theirs, name)
        if value != read and (written is None or value != getattr(written, name)):
            raise UserError(f"{key}.{name}={_text(value)}: the checkpoint {folder} has {_text(read)}; leave it out")


def _text(value: Any) -> str:
    return "null" if value is None else str(value)


def _name_of(folder: Path, config: ModelConfig) -> str:
    """Return a folder's name, or a hub repository's. That of an option is only for the same architecture."""
    in_cache = folder.parent.name == "snapshots"  # models--ORG--NAME/snapshots/COMMIT
    name = folder.parents[1].name.rpartition("--")[2] if in_cache else folder.name
    namesake = option(name.lower()).get("architecture")
    if not namesake:
        return name
    is_same = from_values(namesake) == replace(config, eos_token_ids=())
    return name.lower() if is_same else f"{folder.parent.name}/{name}"
