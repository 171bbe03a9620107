"""The build of the C++ kernels, and its processors."""

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from magicdec.attention import backends
from magicdec.errors import UserError
from magicdec.kernels import library
from tests.programs import Program

BUILDS = """
import sys
from pathlib import Path
from magicdec.kernels import library
sys.exit(library._obstacle(Path(sys.argv[1]), sys.argv[2]))
"""


@pytest.mark.skipif(library.compiler() is None, reason="needs a C++ compiler")
def test_it_is_built_once_and_what_is_in_the_way_is_one_line(tmp_path, monkeypatch, capsys):
    source, built = tmp_path / "some.cpp", tmp_path / "cache" / "kernels.so"
    monkeypatch.setattr(library, "path", lambda: built)
    monkeypatch.setattr(library, "SOURCES", [source])
    source.write_text("int main( {")
    for _ in range(2):
        assert library.obstacle().startswith(f"{library.NEEDS_COMPILER}, and ")
    assert " failed: " in library.obstacle()
    assert "error" in library.obstacle()
    assert capsys.readouterr().err.count("compiling") == 1  # it is tried once
    assert list(built.parent.iterdir()) == []
    with pytest.raises(
        UserError, match=r"^attention=cpp needs a C\+\+ compiler .*; use attention=sdpa$"
    ):
        library.load.__wrapped__()
    source.write_text("int fine;")
    library._obstacle.cache_clear()
    assert library.obstacle() is None
    assert list(built.parent.iterdir()) == [built]
    monkeypatch.setattr(library, "compiler", lambda: None)
    assert library.obstacle() is None
    built.unlink()
    assert (
        library.obstacle()
        == "needs a C++ compiler (g++ 12 or newer, or clang++), and neither is installed (CXX names"
        " another)"
    )


def test_processes_that_begin_together_compile_once(tmp_path):
    """The compiler notes each call, and is slow enough for all to begin."""
    compiler, built = tmp_path / "c++", tmp_path / "cache" / "kernels.so"
    compiler.write_text(
        f'#!/bin/sh\necho >> {tmp_path}/calls\nsleep 0.3\nfor last; do :; done\necho > "$last"\n'
    )
    compiler.chmod(0o755)
    programs = [Program("-c", BUILDS, built, compiler) for _ in range(3)]
    assert [program.finish().returncode for program in programs] == [0, 0, 0]
    calls = (tmp_path / "calls").read_text().count("\n")
    assert calls == len(library.SOURCES) + 1, "each source, and what links them"


