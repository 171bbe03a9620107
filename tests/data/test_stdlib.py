import sys
from pathlib import Path

from magicdec.data import stdlib


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_splits_are_disjoint_and_the_held_out_one_is_complete():
    held_out, training = stdlib.documents(held_out=True), stdlib.documents(held_out=False)
    assert held_out.keys() == stdlib.HELD_OUT
    assert not held_out.keys() & training.keys()
    assert not set(held_out.values()) & set(training.values())
    assert set(sys.stdlib_module_names) >= stdlib.HELD_OUT


def test_there_is_enough_held_out_text():
    assert 1.3e6 < sum(map(len, stdlib.documents(held_out=True).values())) < 3e6


def test_a_package_is_one_document_and_tests_tables_and_installed_packages_are_none(tmp_path):
    root = write(
        tmp_path,
        {
            "asyncio/__init__.py": "one",
            "asyncio/events.py": "two",
            "json/__init__.py": "",
            "json/tests/test_json.py": "no",
            "test/test_json.py": "no",
            "site-packages/torch/__init__.py": "no",
            "encodings/cp037.py": "no",
            "html/entities.py": "no",
            "html/parser.py": "yes",
            "_sysconfigdata__linux.py": "no",
        },
    )
    assert list(stdlib.documents(held_out=True, root=root).values()) == ["one\ntwo"]
    assert stdlib.documents(held_out=False, root=root) == {"html": "yes", "json": ""}


def test_twins_are_counted_once_wherever_the_code_is(tmp_path):
    older = write(tmp_path / "older", {"datetime.py": "the code", "decimal.py": "x", "_pydecimal.py": "decimal's code"})
    newer = write(tmp_path / "newer", {"datetime.py": "x", "_pydatetime.py": "the code", "_pyrepl/main.py": "shell"})
    assert stdlib.documents(held_out=False, root=older) == {"datetime": "the code", "decimal": "decimal's code"}
    assert stdlib.documents(held_out=False, root=newer) == {"_pyrepl": "shell", "datetime": "the code"}
