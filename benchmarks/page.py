"""The line of a page of results that says where its figures are from."""

import subprocess
from pathlib import Path

import torch

from magicdec.measure.system import cpu_name

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results"


def provenance(command: str) -> str:
    """Return the command and where it ran."""
    return f"`{command}`, {setting()}"


def setting() -> str:
    """Return the commit, the machine, its threads and its PyTorch."""
    threads = torch.get_num_threads()
    return f"commit {commit()}, {cpu_name()}, {threads} thread{'s' if threads > 1 else ''}, PyTorch {torch.__version__}"


def commit() -> str:
    """Return the commit, with `-dirty` if files differ from it."""
    git = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # a copy of the files alone, or a machine without git
        return "unknown"
