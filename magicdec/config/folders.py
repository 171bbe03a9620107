"""The folders that hold the options of the configuration's groups."""

from pathlib import Path

from magicdec.errors import UserError
from magicdec.inputs.plugins import option_folders
from magicdec.inputs.rules import is_file_name

# In an installation conf/ is in the package, in a checkout next to it.
PLACES = [folder / "conf" for folder in Path(__file__).resolve().parents[1:3]]
CONF = next(place for place in PLACES if place.is_dir())


def own_folders() -> list[Path]:
    """Return the folders with a user's own options: ./conf of the working directory, and those of
    installed plugins.
    """
    here = Path("conf")
    has_own = here.is_dir() and not here.samefile(CONF)
    return ([here.resolve()] if has_own else []) + option_folders()


def option_file(group: str, name: str) -> Path | None:
    """Return the file of an option, as in conf/cache/streaming.yaml; None if there is none."""
    files = (folder / group / f"{name}.yaml" for folder in (CONF, *own_folders()))
    return next((file for file in files if file.is_file()), None) if is_file_name(name) else None


def check_is_read(group: str, name: str, file: Path, key: str) -> None:
    """Raise UserError where an option to be written as `file` would never be read: another one
    takes precedence.
    """
    first = option_file(group, name)
    if first is not None and first.resolve() != file.resolve():
        raise UserError(
            f"{key}: {group}={name} is an option already ({first}), which is read first; choose"
            " another name"
        )


def check_is_ours(path: Path, mark: str, key: str) -> None:
    """Raise UserError where a file is there already that does not hold the mark of those that we
    write.
    """
    if path.exists() and mark not in path.read_text(encoding="utf-8", errors="replace"):
        raise UserError(f"{key}: {path} is there already; choose another name")
