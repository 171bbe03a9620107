"""The Triton kernels without a GPU, compiled for A100 and H100 down to their registers."""

import re
from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs Triton (Linux only)")

from magicdec.attention.cuda import triton as ours  # noqa: E402
from magicdec.attention.cuda import triton_codes, triton_grid, triton_scores  # noqa: E402
from magicdec.kernels import coded_kv, received_scores, split_kv  # noqa: E402
from tests.attention import twins  # noqa: E402
from tests.gpu_rehearsal.compile import GPUS, build  # noqa: E402
from tests.gpu_rehearsal.fake import fake_cuda  # noqa: E402

RESIDENT_WARPS = 8  # that it must have room for
IS_NEW = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 8)
# Bytes of a thread that are kept in memory, by capability and new tokens. On B200, 8 warps are
# given 128 registers a thread: a prefill keeps 16 bytes there, 64 query rows up to 8.
SPILLED = {(100, 512): 16, (100, 8): 8}
if IS_NEW:
    SPILLED |= {(80, 9): 48, (90, 512): 24}
CAPABILITIES = pytest.mark.parametrize(
    "capability", [90, *(pytest.param(other, marks=pytest.mark.slow) for other in (80, 100, 120))]
)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def attend_compiled(capability, dtype, dim, group, num_new, kind):
    """The attending kernel: of a decoding in splits, of a prefill whole."""
    split = num_new < 100
    kinds = (kind == name for name in ("selected", "scored", "positions"))
    with fake_cuda(capability):
        variant = ours.Variant(DTYPES[dtype], 8, group, dim, group * num_new, num_new == 1, *kinds)
        options, constants = variant.options, variant.constants(split) | {"UPCAST": False}
    types = dict.fromkeys(("q", "k", "v", "out"), f"*{dtype}") | {
        "seqlens": "*i32",
        "scale": "fp32",
    }
    types |= {
        "partial": "*fp32",
        "lse": "*fp32",
        "raw": "*fp32" if dtype == "fp32" else "*fp16",
        "indices": "*i64",
        "positions": "*i32",
    }
    constants |= {} if kind == "selected" else {"indices": None}
    constants |= {} if kind == "positions" else {"positions": None, "reach": None}
    constants |= {} if kind == "scored" else {"raw": None}
    constants |= {} if split else {"partial": None}
    constants |= {"sinks": None, "softcap": None}
    return build(split_kv.attend_split, capability, types, constants, options)


VARIANTS = [
    ("bf16", 128, 4, 5, "all", (2, 2)),
    ("bf16", 128, 8, 8, "all", (1, 2)),
    ("bf16", 128, 8, 9, "all", (1, 1)),
]
VARIANTS += [("bf16", 128, 4, 512, "all", (1, 1)), ("fp16", 80, 1, 1, "selected", (2, 2))]
VARIANTS += [("bf16", 128, 4, 5, "positions", (2, 2)), ("bf16", 128, 4, 5, "scored", (3, 3))]
VARIANTS += [("bf16", 128, 8, 64, "scored", (1, 2))]


@CAPABILITIES
@pytest.mark.parametrize(("dtype", "dim", "group", "num_new", "kind", "programs"), VARIANTS)
def test_compiled(capability, dtype, dim, group, num_new, kind, programs):
    """Tensor cores used, nothing spilled but for the exceptions, and as many programs on a
    multiprocessor as registers and shared memory allow: enough warps to hide memory's latency.
    """
    made = attend_compiled(capability, dtype, dim, group, num_new, kind)
    assert made.spilled <= SPILLED.get((capability, num_new), 0)
    # Whose shared memory holds a single program, with as many bytes in flight.
    if capability != 120:
        assert made.programs >= programs[capability in (90, 100)]
        assert made.programs * made.warps >= RESIDENT_WARPS
    # The L40 has the least.
    assert made.shared <= GPUS[{80: 89}.get(capability, capability)].program_shared
    assert "mma" in made.ptx