def test_each_source_decides_the_library_s_name(tmp_path, monkeypatch):
    folder = tmp_path / "kernels"
    shutil.copytree(library.FOLDER, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    monkeypatch.setattr(library, "FOLDER", folder)
    names = [library.path.__wrapped__()]
    for file in folder.iterdir():
        file.write_text(file.read_text() + "\n")
        names.append(library.path.__wrapped__())
    assert {"ahead.h", "attention.cpp"} < {file.name for file in folder.iterdir()}
    assert len(set(names)) == len(names)


def test_a_compiler_that_fails_and_a_folder_that_cannot_be_made_are_obstacles(
    tmp_path, monkeypatch
):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(library, "path", lambda: tmp_path / "cache" / "kernels.so")
    assert library.obstacle() == f"{library.NEEDS_COMPILER}, and {compiler} failed: exit code 1"
    (tmp_path / "file").touch()
    monkeypatch.setattr(library, "path", lambda: tmp_path / "file" / "kernels.so")
    reason = library.obstacle()
    assert reason.startswith(f"{library.NEEDS_COMPILER} and a folder for the library: ")
    assert reason.endswith("; XDG_CACHE_HOME names another")


def test_where_the_cache_is_not_writable_the_library_is_in_a_folder_of_the_users_own(
    tmp_path, monkeypatch
):
    """Nobody else may write there: what lies in it is executed."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cached = tmp_path / "file" / "magicdec"
    private = tmp_path / f"magicdec-{os.getuid()}"
    assert library.path.__wrapped__().parent == private
    assert private.stat().st_mode & 0o777 == 0o700
    private.chmod(0o777)
    assert library.path.__wrapped__().parent == cached
    private.rmdir()
    private.symlink_to(tmp_path)
    assert library.path.__wrapped__().parent == cached
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert library.path.__wrapped__().parent == tmp_path / "home" / "magicdec"


def test_without_a_home_directory_the_library_is_in_that_folder_too(no_home, here, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(here))
    assert library.path.__wrapped__().parent == here / f"magicdec-{os.getuid()}"
    assert not (here / "~").exists()


@pytest.mark.parametrize(("most", "taken"), [(32 << 20, 32 << 20), (1 << 40, 64 << 20)])
def test_the_largest_threshold_that_glibc_takes_is_set(most, taken, monkeypatch):
    """Older glibc refuses more than 32 MiB."""
    settings = {}

    class Glibc:
        def mallopt(self, parameter, num_bytes):
            if parameter == -3 and num_bytes > most:  # M_MMAP_THRESHOLD
                return 0
            settings[parameter] = num_bytes
            return 1

    monkeypatch.setattr(library.ctypes, "CDLL", lambda name: Glibc())
    library._keep_freed_memory()
    assert settings == {-3: taken, -1: 256 << 20}


@pytest.mark.skipif(library.compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("share", [0.0, 0.3, None])
def test_a_library_that_cannot_be_loaded_is_an_obstacle(share, tmp_path, monkeypatch):
    """Such as one that was cut off, or of another kind of machine."""
    source, built = tmp_path / "some.cpp", tmp_path / "kernels.so"
    source.write_text("int numbers[5000] = {1};")
    monkeypatch.setattr(library, "SOURCES", [source])
    assert library._obstacle(built, library.compiler()) is None
    whole = built.read_bytes()
    built.write_bytes(b"another" if share is None else whole[: int(share * len(whole))])
    monkeypatch.setattr(library, "path", lambda: built)
    reason = (
        rf"cannot load its kernels: {built}: .*; delete that file, or name another folder with"
        r" XDG_CACHE_HOME"
    )
    name, why = backends.choose("auto", torch.device("cpu"), torch.float32, [64])
    assert name == "sdpa"
    assert re.search(reason, why)
    assert re.fullmatch(reason, library.obstacle())
    with pytest.raises(UserError, match=rf"^attention=cpp {reason}; use attention=auto$"):
        backends.choose("cpp", torch.device("cpu"), torch.float32, [64])
    with pytest.raises(UserError, match=rf"^attention=cpp {reason}; use attention=sdpa$"):
        library.load.__wrapped__()
    built.write_bytes(whole)
    assert library.obstacle() is None


def passes_with(flags: str, folder: Path, *files: str, **variables: str) -> None:
    """Run these files' tests on kernels that are compiled with more flags."""
    tests = [str(Path(__file__).parents[1] / file) for file in files]
    command = [sys.executable, "-m", "pytest", "-qs", "-n0", "-p", "tests.kernels.flags", *tests]
    environment = os.environ | {"XDG_CACHE_HOME": str(folder), "KERNEL_FLAGS": flags} | variables
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(folder.glob("magicdec/*.so"))) == 1


@pytest.mark.soak
@pytest.mark.skipif(
    platform.machine() != "x86_64" or library.compiler() is None,
    reason="for x86-64, with a compiler",
)
@pytest.mark.parametrize("flag", ["-march=haswell", "-mno-avx512bf16"])
def test_kernels_for_other_processors_compute_the_same(flag, tmp_path):
    """Those with AVX2, and those that do not multiply numbers in bf16."""
    files = (
        "attention/test_cpp.py",
        "models/test_operators.py",
        "models/test_passes.py",
        "kernels/test_fuzz.py",
    )
    passes_with(flag, tmp_path, *files)


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("g++") is None, reason="needs GCC, whose sanitizers Python can be started with"
)
def test_kernels_neither_read_nor_write_beyond_their_tensors(tmp_path):
    """Fuzz them under ASan and UBSan: in half a minute, of which compiling takes a third."""
    runtime = subprocess.check_output(["g++", "-print-file-name=libasan.so"], text=True).strip()
    flags = "-O0 -fsanitize=address,undefined -fno-sanitize-recover=undefined"
    # Python frees little at its end.
    options = {"CXX": "g++", "LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0"}
    passes_with(flags, tmp_path, "kernels/test_fuzz.py", **options)


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("aarch64-linux-gnu-g++") is None, reason="needs a cross compiler for arm"
)
def test_kernels_compile_for_arm(tmp_path, monkeypatch):
    monkeypatch.setattr(
        library, "FLAGS", tuple(flag for flag in library.FLAGS if flag != "-march=native")
    )
    assert library._obstacle(tmp_path / "kernels.so", "aarch64-linux-gnu-g++") is None
