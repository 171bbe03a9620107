"""The log of a run: a file in its folder."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from typing_extensions import override

log = logging.getLogger(__name__)

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@contextmanager
def logging_to(path: Path, run_id: str) -> Iterator[None]:
    """Append the program's log to a file, and the traceback of an exception that passes through."""
    handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    logging.getLogger().addHandler(handler)
    try:
        with _more_detail():
            log.info("run %s", run_id)
            yield
    except BaseException:
        record = log.makeRecord(log.name, logging.ERROR, __file__, 0, "failed", (), sys.exc_info())
        # Into the file alone: the command line prints it on the terminal.
        handler.handle(record)
        raise
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()


@contextmanager
def _more_detail() -> Iterator[None]:
    """Log the package's INFO into log files, and no more than before elsewhere."""
    package = logging.getLogger("magicdec")
    level, effective = package.level, package.getEffectiveLevel()
    others = {
        handler: handler.level
        for handler in logging.getLogger().handlers
        if not isinstance(handler, _LogFile)
    }
    try:
        if effective > logging.INFO:
            package.setLevel(logging.INFO)
            for handler in others:
                handler.setLevel(max(handler.level, effective))
        yield
    finally:
        package.setLevel(level)
        for handler, before in others.items():
            handler.setLevel(before)


class _LogFile(logging.FileHandler):
    """A log file whose own errors, such as a full disk, do not show on the terminal."""

    @override
    def handleError(self, record: logging.LogRecord) -> None:
        """Lose the record."""

    @override
    def close(self) -> None:
        """Lose what was not written yet."""
        with suppress(OSError):
            super().close()
