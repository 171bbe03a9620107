"""Matmuls with few rows by weights in 8 or 4 bits, in Triton: the codes are read once, and decoded
in registers.

M rows, N outputs, F inputs. Weights in groups of 32 inputs share a scale. Two codes of 4 bits make
a byte: that of input j, and that of input F / 2 + j above it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP_SIZE = 32
BLOCK = 128  # inputs at a time
PROGRAMS = 132  # to fill the larger GPUs
INTERPRETED = triton.knobs.runtime.interpret


@torch.library.custom_op("magicdec::code_matmul", mutates_args=())
def code_matmul(x: Tensor, codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Return x (..., F) times the weights (N, F), whose codes are (N, F) or (N, F / 2) int8, and
    scales (N, F / 32).

    Registered as an operator of PyTorch, so that torch.compile does not split it and knows its
    output's shape.
    """
    return launch(x, codes, scales, bits)


@code_matmul.register_fake
def _(x: Tensor, codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[0]))


def launch(x: Tensor, codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    """See code_matmul."""
    rows_MF = x.reshape(-1, x.shape[-1]).contiguous()
    (M, F), N = rows_MF.shape, codes.shape[0]
    out_MN = torch.empty((M, N), dtype=x.dtype, device=x.device)
    block_n = 64 if N >= 64 * PROGRAMS else 32
    multiply_codes[(triton.cdiv(N, block_n),)](
        rows_MF,
        codes,
        scales,
        out_MN,
        M,
        N,
        F,
        BITS=bits,
        GROUP=GROUP_SIZE,
        ROWS=max(16, triton.next_power_of_2(M)),
        BLOCK_N=block_n,
        BLOCK_F=BLOCK * bits // 8,
        UPCAST=INTERPRETED,  # whose bf16 matmuls are wrong
        num_warps=4,
        num_stages=3,
        enable_fp_fusion=True,
    )
    return out_MN.view(*x.shape[:-1], N)


@triton.jit
def add_product(
    total, x, scales, column, row, output, code, M, N, F, GROUP: tl.constexpr, UPCAST: tl.constexpr
):
    """Add the product of these inputs (`column`) and their decoded weights to the outputs."""
    valid = column < F
    place = x + row[:, None] * F + column[None, :]
    part = tl.load(place, (row[:, None] < M) & valid[None, :], 0.0)
    scale = tl.load(
        scales + output[:, None] * (F // GROUP) + column[None, :] // GROUP,
        (output[:, None] < N) & valid[None, :],
        0.0,
    )
    weight = (code.to(tl.float32) * scale.to(tl.float32)).to(part.dtype)
    if UPCAST:
        part, weight = part.to(tl.float32), weight.to(tl.float32)
    return tl.dot(part, tl.trans(weight), total, input_precision="ieee")


@triton.jit
def multiply_codes(
    x, codes, scales, out, M, N, F,
    BITS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr,  # noqa: E501
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Write BLOCK_N outputs of all rows."""
    row = tl.arange(0, ROWS)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    byte = tl.arange(0, BLOCK_F)
    width = F * BITS // 8  # bytes of an output's codes
    total = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for start in range(0, width, BLOCK_F):
        column = start + byte
        inside = (output[:, None] < N) & (column[None, :] < width)
        of_output = output[:, None].to(tl.int64) * width
        code = tl.load(codes + of_output + column[None, :], inside, 0)
        if BITS == 8:
            total = add_product(total, x, scales, column, row, output, code, M, N, F, GROUP, UPCAST)
        else:
            low = (code << 4).to(tl.int8) >> 4
            low_column = tl.where(column < width, column, F)
            total = add_product(
                total, x, scales, low_column, row, output, low, M, N, F, GROUP, UPCAST
            )
            total = add_product(
                total, x, scales, width + column, row, output, code >> 4, M, N, F, GROUP, UPCAST
            )
    place = out + row[:, None] * N + output[None, :]
    exists = (row[:, None] < M) & (output[None, :] < N)
    tl.store(place, total.to(out.dtype.element_ty), exists)
