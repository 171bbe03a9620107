"""Work on several ranks, a process each: if one fails or dies, all are ended.

Every rank runs the same program on its own share of the models and computes the same tokens, so
that ranks need no instructions from each other. Rank 0's result is returned; the others' are the
same, and are dropped.
"""

import gc
import logging
import math
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from magicdec import threads
from magicdec.errors import exit_in_words
from magicdec.processes import PipedProcess, end_all, wait_for_all

# How processes begin: the state of CUDA and of threads does not survive a fork.
START = "spawn"
GRACE_S = 0.5  # for further failures: a rank that loses its peer fails too
EXIT_S = 5.0  # for the end of the process group and of the processes
FINISH_S = 300.0  # for rank 0's result once another rank has finished: they do the same work
COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"  # processes in which torch.compile compiles


class RankPlace(NamedTuple):
    """A rank's place in its process group."""

    rank: int
    num_ranks: int
    device: str
    rendezvous: str  # a file by which the ranks find each other


class RankMessage(NamedTuple):
    """The message of a rank at its end: a result, or an error and its time."""

    result: Any = None
    error: BaseException | None = None
    at: float = 0.0


def on_ranks(
    num_ranks: int,
    device: str,
    function: Callable,
    *arguments: Any,
    time_limit_s: float | None = None,
) -> Any:
    """Call `function(rank, *arguments)` in `num_ranks` new processes, a process group, and return
    rank 0's result.

    `device` is cuda (a GPU each, joined by NCCL) or cpu (gloo). The function, its arguments and its
    result travel by pickle, between processes of this program alone. The error of the first rank
    that fails is raised here, with that rank's traceback as a note, RuntimeError if a rank dies
    without a message, and TimeoutError if there is no result in time; the other ranks are then
    ended.
    """
    ranks: list[PipedProcess] = []
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = str(Path(folder, "rendezvous"))
        try:
            for rank in range(num_ranks):
                place = RankPlace(rank, num_ranks, device, rendezvous)
                ranks.append(PipedProcess(START, _rank, place, function, arguments, is_daemon=True))
            result = _result(ranks, time_limit_s)
            wait_for_all(ranks, EXIT_S)
            return result
        finally:
            end_all(ranks, EXIT_S)


def _result(ranks: list[PipedProcess], time_limit_s: float | None) -> Any:
    """Wait for rank 0's result, or for the first failure."""
    messages: dict[int, RankMessage] = {}
    late = f"the ranks gave no result within {time_limit_s or 0:g} s"
    deadline = math.inf if time_limit_s is None else time.monotonic() + time_limit_s
    while 0 not in messages:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(late)
        _receive(ranks, messages, None if left == math.inf else left)
        if any(message.error for message in messages.values()):
            raise _first_error(ranks, messages)
        if messages and time.monotonic() + FINISH_S < deadline:
            deadline = time.monotonic() + FINISH_S
            late = f"rank 0 gave no result within {FINISH_S:g} s after another rank"
    return messages[0].result


def _first_error(ranks: list[PipedProcess], messages: dict[int, RankMessage]) -> BaseException:
    """Return the error of the rank that failed first. Others have a moment to report theirs."""
    deadline = time.monotonic() + GRACE_S
    while (left := deadline - time.monotonic()) > 0 and len(messages) < len(ranks):
        _receive(ranks, messages, left)
    errors = [(message.at, message.error) for message in messages.values() if message.error]
    _, first = min(errors, key=itemgetter(0))
    return first


def _receive(
    ranks: list[PipedProcess], messages: dict[int, RankMessage], timeout: float | None
) -> None:
    """Receive the messages of ranks that have any. A rank that died without one counts as the first
    to fail.
    """
    numbers = {rank.pipe: number for number, rank in enumerate(ranks) if number not in messages}
    for pipe in wait(list(numbers), timeout):
        number = numbers[pipe]  # type: ignore[index]
        try:
            messages[number] = ranks[number].pipe.recv()
        except EOFError:
            how = exit_in_words(ranks[number].exit_code(EXIT_S))
            messages[number] = RankMessage(error=RuntimeError(f"rank {number} died ({how})"))


def _rank(end: Connection, place: RankPlace, function: Callable, arguments: tuple) -> None:
    """Run a rank: the target of its process. Send the result before the process group ends, which
    may hang: the parent waits EXIT_S for that.
    """
    rank = place.rank
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its ranks
    os.environ.setdefault(COMPILE_THREADS, str(max(1, threads.num_cores() // place.num_ranks)))
    if rank > 0:
        logging.disable()
    try:
        _join_group(place)
        result = function(rank, *arguments)
        end.send(RankMessage(result if rank == 0 else None))
        del result
        _leave_group()
    except BaseException as error:
        with suppress(OSError):  # the parent has the result already, or has ended
            end.send(RankMessage(error=_portable(error, rank), at=time.time()))


def _join_group(place: RankPlace) -> None:
    import torch  # here, because importing this module must not wait for it
    import torch.distributed as dist

    has_gpu = place.device == "cuda"
    if has_gpu:
        torch.cuda.set_device(place.rank)  # from here on, cuda means this one
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // place.num_ranks))
    dist.init_process_group(
        "nccl" if has_gpu else "gloo",
        init_method=f"file://{place.rendezvous}",
        rank=place.rank,
        world_size=place.num_ranks,
        device_id=torch.device("cuda", place.rank) if has_gpu else None,
    )


def _leave_group() -> None:
    import torch.distributed as dist

    gc.collect()  # NCCL waits for every graph that has captured one of its collectives
    dist.barrier()  # or the last to finish would lose a peer
    dist.destroy_process_group()


def _portable(error: BaseException, rank: int) -> BaseException:
    """Return an error that can be pickled, with its traceback as a note."""
    note = f"on rank {rank}:\n{''.join(traceback.format_exception(error))}"
    try:
        error = pickle.loads(pickle.dumps(error))
    except Exception:  # it cannot be pickled
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(note)
    return error
