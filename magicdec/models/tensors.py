"""Read and compare tensors of safetensors files, a part at a time."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from magicdec.errors import UserError

ROWS = 4096  # of a matrix, which are compared at a time


def read_part(path: Path, name: str, part: Any = ...) -> Tensor:
    """Return a part of a tensor, by default all of it. Raise UserError for a file that cannot be
    read.

    The file is opened for each part: an open one keeps all pages that were read mapped, which is a
    second copy.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_slice(name)[part]
            return tensor
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} could not be read ({error}); download it again") from None


def shape_of(path: Path, name: str) -> list[int]:
    """Return the shape of a tensor. Raise UserError for a file that cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.get_slice(name).get_shape())
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} could not be read ({error}); download it again") from None


def have_same_numbers(first: tuple[Path, str], second: tuple[Path, str]) -> bool:
    """Return whether two matrices, each named by its file and its name, hold the same numbers in
    whatever type.
    """
    shape = shape_of(*first)
    if shape != shape_of(*second):
        return False
    parts = (slice(start, start + ROWS) for start in range(0, shape[0], ROWS))
    return all(
        torch.equal(read_part(*first, part).double(), read_part(*second, part).double())
        for part in parts
    )
