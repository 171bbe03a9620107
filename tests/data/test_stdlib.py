import sys

from magicdec.data import stdlib
from tests.inputs.test_plugins import written


def test_the_splits_are_disjoint_and_the_held_out_one_is_complete_and_large_enough():
    held_out, training = stdlib.documents(held_out=True), stdlib.documents(held_out=False)
    assert held_out.keys() == stdlib.HELD_OUT
    assert not held_out.keys() & training.keys()
    assert not set(held_out.values()) & set(training.values())
    assert set(sys.stdlib_module_names) >= stdlib.HELD_OUT
    assert 1.3e6 < sum(map(len, held_out.values())) < 3e6


def test_a_package_is_one_document_and_tests_tables_and_installed_packages_are_none(tmp_path):
    left_out = ["json/tests/test_json.py", "test/test_json.py", "site-packages/torch/__init__.py"]
    left_out += ["encodings/cp037.py", "html/entities.py", "_sysconfigdata__linux.py"]
    kept = {
        "asyncio/__init__.py": "one",
        "asyncio/events.py": "two",
        "json/__init__.py": "",
        "html/parser.py": "yes",
    }
    root = written(tmp_path, kept | dict.fromkeys(left_out, "no"))
    assert list(stdlib.documents(held_out=True, root=root).values()) == ["one\ntwo"]
    assert stdlib.documents(held_out=False, root=root) == {"html": "yes", "json": ""}


def test_twins_are_counted_once_wherever_the_code_is(tmp_path):
    older = written(
        tmp_path / "older",
        {"datetime.py": "the code", "decimal.py": "x", "_pydecimal.py": "decimal's code"},
    )
    newer = written(
        tmp_path / "newer",
        {"datetime.py": "x", "_pydatetime.py": "the code", "_pyrepl/main.py": "shell"},
    )
    assert stdlib.documents(held_out=False, root=older) == {
        "datetime": "the code",
        "decimal": "decimal's code",
    }
    assert stdlib.documents(held_out=False, root=newer) == {
        "_pyrepl": "shell",
        "datetime": "the code",
    }
