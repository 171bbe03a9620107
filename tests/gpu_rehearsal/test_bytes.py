"""Bytes that attention reads: once from memory, of keys and values, in a verification and in a prefill."""

import itertools
import math

import pytest

from tests.gpu_rehearsal.compile import GPUS
from tests.gpu_rehearsal.fake import engine, fake_cuda
from tests.gpu_rehearsal.replay import loads_from_memory


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "chunk"), [(24, 128), (8, 1024), (1, 2048)])
def test_a_prefill_of_llama_reads_keys_and_values_from_memory_once(rows, chunk):
    """Replayed over an H100's L2 cache at 16,384 slots: each block of 64 slots is loaded by every tile of its head."""
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
    places = itertools.product(*map(range, reversed(launch.grid)))  # (z, y, x), in the order of their launch
    order = (iter([(place[2 - axis], block) for block in range(blocks)]) for place in places)
    missed, total = loads_from_memory(order, GPUS[90].sms, GPUS[90].l2 // block_bytes)
    assert missed <= 1.05 * heads * blocks
    assert missed < 0.2 * total or tiles < 8
