"""Ranks as processes: errors and deaths are told, and nothing hangs."""

import os
import signal
import time

import pytest
import torch.distributed as dist

from magicdec.errors import UserError
from magicdec.scenarios.ranks import on_ranks

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


def test_a_killed_rank_ends_the_others():
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 1 died .*SIGKILL"):
        on_ranks(2, "cpu", killed)
    assert time.monotonic() - start < 30
