"""The software that measures: its versions, a hash of its code, and the commit of the checkout."""

import logging
import platform
import subprocess
from importlib import metadata
from typing import Any

from magicdec import threads
from magicdec.config.registry import PACKAGE, PLUGINS
from magicdec.inputs.fingerprint import of_code

log = logging.getLogger(__name__)

CHECKOUT = PACKAGE.parent
CODE_FOLDERS = ("magicdec", "conf", "sweeps", "hydra_plugins", "launch.py")  # of the checkout
# The package as this process has imported it: an edit while a sweep runs does not reach the jobs of
# its fork server.
PACKAGE_HASH = of_code(PACKAGE)


def source() -> str:
    """Return a hash of the code that runs: the package, and the plugins imported so far."""
    return "+".join([PACKAGE_HASH, *(of_code(path) for _, path in sorted(PLUGINS.items()))])


def software() -> dict[str, str]:
    """Return what may change a run's figures but is no part of its id: the code, Python, PyTorch,
    OpenMP's settings.
    """
    versions = {"python": platform.python_version(), "torch": metadata.version("torch")}
    return {"source": source()} | versions | {"openmp": threads.settings()}


def commit() -> dict[str, Any]:
    """Return the checkout's commit and whether its code differs, new files included; null for an
    installed package.
    """
    lines: list[str] = []
    if (CHECKOUT / ".git").exists():
        command = [
            "git",
            "--no-optional-locks",
            "status",
            "--porcelain=v2",
            "--branch",
            "--",
            *CODE_FOLDERS,
        ]
        try:
            done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=10)
            lines = done.stdout.splitlines()
        except (OSError, subprocess.SubprocessError) as error:
            log.warning("the commit is unknown: %s", error)
    head = next((line.split()[2] for line in lines if line.startswith("# branch.oid ")), None)
    dirty = any(not line.startswith("#") for line in lines)
    return {"commit": head, "commit_dirty": dirty if head else None}