def coded_compiled(capability, dtype, bits, dim, rows):
    """The kernel that reads codes, for a decoding in splits."""
    types = dict.fromkeys(("q", "k", "v", "out"), f"*{dtype}") | {
        "scale": "fp32",
        "partial": "*fp32",
        "lse": "*fp32",
    }
    types |= dict.fromkeys(("seqlens", "first_exact"), "*i32")
    types |= dict.fromkeys(("k_codes", "v_codes"), "*u8")
    types |= dict.fromkeys(("k_scales", "v_scales"), "*fp16")
    constants = {
        "K": 8,
        "J": 4,
        "D": dim,
        "BITS": bits,
        "G": 32,
        "F": 32,
        "TILE": max(16, rows),
        "SPLIT": True,
    }
    block = triton_codes.block(DTYPES[dtype], constants["TILE"], dim, 32)
    constants |= {"BLOCK": block, "EXACT": triton_codes.EXACT, "UPCAST": False}
    with fake_cuda(capability):
        options = triton_codes.options(DTYPES[dtype], constants["TILE"])
    return build(coded_kv.attend_coded, capability, types, constants, options)


@CAPABILITIES
@pytest.mark.parametrize("dtype", ["bf16", "fp16", pytest.param("fp32", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("bits", "dim", "rows"), [(4, 128, 4), (8, 64, 12), (4, 128, 32)])
def test_codes_compiled(capability, dtype, bits, dim, rows):
    """Nothing spilled, enough warps to hide memory's latency, and codes and scales read in
    words.
    """
    made = coded_compiled(capability, dtype, bits, dim, rows)
    # Of a loop that takes all registers on an RTX PRO, and by a newer compiler on an H100: two
    # numbers.
    assert made.spilled <= (8 if capability == 120 or (IS_NEW and capability == 90) else 0)
    assert made.programs * made.warps >= RESIDENT_WARPS
    assert dtype == "fp32" or "mma" in made.ptx
    assert not re.search(r"ld\.global\.b(8|16)", made.ptx)


def run_ptx(text, word):
    """Return what instructions on words of 32 bits write, by the numbers of their operands."""
    values = {}

    def value(operand):
        return int(operand, 0) if operand[0].isdigit() else values.get(operand, word)

    for name, operands in re.findall(r"(and|shr|prmt)\.\w+ (.*);", text):
        to, first, second, *selector = operands.split(", ")
        first, second = value(first), value(second)
        if name == "prmt":
            octets = first.to_bytes(4, "little") + second.to_bytes(4, "little")
            picked = bytes(octets[value(selector[0]) >> 4 * i & 7] for i in range(4))
            values[to] = int.from_bytes(picked, "little")
        else:
            values[to] = first & second if name == "and" else first >> second
    return [values[to].to_bytes(4, "little") for to in sorted(values) if to[0] == "$"]


@pytest.mark.parametrize("first", [0, 3, 0x5A, 0xF0, 0xFC])
def test_assembly_unpacks_codes(first):
    """Four bytes: to their halves behind 1,024, the high ones first, or to themselves."""
    octets = bytes([first, first + 1, first + 2, first + 3])
    word = int.from_bytes(octets, "little")
    halves = run_ptx(coded_kv.NIBBLES.value, word)
    numbers = torch.frombuffer(bytearray(b"".join(halves)), dtype=torch.float16) - 1024
    assert numbers.tolist() == [x >> 4 for x in octets] + [x & 15 for x in octets]
    whole = run_ptx(coded_kv.BYTES.value, word)
    numbers = torch.frombuffer(bytearray(b"".join(whole)), dtype=torch.float16) - 1024
    assert numbers.tolist() == list(octets)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "num_new", "kind", "spilled"),
    [
        (90, 5, "positions", 0),
        (90, 512, "all", 0),
        # Ptxas keeps 80 registers for three programs, and 4 numbers in memory.
        (80, 5, "selected", 16),
        (120, 512, "all", 0),
    ],
)
def test_single_precision_compiled(capability, num_new, kind, spilled):
    """Tiles of 32 rows: with 64, thousands of bytes are spilled, and the shared memory is more than
    an L40 has.
    """
    made = attend_compiled(capability, "fp32", 128, 4, num_new, kind)
    assert made.spilled <= spilled
    assert made.shared <= GPUS[{80: 89}.get(capability, capability)].program_shared
    assert made.programs >= (1 if capability == 120 else 2)


