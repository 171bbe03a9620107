"""A round on 8 ranks that are not there: what they send each other, and nothing that a graph could
not capture.
"""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from magicdec.models import symmetric
from magicdec.models.parallel import share
from tests.gpu_rehearsal.fake import (
    LLAMA_8B,
    Seen,
    engine,
    fake_cuda,
    fake_model,
    prefilled,
    rounds,
)
from tests.gpu_rehearsal.inductor import calls, emitted, pretended_gpu

RANKS, LAYERS, GAMMA, ROWS = 8, 2, 4, 64
PASSES = GAMMA + 1


@pytest.fixture
def ranks() -> Iterator[None]:
    try:
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as error:
        pytest.skip(
            f"this PyTorch has no fake process group under the name that is known here: {error}"
        )
    if not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "Meta"):
        pytest.skip("this PyTorch's sums over ranks have no form for tensors that hold nothing")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


# PyTorch 2.13, torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.cpp: the operators, and what is
# passed to them.
OPERATORS = {
    "multimem_all_reduce_": "(Tensor(a!) input, str reduce_op, str group_name) -> Tensor(a!)",
    "two_shot_all_reduce_": "(Tensor(a!) input, str reduce_op, str group_name) -> Tensor(a!)",
}


@pytest.fixture
def memory(monkeypatch) -> Iterator[SimpleNamespace]:
    """Symmetric memory that is not there: what is asked of it."""
    if symmetric._memory() is None:
        pytest.skip("this PyTorch has no symmetric memory under the names that are known here")
    asked = SimpleNamespace(multicast_ptr=1, rendezvoused=[])

    def rendezvous(buffer, group):
        asked.rendezvoused.append((buffer.nbytes, group.size()))
        return asked

    module = SimpleNamespace(empty=torch.empty, rendezvous=rendezvous)
    monkeypatch.setattr(symmetric, "_memory", lambda: module)
    monkeypatch.setattr(symmetric, "_obstacle", lambda *_: None)
    monkeypatch.setattr(symmetric, "_all_agree", lambda mine, *_: mine)
    monkeypatch.setattr(symmetric.SymmetricSums, "checked", lambda sums, _: sums)
    symmetric.sums.cache_clear()
    with torch.library._scoped_library("symm_mem", "IMPL") as library:
        for name in OPERATORS:
            library.impl(name, lambda x, *_: x, "Meta")
        yield asked
    symmetric.sums.cache_clear()


def round_of_ranks(all_reduce: str) -> Seen:
    """A round of one of eight ranks; the operators of layers are recorded as such, but for their
    sums and matmuls.
    """
    with fake_cuda() as recording:
        own = engine(num_layers=LAYERS, share=share(RANKS, all_reduce, "cuda"), gamma=GAMMA)
        return rounds(prefilled(own, ROWS), recording)


def counted(seen: Seen, *names: str) -> int:
    return sum(count for name, count in seen.count().items() if any(part in name for part in names))


@pytest.mark.slow
def test_a_round_of_eight_ranks(ranks):
    """Two sums a layer and one of the embedding for each pass of the model, and each pass's logits
    gathered.
    """
    seen = round_of_ranks("nccl")
    assert not seen.faults
    assert counted(seen, "allreduce", "all_reduce") == PASSES * (2 * LAYERS + 1)
    assert counted(seen, "allgather", "all_gather") == PASSES
    assert {
        launch.arguments["k"].shape[1] for launch in seen.launches if launch.name == "attend_split"
    } == {1}


@pytest.mark.parametrize("switch", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_sums_in_symmetric_memory(ranks, memory, switch):
    """No more launches than with NCCL but a copy of the embedding: matmuls write where the others
    read.
    """
    memory.multicast_ptr = int(switch)
    seen, plain = round_of_ranks("auto"), round_of_ranks("nccl")
    assert not seen.faults
    name = "symm_mem::multimem_all_reduce_" if switch else "symm_mem::two_shot_all_reduce_"
    assert seen.count()[name] == PASSES * (2 * LAYERS + 1)
    assert counted(seen, "c10d::allreduce_") == 0
    assert len(seen.ops) == len(plain.ops) + PASSES
    assert memory.rendezvoused == [(symmetric.MAX_BYTES, RANKS)]


@pytest.mark.slow
def test_what_is_compiled_of_a_rank_has_no_copies(ranks, memory):
    """NCCL sums a matmul's output in place, within the compiled half; sums in symmetric memory are
    outside of it.
    """
    matmul = "extern_kernels.mm"
    nccl = ["_c10d_functional.all_reduce_", "_c10d_functional.wait_tensor"]
    expected = {
        "nccl": [matmul, *nccl, "run", matmul, "run", matmul, *nccl],
        "auto": ["run", matmul, "run"],
    }
    for all_reduce, launched in expected.items():
        with fake_cuda():
            model = fake_model(
                replace(LLAMA_8B, num_layers=1), share=share(RANKS, all_reduce, "cuda")
            )
            model.compile_layers()
            x = torch.empty(ROWS, 1, 4096, dtype=torch.bfloat16, device="cuda")
            heads = torch.empty(ROWS, 1, 4, 128, dtype=torch.bfloat16, device="cuda")
            with pretended_gpu():
                source = emitted(model.layers[0].after_attention, (model.operators, x, heads))
        assert len(calls(source)) == len(launched)
        assert all(part in call for part, call in zip(launched, calls(source), strict=True))


@pytest.mark.parametrize("name", OPERATORS)
def test_the_operators_take_what_they_are_given(name):
    if symmetric._memory() is None:
        pytest.skip("this PyTorch has no symmetric memory under the names that are known here")
    schema = getattr(torch.ops.symm_mem, name).default._schema
    assert str(schema).removeprefix(f"symm_mem::{name}") == OPERATORS[name]
