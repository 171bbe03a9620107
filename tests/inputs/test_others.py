"""Files and JSON that anyone may have written: all errors are of two kinds."""

import os

import pytest

from magicdec.inputs.others import from_json, read_regular

DEEP = "[" * 100_000 + "]" * 100_000


def test_json_is_read_and_what_is_none_is_a_value_error():
    assert from_json('{"a": [1, "b"]}') == {"a": [1, "b"]}
    for text, reason in (("", "Expecting value"), (DEEP, "^nested too deeply$")):
        with pytest.raises(ValueError, match=reason):
            from_json(text)


@pytest.mark.timeout(20)
def test_what_is_no_regular_file_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("1")
    assert read_regular(tmp_path / "file") == b"1"
    for name, reason in {"pipe": "not a regular", "gone": "No such file", "": "directory"}.items():
        with pytest.raises(OSError, match=reason):
            read_regular(tmp_path / name)
