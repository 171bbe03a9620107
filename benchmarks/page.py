"""What every page of results has: a table, and a line that says where its figures are from."""

import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from magicdec.measure.system import cpu_name

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *rows]) + "\n"


def provenance(command: str) -> str:
    """The command, and where it ran."""
    return f"`{command}`, {setting()}"


def setting() -> str:
    """The commit, and the machine with its threads and its PyTorch."""
    threads = torch.get_num_threads()
    return f"commit {commit()}, {cpu_name()}, {threads} thread{'s' if threads > 1 else ''}, PyTorch {torch.__version__}"


def commit() -> str:
    """What was measured; `-dirty` where the tree was not what the commit says."""
    git = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # a copy of the files alone, or a machine without git
        return "unknown"
