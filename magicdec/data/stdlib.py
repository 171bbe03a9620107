"""The source of the Python standard library: real, long text that every machine has.

A document is a top-level module, or a package with all its files. Prompts come from the modules in
`HELD_OUT`; the bundled models were trained on the others.
"""

import os
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from magicdec.config.choices import Corpus
from magicdec.config.registry import CORPORA
from magicdec.data.base import PromptRequest, Prompts, cut_windows
from magicdec.errors import UserError

# Part of every Python from 3.11 to 3.14, on every system, even if a distribution splits the library
# into packages.
HELD_OUT = frozenset(
    {
        "argparse",
        "asyncio",
        "email",
        "enum",
        "inspect",
        "ipaddress",
        "logging",
        "mailbox",
        "subprocess",
    }
    | {"tarfile", "typing", "zipfile"}
)

# Tests are another kind of text, and installed packages are not part of the standard library.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "_bundled", "__pycache__"}
)
# Tables rather than code: character maps, pydoc's topics, Windows Installer schemas, build-time
# settings.
SKIPPED_MODULES = frozenset(
    {"encodings", "pydoc_data", "msilib", "turtledemo", "__phello__", "stringprep"}
)
SKIPPED_FILES = frozenset({"html/entities.py"})
SKIPPED_PREFIXES = ("_sysconfigdata", "_sysconfig_vars", "config-")
TWIN_PREFIXES = ("_py_", "_py")  # _py_abc for abc, _pydatetime for datetime


@CORPORA.register(Corpus("stdlib", ignores=("path",)))
def load(request: PromptRequest) -> Prompts:
    """Return windows of the held-out modules; see `cut_windows`."""
    texts = documents(held_out=True)
    return cut_windows(texts, texts.__getitem__, request, "data=stdlib")


def documents(*, held_out: bool, root: Path | None = None) -> dict[str, str]:
    """Return the held-out modules, or all the others: texts by name, sorted. `root` defaults to
    this Python's library.

    Raise UserError if the library's source is not on disk (a frozen or zipped Python).
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    modules = {
        name: files for name, files in _modules(root).items() if (name in HELD_OUT) == held_out
    }
    if not modules:
        raise UserError(
            f"the standard library's source is not in {root}: use data=text data.path=FOLDER"
            " instead"
        )
    # A few files of the library are not UTF-8: with `replace` every machine reads the same
    # characters.
    return {
        name: "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files)
        for name, files in sorted(modules.items())
    }


@cache  # the library stays as it is, and a run with prompts of several lengths asks for each
def _modules(root: Path) -> dict[str, list[Path]]:
    """Return the files of each module: of twins such as datetime and _pydatetime, those of the
    longer.

    Which of the two holds the code changes between Python versions; the module's public name is
    that of both.
    """
    packages: dict[str, list[Path]] = {}
    for path in sorted(_sources(root)):
        relative = path.relative_to(root).as_posix()
        name = relative.partition("/")[0].removesuffix(".py")
        if not (
            name in SKIPPED_MODULES
            or name.startswith(SKIPPED_PREFIXES)
            or relative in SKIPPED_FILES
        ):
            packages.setdefault(name, []).append(path)
    modules: dict[str, list[Path]] = {}
    for name, files in packages.items():
        public = _public_name(name)
        modules[public] = max(
            files,
            modules.get(public, []),
            key=lambda paths: sum(path.stat().st_size for path in paths),
        )
    return modules


def _sources(root: Path) -> Iterator[Path]:
    """Yield the source files below `root`, without a walk through installed packages."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def _public_name(module: str) -> str:
    for prefix in TWIN_PREFIXES:
        public = module.removeprefix(prefix)
        if public != module and public in sys.stdlib_module_names:
            return public
    return module
