"""Work on several ranks, a process each: if one fails or dies, all are ended.

Every rank runs the same program on its own share of the models and computes the same tokens, so that ranks need no
instructions from each other. Rank 0's result is returned; the others' are the same, and are dropped.
"""

import gc
import logging
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

CONTEXT = multiprocessing.get_context("spawn")  # the state of CUDA and of threads does not survive a fork
GRACE_S = 0.5  # for further failures: a rank that loses its peer fails too
EXIT_S = 5.0


class Message(NamedTuple):
    """The message of a rank at its end: a result, or an error and its time."""

    result: Any = None
    error: BaseException | None = None
    at: float = 0.0


def on_ranks(num_ranks: int, device: str, function: Callable, *arguments: Any) -> Any:
    """Call `function(rank, *arguments)` in `num_ranks` new processes, a process group; returns rank 0's result.

    `device` is cuda (a GPU each, joined by NCCL) or cpu (gloo). The function, its arguments and its result travel by
    pickle, between processes of this program alone. The error of the first rank that fails is raised here, with that
    rank's traceback as a note, and RuntimeError if a rank dies without a message; the other ranks are then ended.
    """
    processes: list[BaseProcess] = []
    ends: list[Connection] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(num_ranks):
                end, other_end = CONTEXT.Pipe(duplex=False)
                work = (rank, num_ranks, device, str(Path(folder, "rendezvous")), other_end, function, arguments)
                processes.append(CONTEXT.Process(target=_rank, args=work, daemon=True))
                processes[-1].start()
                other_end.close()  # now a rank's death closes its pipe
                ends.append(end)
            result = _result(processes, ends)
            for process in processes:
                process.join(EXIT_S)
            return result
        finally:
            for process in processes:
                process.kill()
                process.join()


def _result(processes: list[BaseProcess], ends: list[Connection]) -> Any:
    """Wait for rank 0's result, or for the first failure."""
    messages: dict[int, Message] = {}
    while 0 not in messages:
        _receive(processes, ends, messages, None)
        if any(message.error for message in messages.values()):
            deadline = time.monotonic() + GRACE_S
            while (left := deadline - time.monotonic()) > 0 and len(messages) < len(ends):
                _receive(processes, ends, messages, left)
            raise min((m for m in messages.values() if m.error), key=lambda m: m.at).error  # type: ignore[misc]
    return messages[0].result


def _receive(
    processes: list[BaseProcess], ends: list[Connection], messages: dict[int, Message], timeout: float | None
) -> None:
    """Receive the messages of ranks that have any. A rank that died without one counts as the first to fail."""
    for end in wait([end for rank, end in enumerate(ends) if rank not in messages], timeout):
        rank = ends.index(end)  # type: ignore[arg-type]
        try:
            messages[rank] = ends[rank].recv()
        except EOFError:
            processes[rank].join(EXIT_S)
            messages[rank] = Message(error=RuntimeError(f"rank {rank} died ({_exit(processes[rank].exitcode)})"))


def _exit(code: int | None) -> str:
    """Return an exit code in words."""
    if code == -9:
        return "killed by SIGKILL, perhaps because the system was out of memory"
    return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


def _rank(
    rank: int, num_ranks: int, device: str, rendezvous: str, end: Connection, function: Callable, arguments: tuple
) -> None:
    """Run a rank: the target of its process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its ranks
    follow_parent()
    if rank > 0:
        logging.disable()
    try:
        message = Message(_joined(rank, num_ranks, device, rendezvous, function, arguments))
    except BaseException as error:
        message = Message(error=_portable(error, rank), at=time.time())
    end.send(message)


def _joined(rank: int, num_ranks: int, device: str, rendezvous: str, function: Callable, arguments: tuple) -> Any:
    """Call the function within the process group."""
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
    result = function(rank, *arguments)
    gc.collect()  # NCCL waits for every graph that has captured one of its collectives
    dist.barrier()  # or the last to finish would lose a peer
    dist.destroy_process_group()
    return result


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