@CAPABILITIES
@pytest.mark.parametrize(("dim", "splits"), [(128, triton_grid.MAX_SPLITS), (80, 2)])
def test_merging_compiled(capability, dim, splits):
    """Nothing spilled."""
    types = {"partial": "*fp32", "lse": "*fp32", "out": "*bf16"}
    padded = triton.next_power_of_2(dim)
    constants = {"K": 8, "J": 4, "D": dim, "PADDED_D": padded, "PADDED_SPLITS": splits}
    constants["ROWS"] = triton_grid.merge_rows(20, splits * padded)
    assert (
        build(
            split_kv.merge_splits, capability, types, constants, {"enable_fp_fusion": True}
        ).spilled
        == 0
    )


@CAPABILITIES
@pytest.mark.parametrize("some", [True, False])
def test_summing_compiled(capability, some):
    """Nothing spilled."""
    types = {"raw": "*fp16", "lse": "*fp32", "seqlens": "*i32", "counted": "*u8", "out": "*fp32"}
    types |= {"positions": "*i32"}
    constants = {"K": 8, "J": 4, "BLOCK": triton_scores.SUMMED, "ENDS_ALONE": some}
    constants |= {} if some else {"counted": None, "positions": None}
    assert (
        build(
            received_scores.sum_scores, capability, types, constants, {"enable_fp_fusion": True}
        ).spilled
        == 0
    )


@pytest.mark.gpu
@pytest.mark.parametrize("num_new", [1, 2, 5, 9, 32, 500])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)])
def test_on_a_gpu(num_new, group, dtype, tolerance):
    attention = ours.TritonAttention()
    for dim in ours.HEAD_DIMS:
        arguments = [x.cuda() for x in twins.case(num_new, group, dim, 3000, dtype)]
        out = twins.attend(attention, *arguments)
        torch.testing.assert_close(
            out.float(), twins.expected(*arguments), atol=tolerance, rtol=tolerance
        )
        if num_new <= 64:
            # Written in half precision, or multiplied again.
            scores = twins.attend_scored(attention, *arguments)[1]
            rough = {"atol": 2e-3, "rtol": 2e-2}
            q, k, _, seqlens = arguments
            right = twins.expected_scored(*arguments)[1]
            torch.testing.assert_close(scores, right, **rough)
            torch.testing.assert_close(twins.score_keys(attention, q, k, seqlens), right, **rough)
            counted = twins.ends(num_new).cuda()
            _, right = twins.expected_scored(*arguments, counted=counted)
            torch.testing.assert_close(twins.observed(attention, *arguments)[1], right, **rough)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("num_new", "group", "dim", "longest"),
    [(1, 1, 64, 3000), (1, 4, 128, 3000), (5, 4, 128, 3000), (2, 3, 64, 3000), (1, 4, 128, 32_768)],
)
def test_codes_on_a_gpu(bits, num_new, group, dim, longest):
    *arguments, coded = twins.coded_case(num_new, group, dim, longest, bits, torch.bfloat16)
    right = twins.expected_coded(*arguments, coded)
    for codes in (coded.k, coded.v):
        codes.codes_LBKNC, codes.scales = codes.codes_LBKNC.cuda(), codes.scales.cuda()
    coded = replace(coded, first_exact_B=coded.first_exact_B.cuda())
    out = twins.attend_coded(ours.TritonAttention(), *(x.cuda() for x in arguments), coded)
    torch.testing.assert_close(out.float().cpu(), right, atol=1.6e-2, rtol=1.6e-2)
