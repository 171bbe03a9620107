"""A round on 8 ranks that are not there: what they send each other, and nothing that a graph could not capture."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch.distributed as dist

from magicdec.models.parallel import share
from tests.gpu_rehearsal.fake import LLAMA_8B, fake_cuda, fake_model, prefilled, rounds
from tests.small import new_engine

RANKS, LAYERS, GAMMA, ROWS = 8, 2, 4, 64


@pytest.fixture
def ranks() -> Iterator[None]:
    try:
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as error:
        pytest.skip(f"this PyTorch has no fake process group under the name that is known here: {error}")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_round_of_eight_ranks(ranks):
    """Two sums a layer and one of the embedding for each pass of the model, and each pass's logits gathered."""
    config, part = replace(LLAMA_8B, num_layers=LAYERS), share(RANKS)
    with fake_cuda() as recording:
        model = fake_model(config, share=part)
        engine = new_engine(model, "self", policy="streaming", gamma=GAMMA, budget=512, num_sink=4, ignore_eos=False)
        seen = rounds(prefilled(engine, ROWS), recording)
    assert not seen.faults
    counts = seen.count()
    passes = GAMMA + 1
    sums = sum(count for name, count in counts.items() if "allreduce" in name or "all_reduce" in name)
    gathers = sum(count for name, count in counts.items() if "allgather" in name or "all_gather" in name)
    assert sums == passes * (2 * LAYERS + 1)
    assert gathers == passes
    assert {launch.arguments["k"].shape[1] for launch in seen.launches if launch.name == "attend_split"} == {1}
