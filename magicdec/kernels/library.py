"""The shared library of C++ kernels: compiled when it is first needed, in seconds, and kept.

A file of the user's cache holds what was compiled from these very sources for this PyTorch and this processor. The
library is called with plain pointers: through PyTorch's own headers the compilation would take half a minute.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from magicdec.errors import UserError

log = logging.getLogger(__name__)

SOURCES = [Path(__file__).with_name(name) for name in ("attention.cpp", "prefill.cpp", "linear.cpp", "layer.cpp")]
HEADERS = [Path(__file__).with_name(name) for name in ("vectors.h", "call.h", "matmul.h")]
# The vectors are written out; letting the compiler find more of them makes the short loops around them slower.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-tree-vectorize", "-fopenmp", "-shared", "-fPIC")
NO_COMPILER = "needs a C++ compiler, and neither g++ nor clang++ is installed (CXX names another)"


def obstacle() -> str | None:
    """Return why there can be no library here, or None where it is built or can be."""
    return None if path().exists() or compiler() else NO_COMPILER


@cache
def load() -> ctypes.CDLL:
    """Return the library. Build it if needed; raise UserError where that fails."""
    return ctypes.CDLL(str(build()))


def compiler() -> str | None:
    """Return the system's C++ compiler, `CXX` first; None where there is none."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++"))), None)


@cache
def path() -> Path:
    """Return the library's file: one for each source, flags, PyTorch and processor."""
    texts = [source.read_text() for source in (*SOURCES, *HEADERS)]
    identity = (texts, FLAGS, torch.__version__, platform.machine(), _processor())
    digest = hashlib.sha256(repr(identity).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "magicdec")
    return folder / f"kernels-{digest}.so"


def build() -> Path:
    """Compile the library unless it exists, and return its file. Several processes may do so at the same time."""
    library, command = path(), compiler()
    if library.exists():
        return library
    if command is None:
        raise UserError(
            "attention=cpp needs a C++ compiler (g++ or clang++), and none is installed; use attention=sdpa"
        )
    log.info("attention=cpp: compiling the kernels with %s, once", command)
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder, library.name)
        done = subprocess.run([command, *FLAGS, *map(str, SOURCES), "-o", str(made)], capture_output=True, text=True)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or [f"exit code {done.returncode}"]
            raise UserError(f"attention=cpp: {command} failed: {errors[0]}; use attention=sdpa")
        made.replace(library)
    return library


def _processor() -> str:
    """Return what -march=native depends on, where the operating system tells."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    lines = cpuinfo.read_text().splitlines()
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(("model name", "flags", "Features"))))
