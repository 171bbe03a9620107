"""The shared library of C++ kernels, which is compiled in seconds when it is first needed.

It is cached in a file of the user's cache, for these sources, this PyTorch and this processor;
where nobody can write there, in a temporary folder of the user's own. The library is called with
plain pointers, because compiling with PyTorch's headers would take half a minute.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

from magicdec.errors import UserError, to_stderr

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

FOLDER = Path(__file__).parent
SOURCES = sorted(FOLDER.glob("*.cpp"))
# The vectors are written out; letting the compiler find more of them makes the short loops around
# them slower.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-tree-vectorize", "-fopenmp", "-fPIC")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# The memory of larger tensors, as of a KV cache, is returned. Older glibc takes 32 MiB at most.
LARGEST_KEPT = (64 << 20, 32 << 20)
MOST_KEPT = 256 << 20
NEEDS_COMPILER, CANNOT_LOAD = (
    "needs a C++ compiler (g++ 12 or newer, or clang++)",
    "cannot load its kernels",
)
OBSTACLES = (NEEDS_COMPILER, CANNOT_LOAD)  # how they begin


def obstacle() -> str | None:
    """Return why the library cannot be used here, or None if it can. Build it if needed."""
    if not path().exists() and (reason := _obstacle(path(), compiler())) is not None:
        return reason
    try:
        _open(path())
    except OSError as error:
        return (
            f"{CANNOT_LOAD}: {error}; delete that file, or name another folder with XDG_CACHE_HOME"
        )
    return None


@cache
def load() -> ctypes.CDLL:
    """Return the library. Build it if needed; raise UserError where that fails."""
    if (reason := obstacle()) is not None:
        raise UserError(f"attention=cpp {reason}; use attention=sdpa")
    _keep_freed_memory()
    return _open(path())


def _keep_freed_memory() -> None:
    """Let glibc keep the memory of freed tensors: fresh pages take up to a quarter of the time of a
    short prefill.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    # Any of these calls ends the growth of the first threshold, which begins at 128 KiB.
    if any(libc.mallopt(M_MMAP_THRESHOLD, size) for size in LARGEST_KEPT):
        libc.mallopt(M_TRIM_THRESHOLD, MOST_KEPT)


@cache
def _open(library: Path) -> ctypes.CDLL:
    content = library.read_bytes()
    # At the end of an ELF file of 64 bits.
    section_table = int.from_bytes(content[40:48], sys.byteorder)
    if content.startswith(b"\x7fELF") and len(content) <= section_table:
        # To load it would end the process with SIGBUS.
        raise OSError(f"{library}: the file is incomplete")
    return ctypes.CDLL(str(library))


def pointers(names: str) -> list[tuple[str, Any]]:
    """Return fields of a C structure that are pointers."""
    return list(zip(names.split(), repeat(ctypes.c_void_p)))


def numbers(names: str) -> list[tuple[str, Any]]:
    """Return fields of a C structure that are whole numbers of 64 bits."""
    return list(zip(names.split(), repeat(ctypes.c_int64)))


def compiler() -> str | None:
    """Return the system's C++ compiler, `CXX` first; None where there is none."""
    return next(
        filter(None, map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++"))), None
    )


@cache
def path() -> Path:
    """Return the library's file: one for each state of the sources, flags, PyTorch and
    processor.
    """
    files = [
        (file.name, file.read_bytes())
        for file in sorted(FOLDER.iterdir())
        if file.suffix in (".cpp", ".h")
    ]
    identity = (files, FLAGS, torch.__version__, platform.machine(), _processor())
    digest = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
    name = f"kernels-{digest}.so"
    folder = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cached = Path(folder, "magicdec")
    is_known = not folder.startswith("~")  # as it stays where the user has no home directory
    if is_known and ((cached / name).exists() or _is_writable(cached)):
        return cached / name
    temporary = Path(tempfile.gettempdir(), f"magicdec-{os.getuid()}")
    return (temporary if _is_private(temporary) else cached) / name


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _is_private(folder: Path) -> bool:
    """Return whether nobody else can write to a folder, which is made if needed: what lies there is
    executed.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o022


@cache
def _obstacle(library: Path, command: str | None) -> str | None:
    """Compile the library, unless another process does so meanwhile. Return why that fails, if it
    does.
    """
    if command is None:
        return f"{NEEDS_COMPILER}, and neither is installed (CXX names another)"
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with _in_turn(library.parent):
            if not library.exists():
                _build(library, command)
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line]
        return (
            f"{NEEDS_COMPILER}, and {command} failed:"
            f" {(lines or [f'exit code {error.returncode}'])[0]}"
        )
    except OSError as error:
        return (
            f"{NEEDS_COMPILER} and a folder for the library: {error}; XDG_CACHE_HOME names another"
        )
    return None


@contextmanager
def _in_turn(folder: Path) -> Iterator[None]:
    """Let one process after the other compile into a folder. Where it cannot be locked, several do
    so at the same time, which is a waste only.
    """
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _build(library: Path, command: str) -> None:
    """Compile the library, and put it in its place once it is whole."""
    to_stderr(f"attention=cpp: compiling its kernels with {command}, once")
    with tempfile.TemporaryDirectory(dir=library.parent) as folder, ThreadPoolExecutor() as pool:
        objects = [Path(folder, f"{source.stem}.o") for source in SOURCES]
        tasks = [
            ("-c", str(source), "-o", str(made))
            for source, made in zip(SOURCES, objects, strict=True)
        ]
        list(pool.map(lambda task: _compile(command, *task), tasks))
        made = Path(folder, library.name)
        _compile(command, "-shared", *map(str, objects), "-o", str(made))
        made.replace(library)


def _compile(command: str, *arguments: str) -> None:
    subprocess.run([command, *FLAGS, *arguments], capture_output=True, text=True, check=True)


def _processor() -> str:
    """Return the processor's model and features, on which -march=native depends, as far as they are
    known.
    """
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    lines = cpuinfo.read_text().splitlines()
    return "\n".join(
        dict.fromkeys(
            line for line in lines if line.startswith(("model name", "flags", "Features"))
        )
    )
