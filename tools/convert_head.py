"""Convert a draft head that is published as .bin into safetensors.

    python tools/convert_head.py FOLDER --out NEW_FOLDER

A .bin is a pickle, which can run code when it is loaded. It is read with weights_only=True, which
accepts tensors alone. config.json is copied as it is. magicdec reads the new folder:
draft.model.path=NEW_FOLDER.
"""

import argparse
import shutil
import sys
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors.torch import save_file
from torch import Tensor


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of all .bin files in a folder. Exit with one line for files that hold
    anything else.
    """
    found: dict[str, Tensor] = {}
    paths = sorted(folder.glob("*.bin"))
    if not paths:
        sys.exit(f"{folder} holds no .bin files")
    for path in paths:
        try:
            part = torch.load(path, map_location="cpu", weights_only=True)
        except (UnpicklingError, RuntimeError, EOFError) as error:
            sys.exit(f"{path} could not be read as tensors alone: {str(error).splitlines()[0]}")
        if not isinstance(part, dict) or not all(
            isinstance(value, Tensor) for value in part.values()
        ):
            sys.exit(f"{path} holds something other than tensors by name")
        found |= part
    return found


def convert(folder: Path, out: Path) -> None:
    """Write the tensors of a head, and its config.json, into a new folder."""
    if not (folder / "config.json").is_file():
        sys.exit(f"{folder} holds no config.json")
    tensors = {name: value.clone().contiguous() for name, value in tensors_in(folder).items()}
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors")
    shutil.copyfile(folder / "config.json", out / "config.json")
    print(
        f"{out}: {len(tensors)} tensors, {sum(value.nbytes for value in tensors.values()):,} bytes"
    )


def main() -> None:
    """Convert what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder with config.json and *.bin")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for config.json and model.safetensors"
    )
    options = parser.parse_args()
    convert(options.folder, options.out)


if __name__ == "__main__":
    main()
