"""Machine instructions of attention kernels: nothing keeps a GPU from reading K and V as fast as it
can.
"""

import re

import pytest
import torch

from magicdec.attention.base import Shape
from magicdec.attention.cuda import triton_codes
from magicdec.attention.cuda.triton import TritonAttention
from tests.attention.test_triton import attend_compiled, coded_compiled
from tests.gpu_rehearsal.compile import compiled
from tests.gpu_rehearsal.fake import fake_cuda
from tests.gpu_rehearsal.sass import BYTES_A_CYCLE, cycles, disassembled, loops

HEAD_DIM, BYTES = 128, 2
# Query heads of a KV head, new tokens, slots of a block.
KERNELS = [(4, 1, 64), (4, 5, 64), (8, 8, 64)]


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
    assert inner["BAR"] <= 10
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


def observed(num_new):
    """Return what a pass launches whose attention is observed."""
    with fake_cuda(90) as recording, recording.of() as seen:
        q = torch.empty(8, num_new, 32, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        k = torch.empty(8, 8, 32768, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        lengths_B = torch.empty(8, dtype=torch.int32, device="cuda")
        attention = TritonAttention()
        plan = attention.plan(lengths_B, Shape(num_new, k.shape[2], 4, q.dtype), None)
        scores_BKS = torch.empty(k.shape[:3], device="cuda")
        attention.attend_observed(q, k, k, plan, scores_BKS)
    return seen


def test_a_verification_writes_the_scores_of_two_tokens_in_half_precision():
    """Of each query head: a 16th of the bytes of keys and values. They are summed in place."""
    seen = observed(5)
    *_, last = seen.launches
    assert [op.name for op in seen.ops][-1] == "triton:sum_scores"
    assert last.arguments["raw"].dtype == torch.float16
    assert last.arguments["raw"].shape == (64, 2 * 4, 32768)
    assert last.arguments["out"].shape == (8, 8, 32768)


def keys_scored():
    """Return what a layer launches that scores by 32 queries."""
    with fake_cuda(90) as recording, recording.of() as seen:
        q = torch.empty(8, 32, 32, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        k = torch.empty(8, 8, 32768, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        lengths_B = torch.empty(8, dtype=torch.int32, device="cuda")
        attention = TritonAttention()
        plan = attention.plan(lengths_B, Shape(32, k.shape[2], 4, q.dtype), None)
        attention.score_keys(q, k, plan)
    return seen.launches


def test_the_log_sum_exp_of_many_queries_is_taken_as_fast_as_keys_are_read():
    """Where all queries see the keys, instructions are issued in half of the time in which an H100
    reads them, and nothing is spilled.
    """
    first, second = keys_scored()
    assert [first.name, second.name] == ["sum_keys", "score_keys"]
    made, sizes = compiled(first, 90), first.arguments
    assert made.spilled == 0
    _, unmasked, masked = loops(made)
    assert 0 < unmasked["HGMMA"] == masked["HGMMA"]
    reading = sizes["BLOCK"] * HEAD_DIM * BYTES / BYTES_A_CYCLE[90]
    assert cycles(made, [unmasked]) <= 0.5 * reading


def test_many_queries_are_scored_from_keys_alone():
    """No score is written, and instructions are issued in the time in which an H100 reads keys."""
    *others, last = keys_scored()
    assert last.name == "score_keys"
    assert all(launch.arguments.get("raw") is None for launch in others)
    made, sizes = compiled(last, 90), last.arguments
    assert made.spilled == 0
    _, heads, tokens = parts = loops(made)
    turns = [1, sizes["J"], sizes["J"] * sizes["T"] / sizes["TILE"]]
    assert heads["HGMMA"] == 0 < tokens["HGMMA"]
    reading = sizes["BLOCK"] * HEAD_DIM * BYTES / BYTES_A_CYCLE[90]
    assert cycles(made, parts, turns) <= reading


def test_three_verifications_run_on_a_multiprocessor_of_an_h100():
    made = attend_compiled(90, "bf16", HEAD_DIM, 4, 5, "all")
    assert made.shared <= 76800
    assert made.programs == 3
