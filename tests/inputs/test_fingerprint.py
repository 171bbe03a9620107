"""Fingerprints of files: an edit anywhere is seen, at the price of reading a gigabyte at most."""

import os

import pytest

from magicdec.errors import UserError
from magicdec.inputs import fingerprint
from magicdec.inputs.fingerprint import of_code, of_files

MEGABYTE = 1 << 20


@pytest.fixture
def files(tmp_path):
    """A large file and a small one, of which only the small one is read whole."""
    (tmp_path / "large").write_bytes(os.urandom(8 * MEGABYTE))
    (tmp_path / "small").write_bytes(os.urandom(1000))
    return {path.name: path for path in tmp_path.iterdir()}


def edit(path, place, keep_time=True):
    """Change a byte, and the time of the last change only if asked to."""
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + (0 if keep_time else 10**6)))
    fingerprint._digest.cache_clear()  # as in another process


def test_content_and_names_count_and_neither_time_nor_order(files):
    before = of_files(files)
    assert len(before) == 16
    assert of_files(dict(reversed(files.items()))) == before
    os.utime(files["large"], (1, 1))
    assert of_files(files) == before
    assert of_files({"other": files["large"], "small": files["small"]}) != before
    assert of_files({"large": files["small"], "small": files["large"]}) != before


@pytest.mark.parametrize(
    ("whole_bytes", "place"),
    [
        *(
            (fingerprint.WHOLE_BYTES, place)
            for place in (0, 100_000, 3 * MEGABYTE + 17, 8 * MEGABYTE - 1)
        ),
        *(
            (MEGABYTE, place)
            for place in (0, MEGABYTE - 1, 8 * MEGABYTE - 1, 8 * MEGABYTE - (1 << 16))
        ),
    ],
)
def test_any_byte_counts_and_of_a_large_file_the_start_and_samples(
    files, monkeypatch, whole_bytes, place
):
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", whole_bytes)
    before = of_files(files)
    edit(files["large"], place)
    assert of_files(files) != before


def test_of_a_large_file_the_time_counts_and_small_ones_are_read_whole(files, monkeypatch):
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", MEGABYTE)
    before = of_files(files)
    os.utime(files["small"], (1, 1))
    assert of_files(files) == before
    edit(files["small"], 500)
    assert (edited := of_files(files)) != before
    edit(files["large"], 3 * MEGABYTE + 17)
    assert of_files(files) == edited, "between samples only the time tells"
    edit(files["large"], 3 * MEGABYTE + 17, keep_time=False)
    assert of_files(files) != edited


def test_small_files_may_be_more_than_what_is_read_whole(files, monkeypatch):
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", 500)
    before = of_files({"small": files["small"]})
    edit(files["small"], 999)
    assert of_files({"small": files["small"]}) != before


def test_a_process_reads_a_file_once_and_again_when_it_has_changed(files, monkeypatch):
    reads = []
    digest = fingerprint.hashlib.file_digest
    monkeypatch.setattr(
        fingerprint.hashlib, "file_digest", lambda *a: reads.append(a) or digest(*a)
    )
    before = of_files(files)
    assert of_files(files) == before
    assert len(reads) == 2
    with files["small"].open("ab") as file:
        file.write(b"more")
    assert of_files(files) != before
    assert len(reads) == 3


def test_the_code_is_every_source_file(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.py").write_text("1")
    hashes = [of_code(tmp_path)]
    (tmp_path / "README.md").write_text("said")
    assert of_code(tmp_path) == hashes[0]
    for name, content in (
        ("sub/a.py", "22"),
        ("new.py", ""),
        ("kernel.cpp", "int x;"),
        ("calibrated.yaml", "a: 1"),
    ):
        (tmp_path / name).write_text(content)
        hashes.append(of_code(tmp_path))
    (tmp_path / "new.py").rename(tmp_path / "renamed.py")
    hashes.append(of_code(tmp_path))
    assert len(set(hashes)) == 6


def test_a_file_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(
        UserError, match=rf"^{tmp_path}/gone cannot be read: No such file or directory$"
    ):
        of_files({"gone": tmp_path / "gone"})


@pytest.mark.timeout(20)
def test_an_error_names_the_key_and_the_file_even_if_the_system_does_not(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, reason in {
        "/proc/self/mem": "Input/output error",
        "pipe": "not a regular file",
    }.items():
        with pytest.raises(UserError) as refused:
            of_files({"file": tmp_path / path}, "data.path=x")
        assert str(refused.value) == f"data.path=x: {tmp_path / path} cannot be read: {reason}"
