"""The folder of a trained head: EAGLE-3 and MTP in the layout of the speculators library, drafts of
blocks in that of DFlash's authors.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from magicdec.models.pieces import pieces
from magicdec.models.states_model import StatesModel


def export(model: StatesModel, described: dict[str, Any], out: Path) -> None:
    """Write the head in bfloat16, each file complete before it takes its name."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    tensors = {}
    for piece in pieces(model.config):
        rows = weights[piece.parameter][piece.first_row : piece.first_row + piece.shape[0]]
        tensors[piece.source] = rows.detach().bfloat16().contiguous()
    if model.target_ids_V is not None:
        tensors |= vocabulary(model.target_ids_V, model.config.vocab_size)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors.tmp")
    (out / "model.safetensors.tmp").chmod(0o644)
    os.replace(out / "model.safetensors.tmp", out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(described, indent=2) + "\n")


def vocabulary(ids_V: Tensor, size: int) -> dict[str, Tensor]:
    """Return the tensors that say which of the target's tokens are the draft's."""
    is_draft = torch.zeros(size, dtype=torch.bool).index_fill_(0, ids_V, True)
    return {"d2t": ids_V - torch.arange(len(ids_V)), "t2d": is_draft}
