"""Weight-only quantisation of a draft's layers, through torchao: group-wise, 8 or 4 bits, activations as they are.

The target is never quantised: what it decides would no longer be its own.
"""

import logging
from importlib.util import find_spec

import torch

from magicdec.errors import UserError
from magicdec.models.transformer import Transformer

BITS = {"int8": torch.int8, "int4": torch.int4}  # type: ignore[attr-defined]
GROUP_SIZE = 32  # weights that share a scale; divides the layers of every supported model


def check(quantization: str) -> None:
    """Raise UserError where torchao is needed and missing."""
    if quantization != "none" and find_spec("torchao") is None:
        raise UserError(f"draft.quantization={quantization} needs torchao: pip install 'magicdec[quantization]'")


def quantized(model: Transformer, quantization: str) -> Transformer:
    """The same model with its layers' matrices in fewer bits; embedding, norms and head are shared with `model`.

    Weights are decoded in front of each matmul, which only a compiler fuses with it (hardware.compile=true). 4 bits are
    stored in a byte each: torchao's packed kernels need a GPU and a library of their own.
    """
    for talkative in ("torchao", "torch.utils._pytree"):  # of every GPU kernel that a machine cannot load
        logging.getLogger(talkative).setLevel(logging.ERROR)
    from torchao.quantization import IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    with torch.device("meta"):
        copy = Transformer(model.config, model.attention, model.share)
    copy.load_state_dict(model.state_dict(), assign=True)
    copy.eval().requires_grad_(False)
    quantize_(copy.layers, IntxWeightOnlyConfig(weight_dtype=BITS[quantization], granularity=PerGroup(GROUP_SIZE)))
    return copy
