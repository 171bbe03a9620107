"""How the library of C++ kernels is built."""

import pytest

from magicdec.errors import UserError
from magicdec.kernels import library


@pytest.mark.skipif(library.compiler() is None, reason="needs a C++ compiler")
def test_it_is_built_once_and_the_compiler_s_error_is_one_line(tmp_path, monkeypatch):
    source = tmp_path / "broken.cpp"
    monkeypatch.setattr(library, "path", lambda: tmp_path / "cache" / "kernels.so")
    monkeypatch.setattr(library, "SOURCES", [source])
    source.write_text("int main( {")
    with pytest.raises(UserError, match=r"^attention=cpp: \S+ failed: .*error.*; use attention=sdpa$"):
        library.build()
    assert list((tmp_path / "cache").iterdir()) == []
    source.write_text("int fine;")
    built = library.build()
    monkeypatch.setattr(library, "compiler", lambda: None)
    assert library.build() == built
    assert library.obstacle() is None
    built.unlink()
    assert library.obstacle() == library.NO_COMPILER
    with pytest.raises(UserError, match="needs a C\\+\\+ compiler"):
        library.build()
