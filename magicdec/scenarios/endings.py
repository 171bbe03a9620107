"""Ends of a run before its work is done: by a signal, a mistake, a lack of memory or a fault."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from magicdec.config.schema import Config
from magicdec.errors import Stopped, UserError, in_one_line, is_out_of_memory


@contextmanager
def stoppable() -> Iterator[None]:
    """Raise Stopped within at SIGTERM, which would end the process at once."""
    if threading.current_thread() is not threading.main_thread():  # which alone gets signals
        yield
        return

    def stop(*_: Any) -> None:
        raise Stopped("stopped by SIGTERM")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def reason_of(error: BaseException, config: Config) -> tuple[str, str]:
    """Return why a run failed, in words and as a kind (Run.fail)."""
    if isinstance(error, UserError):
        return str(error), error.kind
    if is_out_of_memory(error):
        rows_key, context_key = map(config.scenario.key_of, ("batch.size", "batch.context_len"))
        rows, context_len = config.scenario.largest(config.batch)
        size = f"{rows_key}={rows} at {context_key}={context_len}"
        reason = f"{size}: out of memory ({in_one_line(error)})"
        return f"{reason}; choose less of either, or of batch.prefill_chunk", "out_of_memory"
    if isinstance(error, Stopped):
        return str(error), "stopped"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "interrupted"
    return in_one_line(error), "crashed"
