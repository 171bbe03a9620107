"""Helpers of programs that measure: where figures are from, and the cells measured so far."""

import json
import subprocess
from pathlib import Path
from typing import Any

import torch

from magicdec.measure.system import cpu_name

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results"
# What figures depend on.
MEASURED = (
    "magicdec",
    "conf",
    "benchmarks/*.py",
    ":!benchmarks/render.py",
    ":!benchmarks/charts.py",
    "pyproject.toml",
)


def setting() -> str:
    """Return the commit, the machine, its threads and its PyTorch."""
    threads = torch.get_num_threads()
    return (
        f"commit {commit()}, {cpu_name()}, {threads} thread{'s' if threads > 1 else ''}, PyTorch"
        f" {torch.__version__}"
    )


def commit() -> str:
    """Return the last commit that changed what figures depend on, with `-dirty` if those files have
    changes.
    """
    log = ["git", "log", "-1", "--format=%h", "--", *MEASURED]
    status = ["git", "status", "--porcelain", "--untracked-files=no", "--", *MEASURED]
    try:
        name, changed = (
            subprocess.check_output(git, cwd=ROOT, text=True).strip() for git in (log, status)
        )
    except (
        OSError,
        subprocess.CalledProcessError,
    ):  # a copy of the files alone, or a machine without git
        return "unknown"
    return f"{name}-dirty" if changed else name


class Cells(dict[str, Any]):
    """Figures by the names of their cells, kept in a file, so that a command can be resumed."""

    def __init__(self, name: str, restart: bool = False):
        """Read runs/NAME.json, unless `commit` has changed or `restart` says to forget it."""
        self.file = ROOT / "runs" / f"{name}.json"
        stored = {} if restart or not self.file.exists() else json.loads(self.file.read_text())
        super().__init__(stored["cells"] if stored.get("commit") == commit() else {})

    def save(self) -> None:
        """Write all cells."""
        self.file.parent.mkdir(exist_ok=True)
        self.file.write_text(json.dumps({"commit": commit(), "cells": self}))
