"""Short hashes of files, so that a run whose code, checkpoint or text was edited is another run."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from magicdec.errors import UserError
from magicdec.inputs.others import check_regular

LENGTH = 16  # hex digits
WHOLE_BYTES = 1_000_000_000  # files are read whole, the small ones first, up to this sum
START_BYTES = 1 << 20  # of a larger file: its start, which holds the header of a checkpoint,
SAMPLES, SAMPLE_BYTES = 64, 1 << 16  # and evenly spaced samples
# Suffixes of what decides a result; checkpoints have their own fingerprint.
CODE = frozenset({".py", ".cpp", ".h", ".yaml", ".csv"})


def of_files(files: Mapping[str, Path], key: str = "") -> str:
    """Return a hash of files by name. Raise UserError, which begins with `key`, for a file that
    cannot be read.

    It covers the content of files of up to 1 GB together; of further ones the size, the time of the
    last change, the start and samples. It does not depend on the machine, nor, up to 1 GB, on when
    the files were written.
    """
    digest, total = hashlib.sha256(), 0
    stats = {}
    for name, path in files.items():
        with _readable(path, key):
            check_regular(path)
            stats[name] = path.stat()
    for name, stat in sorted(stats.items(), key=lambda item: (item[1].st_size, item[0])):
        total += stat.st_size
        whole = total <= WHOLE_BYTES
        with _readable(files[name], key):
            content = _digest(files[name], whole, stat.st_size, stat.st_mtime_ns, stat.st_ino)
        digest.update(f"{name}\0{content}\0".encode())
    return digest.hexdigest()[:LENGTH]


@contextmanager
def _readable(path: Path, key: str) -> Iterator[None]:
    """Raise UserError for the system's error of a file, which may not name it."""
    try:
        yield
    except OSError as error:
        begin = f"{key}: " if key else ""
        raise UserError(f"{begin}{path} cannot be read: {error.strerror}") from None


def of_code(place: Path) -> str:
    """Return a hash of a module, or of a package's folder: its source, and the data files that it
    computes with.
    """
    paths = [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()]
    return of_files(
        {path.relative_to(place).as_posix(): path for path in paths if path.suffix in CODE}
    )


@lru_cache(maxsize=1024)
def _digest(path: Path, whole: bool, size: int, mtime_ns: int, inode: int) -> str:
    """Return the hash of one file. Many runs of a process have the same files: each is read once,
    until it changes.
    """
    with path.open("rb") as file:
        if whole:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256(f"{size} {mtime_ns}".encode() + file.read(START_BYTES))
        # A smaller file is whole in its start.
        for sample in range(SAMPLES if size > START_BYTES else 0):
            file.seek((size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
