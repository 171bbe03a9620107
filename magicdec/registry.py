"""Names to classes, by registration: a new file in a package is found without a list that has to be edited."""

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

from magicdec.errors import UserError

T = TypeVar("T")
PACKAGE = Path(__file__).resolve().parent
PLUGINS: dict[str, Path] = {}  # files outside the package that have registered something, by module


class Registry(Generic[T]):
    """The named classes of one package: `@registry.register("name")` in any of its modules."""

    def __init__(self, package: str, key: str):
        """`package` is where the modules lie; `key` is what the user sets to choose among them (for errors)."""
        self._package, self._key = package, key
        self._entries: dict[str, T] = {}
        self._imported = False

    def register(self, name: str) -> Callable[[T], T]:
        """Make a class known under `name`."""

        def add(entry: T) -> T:
            self._entries[name] = entry
            module = sys.modules.get(entry.__module__)
            if (path := getattr(module, "__file__", None)) and not Path(path).resolve().is_relative_to(PACKAGE):
                PLUGINS[entry.__module__] = Path(path)
            return entry

        return add

    def _import_all(self) -> None:
        if not self._imported:
            self._imported = True
            package = importlib.import_module(self._package)
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{self._package}.{module.name}")

    def __getitem__(self, name: str) -> T:
        self._import_all()
        if name not in self._entries:
            raise UserError(f"{self._key}={name} is not known; one of: {', '.join(self)}")
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        self._import_all()
        return iter(sorted(self._entries))
