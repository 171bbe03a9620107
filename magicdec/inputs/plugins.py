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


def load(modules: Sequence[str], are_arguments: bool = False) -> None:
    """Import the installed modules and these, which register themselves. Raise UserError for one
    that cannot be.

    Modules in the working directory are found too. `are_arguments` is true where a command's
    arguments name the modules, and not the key `plugins`.
    """
    if modules and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    origins = {entry.module: f"the entry point {entry.name} in {GROUP}" for entry in installed()}
    named_by = "MODULE" if are_arguments else f"plugins=[{','.join(modules)}]"
    origins |= dict.fromkeys(modules, named_by)
    for module, origin in origins.items():
        try:
            importlib.import_module(module)
        except Exception as error:  # a plugin may fail in any way
            remedy = "correct or uninstall its package"
            if module in modules:
                remedy = "correct it, or " + ("name another" if are_arguments else "leave it out")
            reason = f"{module} cannot be imported ({in_one_line(error)})"
            raise UserError(f"{origin}: {reason}; {remedy}") from error
