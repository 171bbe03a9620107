"""The programs of examples/ run, on the bundled pair, and print what they are for."""

import pytest

from tests.programs import ROOT, python

SAYS = {
    "generate.py": "tokens per round",
    "predict.py": "8xh100",
    "own_policy.py": "spread'] acceptance 0.",
}


def test_every_example_is_tested():
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_examples_run(name, tmp_path):
    done = python(ROOT / "examples" / name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert SAYS[name] in done.stdout
