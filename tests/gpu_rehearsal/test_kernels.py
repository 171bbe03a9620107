"""Triton kernels that rounds launch, compiled for GPUs: registers, shared memory, and how full the
last wave is.

Also the bytes that they read in a prefill.
"""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver

from magicdec.attention.base import Shape
from magicdec.attention.cuda import triton, triton_grid
from magicdec.attention.cuda.triton_grid import split_count
from magicdec.kernels import split_kv
from tests.attention.twins import attend, case
from tests.gpu_rehearsal.compile import GPUS, Launch, compiled, resources
from tests.gpu_rehearsal.fake import engine, fake_cuda, prefilled, rounds
from tests.gpu_rehearsal.inductor import ACTIVE, compiling_driver
from tests.gpu_rehearsal.replay import loads_from_memory
from tests.gpu_rehearsal.sass import TENSOR_FLOPS, cycles, loops

# Rows, context.
CELLS = [(24, 32768), (11, 32768), (192, 4096), (96, 8192), (48, 16384), (8, 100000)]


def share(launch: Launch, slots: int, at_once: int) -> float:
    """The share of the time that a GPU works, where programs take as long as their blocks and all
    wait for the last.
    """
    tiles, splits, heads = launch.grid
    block, programs = launch.arguments["BLOCK"], tiles * splits * heads
    waves, blocks = -(-programs // at_once), -(-slots // (block * splits))
    return tiles * heads * slots / (waves * at_once * blocks * block)


@pytest.mark.parametrize(
    "capability",
    [
        pytest.param(90, marks=pytest.mark.slow),
        *(pytest.param(other, marks=pytest.mark.soak) for other in (80, 100)),
    ],
)
@pytest.mark.parametrize(("rows", "context"), CELLS)
def test_no_wave_is_left_half_empty(rows, context, capability):
    """Decoding, and a verification over the target's cache; splits come from what is compiled."""
    with fake_cuda(capability) as recording:
        batch = prefilled(engine(num_layers=1), rows, context)
        with recording.of() as decoding:
            batch.decoder.decode_token()
        verification = rounds(batch, recording)
    launches = [
        x for x in decoding.launches + verification.launches if x.arguments.get("S", 0) > context
    ]
    assert {x.arguments["T"] for x in launches} == {1, 5}
    for launch in launches:
        at_once = compiled(launch, capability).programs * GPUS[capability].sms
        assert share(launch, launch.arguments["S"], at_once) >= 0.85


def attended(
    capability: int, rows: int, num_new: int, slots: int, window=None
) -> tuple[Launch, list[int]]:
    """A pass of attention with the heads of Llama-3.1-8B: its first launch, and the programs that
    run at once.
    """
    with fake_cuda(capability) as recording:
        q = torch.empty(rows, num_new, 32, 128, dtype=torch.bfloat16, device="cuda")
        k = torch.empty(rows, 8, slots, 128, dtype=torch.bfloat16, device="cuda")
        lengths = torch.empty(rows, dtype=torch.int32, device="cuda")
        with recording.of() as seen:
            attend(triton.TritonAttention(), q, k, k, lengths, window)
        return seen.launches[0], list(triton_grid._programs.values())


@pytest.mark.parametrize("window", [None, 4096])
def test_a_prefill_is_bound_by_tensor_cores(window):
    """In the blocks that all query rows of a tile see, which are most; by the instructions that an
    H100 issues.
    """
    launch, _ = attended(90, 1, 512, 32768, window)
    made, sizes = compiled(launch, 90), launch.arguments
    _, inner, *_ = loops(made)
    assert cycles(made, [inner]) < 4 * sizes["TILE"] * sizes["BLOCK"] * sizes["D"] / TENSOR_FLOPS


def test_splits_fill_waves():
    """192 programs of 514 blocks on an H100 that runs three to a multiprocessor: 2 splits, where 3
    leave 73%.
    """
    assert split_count(192, 32869, 64, 3 * 132) == 2
    assert split_count(192, 32869, 64, 2 * 132) == 4
    assert split_count(88, 32869, 64, 3 * 132) == 9
    assert split_count(1, 32869, 64, 396) == 58  # as long as with 64: 9 blocks
    assert split_count(768, 32869, 64, 132) == 1  # a prefill
    assert split_count(192, 100, 64, 396) == 1  # too short to divide
    # A draft's cache: a second kernel would take longer than it saves.
    assert split_count(64, 517, 64, 396) == 1


@pytest.mark.parametrize(
    "capability", [90, *(pytest.param(other, marks=pytest.mark.soak) for other in (80, 100, 120))]
)
def test_the_programs_that_run_at_once_are_those_of_the_compiled_kernel(capability):
    """The package's own sum, with shared memory counted, against this folder's."""
    launch, (at_once,) = attended(capability, 24, 5, 32869)
    made = compiled(launch, capability)
    assert at_once == made.programs * GPUS[capability].sms
    assert made.programs == {80: 3, 90: 3, 100: 3, 120: 2}[capability]


def test_another_triton_that_does_not_tell_registers(monkeypatch):
    """What is asked of it is private; without an answer two programs are assumed to run at once."""
    monkeypatch.setattr(triton_grid, "gpu", lambda: triton_grid.Gpu(90, 132, GPUS[90].shared, 64))
    monkeypatch.setattr(triton_grid, "_programs", {})
    kernel = SimpleNamespace(arg_names=[], warmup=lambda *_, **__: SimpleNamespace())
    monkeypatch.setattr(split_kv, "attend_split", kernel)
    assert (
        triton_grid.programs_at_once("a variant", split_kv.attend_split, {}, {}, torch.bfloat16)
        == 2 * 132
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all", "selected", "positions", "scored"])
def test_triton_itself_compiles_a_pass_before_its_first_launch(kind, monkeypatch):
    """With the arguments of the pass, on a device that only compiles, which tells how many programs
    run at once.
    """
    loaded = []
    monkeypatch.setattr(driver, ACTIVE, compiling_driver(90))
    monkeypatch.setattr(triton_grid, "gpu", lambda: triton_grid.Gpu(90, 132, GPUS[90].shared, 64))
    monkeypatch.setattr(triton_grid, "_programs", {})

    def load(self):
        self.n_regs, _ = resources(self.asm["cubin"])
        loaded.append(self)

    monkeypatch.setattr(CompiledKernel, "_init_handles", load)
    q, k, v, lengths = (x.to("meta") for x in case(5, 4, 128, 32869, torch.bfloat16))
    attention, shape = triton.TritonAttention(), Shape(5, k.shape[2], 4, q.dtype)
    positions = (
        torch.empty(k.shape[:3], dtype=torch.int32, device="meta") if kind == "positions" else None
    )
    plan = attention.plan(lengths, shape, 512 if kind == "positions" else None, positions)
    indices = (
        torch.empty(3, 2, 4096, dtype=torch.int64, device="meta") if kind == "selected" else None
    )
    if kind == "scored":
        attention.attend_scored(q, k, v, plan)
    else:
        attention.attend(q, k, v, plan, indices)
    (made,) = loaded
    (at_once,) = triton_grid._programs.values()
    assert at_once == triton_grid.gpu().programs(
        made.n_regs, made.metadata.shared, made.metadata.num_warps
    )
    assert at_once in (2 * 132, 3 * 132, 4 * 132)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "chunk"), [(24, 128), (8, 1024), (1, 2048)])
