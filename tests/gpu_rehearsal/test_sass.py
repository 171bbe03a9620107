"""Machine instructions of attention kernels: nothing keeps a GPU from reading K and V as fast as it
can.
"""

import re

import pytest
import torch

from magicdec.attention.cuda import triton_codes
from tests.attention.test_triton import attend_compiled, coded_compiled
from tests.gpu_rehearsal.sass import BYTES_A_CYCLE, cycles, disassembled, loops

HEAD_DIM, BYTES = 128, 2
# Query heads of a KV head, new tokens, slots of a block.
KERNELS = [(4, 1, 64), (4, 5, 32), (8, 8, 64)]


@pytest.mark.parametrize(
    "capability",
    [90, pytest.param(80, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(("group", "num_new", "block"), KERNELS, ids=["decode", "verify", "wide"])
def test_instructions_do_not_limit_the_bandwidth(capability, group, num_new, block):
    """K and V arrive by asynchronous copies of 128 bits; tensor cores multiply; and a block's
    instructions are issued in three quarters of the time in which a GPU reads the block from
    memory. An A100 takes longer for 64 query rows.
    """
    made = attend_compiled(capability, "bf16", HEAD_DIM, group, num_new, "all")
    copies = [line for line in disassembled(made.cubin) if "LDGSTS" in line]
    assert all(re.search(r"LDGSTS\.\S*128", line) for line in copies)
    inner = max(loops(made)[1:], key=lambda loop: loop["LDGSTS"])
    assert inner["LDGSTS"] * made.warps * 32 * 16 == 2 * block * HEAD_DIM * BYTES
    assert inner["HMMA"] + inner["HGMMA"] + inner["UTCHMMA"] > 0
    assert inner["LDL"] + inner["STL"] == 0
    share = 1.2 if (capability, group * num_new) == (80, 64) else 3 / 4
    assert cycles(made, [inner]) <= share * 2 * block * HEAD_DIM * BYTES / BYTES_A_CYCLE[capability]


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_decoded_where_they_are_multiplied(bits):
    """A block's instructions are issued in 0.3 of the time in which an H100 reads the same entries
    in half precision: codes stay in the registers of the dot, and only weights go back through
    shared memory. A B200 needs 0.6 of that time.
    """
    made = coded_compiled(90, "bf16", bits, HEAD_DIM, 4)
    inner = max(loops(made)[1:], key=lambda loop: loop["PRMT"])
    assert inner["LDGSTS"] > 0
    assert inner["LDG"] + inner["LDL"] + inner["STL"] == 0
    assert inner["STS"] <= 6
    assert inner["BAR"] <= 8
    block = triton_codes.block(torch.bfloat16, 16, HEAD_DIM, 32)
    exact = 2 * block * HEAD_DIM * BYTES / BYTES_A_CYCLE[90]
    assert cycles(made, [inner]) <= 0.3 * exact


def test_three_verifications_run_on_a_multiprocessor_of_an_h100():
    made = attend_compiled(90, "bf16", HEAD_DIM, 4, 5, "all")
    assert made.shared <= 76800
    assert made.programs == 3
