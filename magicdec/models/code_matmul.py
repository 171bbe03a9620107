"""Matmuls with few rows by weights in 8 or 4 bits, in Triton: the codes are read once, and decoded
in registers.

M rows, N outputs, F inputs. Weights in groups of 32 inputs share a scale. Codes of 4 bits are whole
numbers plus 8. Two make a byte: one of a group, and above it that of the same place in the next
group. So the scales of a turn of the loop are two of each output.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from magicdec.config.choices import CODE_GROUP

PROGRAMS = 132  # to fill the larger GPUs
FEW_ROWS = 32  # of which a warp takes all, so that it alone decodes its weights
INTERPRETED = triton.knobs.runtime.interpret


def behind(exponent: str) -> tl.constexpr:
    """Return the assembly by which four bytes' low and high halves become the last bits of numbers
    of 16 bits, whose first eight are `exponent`.
    """
    return tl.constexpr(f"""{{
    .reg .b32 low, high;
    and.b32 low, $4, 0x0f0f0f0f;
    shr.u32 high, $4, 4;
    and.b32 high, high, 0x0f0f0f0f;
    prmt.b32 $0, low, {exponent}, 0x4140;
    prmt.b32 $1, low, {exponent}, 0x4342;
    prmt.b32 $2, high, {exponent}, 0x4140;
    prmt.b32 $3, high, {exponent}, 0x4342;
}}""")


BEHIND_128 = behind("0x43434343")  # in bf16
BEHIND_1024 = behind("0x64646464")  # in fp16


@torch.library.custom_op("magicdec::code_matmul", mutates_args=())
def code_matmul(x: Tensor, codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Return x (..., F) times the weights (N, F), whose codes are (N, F) int8, or (N, F / 2) uint8
    for an even number of groups, and scales (N, F / 32).

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
        GROUP=CODE_GROUP,
        EVEN=F % (2 * CODE_GROUP) == 0,
        ROWS=max(16, triton.next_power_of_2(M)),
        BLOCK_N=block_n,
        PLAIN=INTERPRETED or x.dtype == torch.float32,
        UPCAST=INTERPRETED,  # whose bf16 matmuls are wrong
        num_warps=4 if M > FEW_ROWS and block_n == 64 else block_n // 32,
        num_stages=5,
        enable_fp_fusion=True,
    )
    return out_MN.view(*x.shape[:-1], N)


@triton.jit
def weights_of_nibbles(code, dtype: tl.constexpr, PLAIN: tl.constexpr):
    """Return the whole numbers that bytes hold in their low and their high halves, less 8."""
    if PLAIN:
        low, high = (code & 15).to(tl.float32) - 8.0, (code >> 4).to(tl.float32) - 8.0
    elif dtype == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            BEHIND_128, "=r,=r,=r,=r,r", [code], (tl.bfloat16, tl.bfloat16), True, 4
        )
        low, high = low - 136.0, high - 136.0
    else:
        low, high = tl.inline_asm_elementwise(
            BEHIND_1024, "=r,=r,=r,=r,r", [code], (tl.float16, tl.float16), True, 4
        )
        low, high = low - 1032.0, high - 1032.0
    return low.to(dtype), high.to(dtype)


@triton.jit
def add_group(total, at_x, weight, scale, UPCAST: tl.constexpr):
    """Add the products of a group of inputs, whose weights have one scale in each output."""
    part = tl.load(at_x)
    if UPCAST:
        part, weight = part.to(tl.float32), weight.to(tl.float32)
    weight = weight * scale.to(weight.dtype)[:, None]
    return tl.dot(part, tl.trans(weight), total, input_precision="ieee")


@triton.jit
def multiply_codes(
    x, codes, scales, out, M, N, F,
    BITS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,  # noqa: E501
    PLAIN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Write BLOCK_N outputs of all rows, by two groups of inputs at a time. EVEN: their number is
    even.

    Rows and outputs that do not exist repeat the last ones, and are not stored, so that loads need
    no masks.
    """
    NUMBER: tl.constexpr = tl.float32 if PLAIN else x.dtype.element_ty
    row = tl.arange(0, ROWS)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    of_output = tl.minimum(output, N - 1)
    number = tl.arange(0, GROUP)
    groups, turns = F // GROUP, tl.cdiv(F, 2 * GROUP)
    at_x = x + tl.minimum(row, M - 1)[:, None] * F + number[None, :]
    width = F if BITS == 8 else turns * GROUP  # bytes of an output's codes
    at_codes = codes + of_output.to(tl.int64)[:, None] * width + number[None, :]
    at_scales = scales + of_output * groups
    total = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for turn in range(turns):
        second = turn * 2 + 1
        if not EVEN:
            second = tl.minimum(second, groups - 1)
        if BITS == 8:
            low = tl.load(at_codes + turn * (2 * GROUP)).to(NUMBER)
            high = tl.load(at_codes + second * GROUP).to(NUMBER)
        else:
            code = tl.load(at_codes + turn * GROUP)
            low, high = weights_of_nibbles(code, NUMBER, PLAIN)
        low_scale, high_scale = tl.load(at_scales + turn * 2), tl.load(at_scales + second)
        if not EVEN:
            high_scale = tl.where(turn * 2 + 1 < groups, high_scale, tl.zeros_like(high_scale))
        total = add_group(total, at_x + turn * (2 * GROUP), low, low_scale, UPCAST)
        total = add_group(total, at_x + second * GROUP, high, high_scale, UPCAST)
    place = out + row[:, None] * N + output[None, :]
    exists = (row[:, None] < M) & (output[None, :] < N)
    tl.store(place, total.to(out.dtype.element_ty), exists)
