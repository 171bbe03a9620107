"""Code from outside the package: modules that register policies, drafts, engines, backends and
corpora of their own.

Installed packages name such modules in the entry-point group `magicdec.plugins`; the key `plugins`
names others.
"""

import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType

from magicdec.errors import UserError, in_one_line

GROUP = "magicdec.plugins"


def built_in(package: ModuleType) -> list[str]:
    """Return the names of the modules in a package, without importing them."""
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__))


@cache
def installed() -> tuple[EntryPoint, ...]:
    """Return the entry points of installed packages."""
    return tuple(entry_points(group=GROUP))


def option_folders() -> list[Path]:
    """Return the folders `conf` that installed packages bring, without importing the packages."""
    specs = [importlib.util.find_spec(entry.module.partition(".")[0]) for entry in installed()]
    folders = [Path(spec.origin).with_name("conf") for spec in specs if spec and spec.origin]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def load(modules: Sequence[str]) -> None:
    """Import the installed modules and these, which register themselves. Raise UserError for one
    that cannot be.

    Modules in the working directory are found too.
    """
    if modules and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    origins = {entry.module: f"the entry point {entry.name} in {GROUP}" for entry in installed()}
    origins |= {module: f"plugins=[{','.join(modules)}]" for module in modules}
    for module, origin in origins.items():
        try:
            importlib.import_module(module)
        except Exception as error:  # a plugin may fail in any way
            leave_out = (
                "it, or leave it out"
                if origin.startswith("plugins")
                else "or uninstall its package"
            )
            reason = f"{module} cannot be imported ({in_one_line(error)})"
            raise UserError(f"{origin}: {reason}; correct {leave_out}") from error
