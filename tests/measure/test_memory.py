"""Memory that is held, and memory that is reported."""

import ctypes
import gc
import sys
import weakref

import pytest
import torch

from magicdec import threads
from magicdec.engine.native import warm_up
from magicdec.measure import memory_use
from magicdec.measure.memory_use import Peak
from tests.small import drafting, small_model


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere the peak is that of the whole process"
)
def test_the_peak_is_of_this_run_and_not_of_a_larger_one_before_it():
    large = torch.ones(1 << 27)  # 512 MiB
    del large
    gc.collect()
    # What tests before this one have left would be taken instead of new memory.
    ctypes.CDLL(None).malloc_trim(0)
    peak = Peak(torch.device("cpu"))
    small = torch.ones(1 << 24)  # 64 MiB
    assert small.nbytes * 0.9 <= peak.num_bytes <= small.nbytes * 3


def test_a_closed_batch_holds_no_memory():
    gc.collect()
    gc.disable()  # counting references must suffice: the next batch is opened at once
    try:
        batch = drafting("self", small_model(), [20, 30], policy="full", gamma=2)
        warm_up(batch)
        batch.decoder.generate(batch.draft)
        cache = weakref.ref(batch.decoder.cache)
        batch.close()
        assert cache() is None
    finally:
        gc.enable()


MEMORY_V2 = {"memory.max": "max\n", "memory.current": "900\n", "memory.stat": "inactive_file 100\n"}


@pytest.mark.parametrize(
    ("files", "free", "total"),
    [
        (MEMORY_V2, None, None),
        (MEMORY_V2 | {"memory.max": "1000\n"}, 200, 1000),
        (MEMORY_V2 | {"memory.max": "700\n"}, 0, 700),
        (
            {
                "memory.limit_in_bytes": "1000\n",
                "memory.usage_in_bytes": "900\n",
                "memory.stat": "inactive_file 7\ntotal_inactive_file 300\n",
            },
            400,
            1000,
        ),
        ({}, None, None),
    ],
)
def test_a_container_has_the_memory_of_its_limit(files, free, total, tmp_path, monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(threads, "cgroups", lambda _: [])
    whole = memory_use.total_bytes(cpu)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(threads, "cgroups", lambda _: [tmp_path])
    assert memory_use.total_bytes(cpu) == (whole if total is None else total)
    if free is None:
        assert memory_use.available_bytes(cpu) > 1 << 20
    else:
        assert memory_use.available_bytes(cpu) == free
