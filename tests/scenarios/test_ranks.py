"""Ranks as processes: errors and deaths are reported, and nothing hangs."""

import gc
import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from magicdec.config.load import compose
from magicdec.drafts.base import Draft
from magicdec.engine.decoder import Decoder
from magicdec.errors import UserError
from magicdec.models.kv_cache import KVCache
from magicdec.planning.resolve import resolve
from magicdec.planning.resolved import Plan
from magicdec.scenarios import _work, ranks
from magicdec.scenarios.ranks import on_ranks
from magicdec.tracking.store import Run
from tests.runs import SMALL

pytestmark = pytest.mark.usefixtures("forked_ranks")


def mistaken(rank: int) -> None:
    if rank == 1:
        raise UserError("draft.gamma=0: a mistake that rank 1 finds")
    dist.barrier()


def killed(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def test_a_ranks_error_is_raised_here_and_not_what_it_does_to_the_others():
    with pytest.raises(UserError, match="a mistake that rank 1 finds") as caught:
        on_ranks(2, "cpu", mistaken)
    assert "on rank 1" in caught.value.__notes__[0]


@pytest.mark.timeout(30, func_only=True)
def test_a_killed_rank_ends_the_others():
    with pytest.raises(RuntimeError, match=r"rank 1 died .*SIGKILL"):
        on_ranks(2, "cpu", killed)


def stuck_at_the_end(rank: int) -> int:
    """The group ends, after collectives that a graph has captured for example, when it likes."""
    dist.destroy_process_group = lambda: time.sleep(60)
    return 7


@pytest.mark.timeout(20, func_only=True)
def test_the_result_does_not_wait_for_the_end_of_the_group(monkeypatch):
    monkeypatch.setattr(ranks, "EXIT_S", 1.0)
    assert on_ranks(3, "cpu", stuck_at_the_end) == 7


class Graph:
    """A captured graph in a cycle of references, as an engine's are."""

    def __init__(self, told: Path):
        self.itself, self._told = self, told

    def __del__(self):
        self._told.write_text("freed")


def with_graphs(rank: int, folder: Path) -> None:
    told, destroy = folder / f"graph{rank}", dist.destroy_process_group
    dist.destroy_process_group = lambda: (
        (folder / f"end{rank}").write_text(str(told.exists())) and destroy()
    )
    Graph(told)


def test_graphs_are_freed_before_the_group_ends(tmp_path):
    on_ranks(2, "cpu", with_graphs, tmp_path)
    assert [(tmp_path / f"end{rank}").read_text() for rank in range(2)] == ["True", "True"]


def large(rank: int) -> bytes:
    return bytes(1 << 24)


@pytest.mark.timeout(30, func_only=True)
def test_only_the_first_rank_sends_its_result(monkeypatch):
    """Those of others, which nobody reads, would fill their pipes."""
    monkeypatch.setattr(ranks, "EXIT_S", 60.0)
    assert len(on_ranks(3, "cpu", large)) == 1 << 24


def stuck(rank: int, others: bool) -> None:
    if rank == 0 or others:
        os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.timeout(20, func_only=True)
@pytest.mark.parametrize(
    ("others", "said"),
    [
        (False, "rank 0 gave no result within 1 s after another rank"),
        (True, "the ranks gave no result within 2 s"),
    ],
)
def test_nobody_waits_for_ever_for_a_rank_that_hangs(monkeypatch, others, said):
    monkeypatch.setattr(ranks, "FINISH_S", 1.0)
    with pytest.raises(TimeoutError, match=said):
        on_ranks(2, "cpu", stuck, others, time_limit_s=2 if others else None)


def gathered(mine: int) -> list[int]:
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def compile_threads(rank: int) -> list[int]:
    if rank > 0:
        return gathered(int(os.environ[ranks.COMPILE_THREADS]))
    # Which PyTorch calls at the first compilation; importing it takes a second.
    from torch._inductor.config import decide_compile_threads

    return gathered(decide_compile_threads())


def test_ranks_share_the_processors_that_compile():
    each = max(1, ranks.threads.num_cores() // 2)
    assert on_ranks(2, "cpu", compile_threads) == [each, each]


def left_alive(rank: int, plans: list[Plan], run: Run) -> list[list[int]]:
    """Run comparisons; count what each rank holds after each of decoders, caches and drafts."""
    held = []
    for plan in plans:
        _work(rank, plan, run)
        gc.collect()
        held.append(
            gathered(
                sum(isinstance(thing, (Decoder, KVCache, Draft)) for thing in gc.get_objects())
            )
        )
    return held


@pytest.mark.slow
def test_a_run_leaves_no_decoder_on_any_rank(tmp_path):
    """Its graphs would keep NCCL waiting at the end of the group, and its memory would not be
    free.
    """
    small = [
        *SMALL,
        "batch.context_len=128",
        "batch.generate_len=6",
        "cache.budget=32",
        f"runs_dir={tmp_path}",
    ]
    configs = (
        compose([*small, "hardware.tensor_parallel=2", f"draft={draft}"])
        for draft in ("self", "model", "eagle3")
    )
    run = Run.open(tmp_path, "0123456789ab", {})
    assert on_ranks(2, "cpu", left_alive, list(map(resolve, configs)), run) == [[0, 0]] * 3
