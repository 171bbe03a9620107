"""Weight-only quantization of a draft's layers, through torchao: group-wise, 8 or 4 bits,
activations as they are.

The target is never quantized, because that would change its output.
"""

import logging
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from magicdec.architectures.model_config import ModelConfig
from magicdec.config.choices import CODE_GROUP, CODE_ROWS
from magicdec.errors import UserError
from magicdec.kernels.toolchain import triton_obstacle
from magicdec.models.passes import MATRICES
from magicdec.models.transformer import Transformer

QUANTIZED = (*MATRICES, "joined")  # of a layer; the last one where it has that
PACKED_ROWS = 16  # outputs that PyTorch packs together on a CPU
BITS = {"int8": torch.int8, "int4": torch.int4}  # type: ignore[attr-defined]


def check(quantization: str, device: torch.device) -> None:
    """Raise UserError where torchao, or on a GPU Triton, is needed and cannot be used."""
    if find_spec("torchao") is None:
        raise UserError(
            f"draft.quantization={quantization} needs torchao: pip install 'magicdec[quantization]'"
        )
    if device.type == "cuda" and (reason := triton_obstacle()):
        raise UserError(
            f"draft.quantization={quantization} on a GPU: Triton {reason}; or set"
            " draft.quantization=none"
        )


def check_sizes(quantization: str, model: ModelConfig, ranks: int, device: torch.device) -> None:
    """Raise UserError where a rank's share of a matrix does not consist of whole groups."""
    is_packed = quantization == "int4" and device.type == "cpu"
    for matrix in model.shared_by(ranks).matrices:
        units = {"inputs": CODE_GROUP, "outputs": PACKED_ROWS if is_packed else 1}
        for side, unit in units.items():
            size = getattr(matrix, side)
            if size % unit:
                raise UserError(
                    f"draft.quantization={quantization} takes multiples of {unit}, but"
                    f" {matrix.name} has {size:,} {side}{' on each rank' if ranks > 1 else ''};"
                    " choose draft.quantization=none"
                )


def quiet_torchao() -> None:
    """Silence the log of importing torchao: GPU kernels that this machine cannot load, and
    PyTorch's advice.
    """
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def quantized(model: Transformer, quantization: str, device: torch.device | str) -> Transformer:
    """Return the same model with its layers' matrices in fewer bits; embedding, norms and head are
    shared with `model`.

    On a GPU a kernel of ours reads the codes; 4 bits on a CPU are packed, and read by PyTorch's. 8
    bits on a CPU are decoded in front of each matmul. `device` is where the model will run: a
    memory estimate has weights on the meta device.
    """
    quiet_torchao()
    on_cpu = torch.device(device).type == "cpu"
    with torch.device("meta"):
        copy = type(model)(model.config, model.attention, model.share)
    widened = {
        k: v.to(model.dtype) if k.startswith("layers.") else v
        for k, v in model.state_dict().items()
    }
    copy.load_state_dict(widened, assign=True)
    copy.eval().requires_grad_(False)
    for layer in copy.layers:
        for name in filter(partial(hasattr, layer), QUANTIZED):
            linear = getattr(layer, name)
            if not on_cpu:
                linear = coded(linear, quantization)
            else:
                linear = (
                    PackedLinear(linear)
                    if quantization == "int4"
                    else rounded(linear, quantization)
                )
            setattr(layer, name, linear)
    return copy


def rounded(linear: nn.Linear, quantization: str) -> nn.Linear:
    """Return the layer with a weight of torchao's, a byte for each element."""
    quiet_torchao()
    from torchao.quantization import IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    quantize_(
        linear,
        IntxWeightOnlyConfig(weight_dtype=BITS[quantization], granularity=PerGroup(CODE_GROUP)),
    )
    return linear


def coded(linear: nn.Linear, quantization: str) -> "CodedLinear":
    """Return the layer as a GPU has it."""
    return CodedLinear(rounded(linear, quantization), int(quantization.removeprefix("int")))


class CodedLinear(nn.Module):
    """A linear layer for GPUs with one or two weights per byte. With few rows, only the codes are
    read.
    """

    def __init__(self, linear: nn.Linear, bits: int):
        """Take the weights from `linear`, which torchao has quantized."""
        super().__init__()
        # Here: only PyTorch for GPUs brings Triton.
        from magicdec.models.code_matmul import code_matmul

        self._matmul = code_matmul
        weight: Any = linear.weight
        codes, scales = weight.qdata, weight.scale
        if bits == 4:
            padded = F.pad(codes, (0, -codes.shape[1] % (2 * CODE_GROUP)))
            low, high = (padded + 8).view(torch.uint8).unflatten(1, (-1, 2, CODE_GROUP)).unbind(2)
            codes = (low | high << 4).flatten(1)
        self.codes = nn.Parameter(codes.contiguous(), requires_grad=False)
        self.scales = nn.Parameter(scales.contiguous(), requires_grad=False)
        self.bias, self.bits = linear.bias, bits

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Return x (..., columns) times the weights."""
        if x.numel() // x.shape[-1] > CODE_ROWS:
            return F.linear(x, self.weight, self.bias)
        y = self._matmul(x, self.codes, self.scales, self.bits)
        return y if self.bias is None else y + self.bias

    @property
    def weight(self) -> Tensor:
        """The weights, decoded."""
        codes: Tensor = self.codes
        if self.bits == 4:
            of_groups = codes.unflatten(1, (-1, CODE_GROUP))
            both = torch.stack((of_groups & 15, of_groups >> 4), dim=2).view(torch.int8) - 8
            codes = both.flatten(1)[:, : self.scales.shape[1] * CODE_GROUP]
        of_groups = codes.to(self.scales.dtype).unflatten(1, (-1, CODE_GROUP))
        return (of_groups * self.scales[..., None]).flatten(1)


class PackedLinear(nn.Module):
    """A linear layer with two weights to a byte, for CPUs.

    PyTorch's kernel decodes as it multiplies; it is fast only in bfloat16, which is more precise
    than so few bits.
    """

    def __init__(self, linear: nn.Linear):
        """Quantize `linear`; on the meta device its shapes alone."""
        from torchao.prototype.quantization.int4 import Int4OpaqueTensor

        super().__init__()
        weight, (rows, columns) = linear.weight, linear.weight.shape
        if weight.is_meta:
            codes = weight.new_empty(rows, columns // 2, dtype=torch.uint8)
            scales = weight.new_empty(columns // CODE_GROUP, rows, 2, dtype=torch.bfloat16)
        else:
            packed = Int4OpaqueTensor.from_hp(weight.bfloat16(), [1, CODE_GROUP])
            codes, scales = packed.qdata, packed.scale_and_zero
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = linear.bias

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Return x (..., columns) times the weights, in x's own type."""
        flat = x.flatten(0, -2).bfloat16()
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(flat, self.codes, CODE_GROUP, self.scales)
        y = y.to(x.dtype).unflatten(0, x.shape[:-1])
        return y if self.bias is None else y + self.bias
