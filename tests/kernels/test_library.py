"""How the library of C++ kernels is built."""

import pytest

from magicdec.errors import UserError
from magicdec.kernels import library


@pytest.mark.skipif(library.compiler() is None, reason="needs a C++ compiler")
def test_it_is_built_once_and_what_is_in_the_way_is_one_line(tmp_path, monkeypatch, capsys):
    source, built = tmp_path / "some.cpp", tmp_path / "cache" / "kernels.so"
    monkeypatch.setattr(library, "path", lambda: built)
    monkeypatch.setattr(library, "SOURCES", [source])
    source.write_text("int main( {")
    for _ in range(2):
        assert library.obstacle().startswith("needs a C++ compiler, and ")
    assert " failed: " in library.obstacle()
    assert "error" in library.obstacle()
    assert capsys.readouterr().err.count("compiling") == 1  # it is tried once
    assert list(built.parent.iterdir()) == []
    with pytest.raises(UserError, match=r"^attention=cpp needs a C\+\+ compiler, .*; use attention=sdpa$"):
        library.load.__wrapped__()
    source.write_text("int fine;")
    library._obstacle.cache_clear()
    assert library.obstacle() is None
    assert list(built.parent.iterdir()) == [built]
    monkeypatch.setattr(library, "compiler", lambda: None)
    assert library.obstacle() is None
    built.unlink()
    assert library.obstacle() == "needs a C++ compiler, and neither g++ nor clang++ is installed (CXX names another)"


def test_a_compiler_that_fails_and_a_folder_that_cannot_be_made_are_obstacles(tmp_path, monkeypatch):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(library, "path", lambda: tmp_path / "cache" / "kernels.so")
    assert library.obstacle() == f"needs a C++ compiler, and {compiler} failed: exit code 1"
    (tmp_path / "file").touch()
    monkeypatch.setattr(library, "path", lambda: tmp_path / "file" / "kernels.so")
    assert library.obstacle().startswith("needs a C++ compiler and a place for what it makes: ")
