"""Work on several ranks, a process each: if one fails or dies, all are ended.

Every rank runs the same program on its own share of the models and computes the same tokens, so
that ranks need no instructions from each other. Rank 0's result is returned; the others' are the
same, and are dropped.
"""

import gc
import logging
import math
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from magicdec import threads
from magicdec.errors import exit_in_words

# The state of CUDA and of threads does not survive a fork.
CONTEXT = multiprocessing.get_context("spawn")
GRACE_S = 0.5  # for further failures: a rank that loses its peer fails too
EXIT_S = 5.0  # for the end of the process group and of the processes
FINISH_S = 300.0  # for rank 0's result once another rank has finished: they do the same work
COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"  # processes in which torch.compile compiles


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
    processes: list[BaseProcess] = []
    ends: list[Connection] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(num_ranks):
                end, other_end = CONTEXT.Pipe(duplex=False)
                work = (
                    rank,
                    num_ranks,
                    device,
                    str(Path(folder, "rendezvous")),
                    other_end,
                    function,
                    arguments,
                )
                processes.append(CONTEXT.Process(target=_rank, args=work, daemon=True))
                processes[-1].start()
                other_end.close()  # now a rank's death closes its pipe
                ends.append(end)
            result = _result(processes, ends, time_limit_s)
            _join(processes)
            return result
        finally:
            for process in processes:
                process.kill()
            _join(processes)


def _join(processes: list[BaseProcess]) -> None:
    """Wait for processes to end, for a limited time: a driver may keep even a killed one."""
    deadline = time.monotonic() + EXIT_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))


def _result(
    processes: list[BaseProcess], ends: list[Connection], time_limit_s: float | None
) -> Any:
    """Wait for rank 0's result, or for the first failure."""
    messages: dict[int, RankMessage] = {}
    late = f"the ranks gave no result within {time_limit_s or 0:g} s"
    deadline = math.inf if time_limit_s is None else time.monotonic() + time_limit_s
    while 0 not in messages:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(late)
        _receive(processes, ends, messages, None if left == math.inf else left)
        if any(message.error for message in messages.values()):
            deadline = time.monotonic() + GRACE_S
            while (left := deadline - time.monotonic()) > 0 and len(messages) < len(ends):
                _receive(processes, ends, messages, left)
            raise min((m for m in messages.values() if m.error), key=lambda m: m.at).error  # type: ignore[misc]
        if messages and time.monotonic() + FINISH_S < deadline:
            deadline = time.monotonic() + FINISH_S
            late = f"rank 0 gave no result within {FINISH_S:g} s after another rank"
    return messages[0].result


def _receive(
    processes: list[BaseProcess],
    ends: list[Connection],
    messages: dict[int, RankMessage],
    timeout: float | None,
) -> None:
    """Receive the messages of ranks that have any. A rank that died without one counts as the first
    to fail.
    """
    for end in wait([end for rank, end in enumerate(ends) if rank not in messages], timeout):
        rank = ends.index(end)  # type: ignore[arg-type]
        try:
            messages[rank] = ends[rank].recv()
        except EOFError:
            processes[rank].join(EXIT_S)
            messages[rank] = RankMessage(
                error=RuntimeError(f"rank {rank} died ({exit_in_words(processes[rank].exitcode)})")
            )


def _rank(
    rank: int,
    num_ranks: int,
    device: str,
    rendezvous: str,
    end: Connection,
    function: Callable,
    arguments: tuple,
) -> None:
    """Run a rank: the target of its process. Send the result before the process group ends, which
    may hang: the parent waits EXIT_S for that.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its ranks
    follow_parent()
    os.environ.setdefault(COMPILE_THREADS, str(max(1, threads.num_cores() // num_ranks)))
    if rank > 0:
        logging.disable()
    try:
        _join_group(rank, num_ranks, device, rendezvous)
        result = function(rank, *arguments)
        end.send(RankMessage(result if rank == 0 else None))
        del result
        _leave_group()
    except BaseException as error:
        with suppress(OSError):  # the parent has the result already, or has ended
            end.send(RankMessage(error=_portable(error, rank), at=time.time()))


def _join_group(rank: int, num_ranks: int, device: str, rendezvous: str) -> None:
    import torch  # here, because importing this module must not wait for it
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(rank)  # from here on, cuda means this one
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // num_ranks))
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=num_ranks,
        device_id=torch.device("cuda", rank) if device == "cuda" else None,
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


def follow_parent() -> None:
    """Exit when the parent process ends, even if it is killed."""

    def follow() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
