"""Check the weights of Hugging Face checkpoints, and read them straight into the parameters of our
transformer.

Only json and safetensors are opened, never a pickle, which can run code when it is loaded. Every
mistake of a user raises a UserError that names the file. pieces.py says which tensors there are.
"""

import math
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from magicdec.architectures.head_config import HeadConfig
from magicdec.architectures.model_config import ModelConfig
from magicdec.errors import UserError
from magicdec.inputs.fingerprint import of_files
from magicdec.inputs.rules import must, parse_values
from magicdec.models.metadata import read_header, read_json
from magicdec.models.parallel import ALONE, Share
from magicdec.models.pieces import TensorPiece, pieces
from magicdec.models.tensors import read_part
from magicdec.models.unread import dispensable, report_frequencies

CONFIG = "config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.bin.index.json")
OBJECT = dict[str, Any]
SHARD: Any = Annotated[
    str,
    must(
        "must be the name of a .safetensors file in the same folder",
        lambda name: re.fullmatch(r"[^/\\\x00]+\.safetensors", name) is not None,
    ),
]
STORED_DTYPES = ("F64", "F32", "F16", "BF16")
# Configuration, tokenizer, chat template.
OTHER_FILES = frozenset({".json", ".jinja", ".model", ".txt"})


def load(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Callable[[int], None] | None = None,
    share: Share = ALONE,
    compact: Collection[str] = (),
) -> dict[str, Tensor]:
    """Return the weights as a state dict of `Transformer(share.config(config))`, in `dtype` on
    `device`.

    Parameters named in `compact` are in bfloat16. All files are checked before anything is
    allocated. Peak memory is this rank's weights plus its part of one tensor. `progress` is called
    with the number of parameters of each part that is read, `num_parameters` of the share in all.
    Raise UserError for a missing, truncated or corrupt file, a missing, unexpected or misshapen
    tensor, a pickle checkpoint, and quantized weights.
    """
    todo = list(pieces(config, share))
    files = files_of(folder)
    _check(todo, files, folder, dispensable(config))
    report_frequencies(files, config)
    shapes = {
        piece.parameter: (piece.first_row + piece.part_shape[0], *piece.part_shape[1:])
        for piece in todo
    }
    for name, tokens in (("embed.weight", config.vocab_size), ("head.weight", config.num_logits)):
        if name in shapes:
            shapes[name] = (share.vocabulary_rows(tokens), config.hidden_size)
    # Zeros, where a rank's vocabulary ends early.
    dtypes = dict.fromkeys(shapes, dtype) | dict.fromkeys(compact, torch.bfloat16)
    state = {
        name: torch.zeros(shape, dtype=dtypes[name], device=device)
        for name, shape in shapes.items()
    }
    for piece in todo:
        rows = state[piece.parameter][piece.first_row : piece.first_row + piece.part_shape[0]]
        rows.copy_(read_part(files[piece.source], piece.source, piece.part))
        if progress is not None:
            progress(math.prod(piece.part_shape))
    if share.rank > 0:  # ranks add up what they compute here, and the bias counts once
        for name in (name for name in state if name.endswith("output.bias")):
            state[name].zero_()
    if isinstance(config, HeadConfig) and config.maps_vocabulary:
        state["target_ids_V"] = _target_ids(files, config).to(device)
    return state


def _target_ids(files: dict[str, Path], config: HeadConfig) -> Tensor:
    """Return the target's ids of a head's tokens, which the file holds as distances from their
    own.
    """
    path = files["d2t"]
    distances = read_part(path, "d2t")
    ids = distances.long().flatten() + torch.arange(distances.numel())
    is_valid = bool(((ids >= 0) & (ids < config.vocab_size)).all())
    if not is_valid or len(ids) != config.num_logits or len(ids.unique()) < len(ids):
        raise UserError(
            f"{path}: d2t does not map {config.num_logits} tokens into a vocabulary of"
            f" {config.vocab_size}, each to a different one"
        )
    if "t2d" in files and not torch.equal(
        read_part(files["t2d"], "t2d").flatten().nonzero()[:, 0], ids.sort().values
    ):
        raise UserError(
            f"{files['t2d']}: t2d marks other tokens of the target than d2t; download it again"
        )
    return ids


def stored_in_bfloat16(folder: Path, config: ModelConfig) -> set[str]:
    """Return the matrices that the files hold in bfloat16: kept so, they are the same numbers in
    half the bytes.
    """
    files = files_of(folder)
    headers = {path: read_header(path) for path in set(files.values())}
    is_stored: dict[str, bool] = {}
    for piece in pieces(config):
        path = files.get(piece.source)
        entry = headers[path].get(piece.source) if path else None
        is_exact = entry is not None and entry["dtype"] == "BF16"
        is_stored[piece.parameter] = (
            is_stored.get(piece.parameter, len(piece.shape) == 2) and is_exact
        )
    return {name for name, is_exact in is_stored.items() if is_exact}


def fingerprint(folder: Path, with_weights: bool = True) -> str:
    """Return a short hash of the weights, the configuration and the tokenizer, or of all but the
    weights.

    Raise UserError for a checkpoint that is incomplete. magicdec/inputs/fingerprint.py says what is
    read of large files.
    """
    weights = set(files_of(folder).values()) if with_weights else set()
    for path in sorted(weights):
        read_header(path)
    others = [path for path in folder.iterdir() if path.suffix in OTHER_FILES and path.is_file()]
    return of_files({path.name: path for path in [*weights, *others]})


def files_of(folder: Path) -> dict[str, Path]:
    """Return the file that holds each tensor, from the single file or the index of shards."""
    if (folder / SINGLE).exists():
        return dict.fromkeys(read_header(folder / SINGLE), folder / SINGLE)
    if (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX, OBJECT).get("weight_map")
        if not weight_map:
            raise UserError(f"{folder / INDEX} has no weight_map")
        shards = parse_values(SHARD, weight_map, str(folder / INDEX), "weight_map")
        return {name: folder / file for name, file in shards.items()}
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        raise UserError(
            f"{folder / pickles[0]} is a pickle, which can run code when it is loaded; only"
            " safetensors are read: convert it where you trust it, with transformers'"
            " from_pretrained and save_pretrained"
        )
    raise UserError(
        f"{folder} holds no weights: neither {SINGLE} nor {INDEX} (for heads that are published as"
        " .bin, see tools/convert_head.py)"
    )


def _check(
    todo: list[TensorPiece], files: dict[str, Path], folder: Path, dispensable: re.Pattern[str]
) -> None:
    """Raise UserError unless the files hold exactly what the architecture needs, in a form that can
    be read.
    """
    headers = {path: read_header(path) for path in sorted(set(files.values()))}
    for source, _, _, shape, *_ in todo:
        path = files.get(source)
        entry = headers[path].get(source) if path else None
        if entry is None:
            raise UserError(f"{path or folder}: the tensor {source} is missing")
        if tuple(entry["shape"]) != shape:
            raise UserError(
                f"{path}: {source} has shape {tuple(entry['shape'])}, {CONFIG} says {shape}"
            )
        if entry["dtype"] not in STORED_DTYPES:
            raise UserError(
                f"{path}: {source} is stored as {entry['dtype']:.20}; quantized weights are not"
                " supported"
            )
    unknown = sorted(files.keys() - {piece.source for piece in todo})
    unknown = [name for name in unknown if not dispensable.fullmatch(name)]
    if unknown:
        raise UserError(
            f"{files[unknown[0]]}: {len(unknown)} tensors have no place in the architecture that"
            f" {CONFIG} describes, such as {unknown[0]:.100}"
        )