def test_a_prefill_of_llama_reads_keys_and_values_from_memory_once(rows, chunk):
    """Replayed over an H100's L2 cache at 16,384 slots: each block of 64 slots is loaded by every
    tile of its head.
    """
    with fake_cuda(90) as recording:
        made = engine(num_layers=1, generate_len=2, gamma=0, prefill_chunk=chunk)
        batch = made.open([[0] * 16384] * rows)
        with recording.of() as seen:
            batch.decoder.target(batch.decoder.state.tokens_BS[:, :chunk], batch.decoder.cache)
    (launch,) = (launch for launch in seen.launches if launch.name == "attend_split")
    heads, slots, block_bytes = rows * 8, 16384, 2 * 64 * 128 * 2
    axis = launch.grid.index(heads)
    tiles, splits, blocks = math.prod(launch.grid) // heads, launch.grid[1], slots // 64
    assert splits == 1
    # (z, y, x), in the order of their launch.
    places = itertools.product(*map(range, reversed(launch.grid)))
    order = (iter([(place[2 - axis], block) for block in range(blocks)]) for place in places)
    missed, total = loads_from_memory(order, GPUS[90].sms, GPUS[90].l2 // block_bytes)
    assert missed <= 1.05 * heads * blocks
    assert missed < 0.2 * total or tiles < 8
