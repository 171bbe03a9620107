"""`magicdec check-plugin`: what is right passes, and what is wrong is found, of policies and drafts."""

import re

import pytest

from magicdec import conformance
from magicdec.config import registry
from tests.test_plugins import EXAMPLES, OPTIONS, written

POLICY, DRAFT = EXAMPLES
ONE_MORE = "compact = True\n\n    def extra_bytes(self, *_):\n        return 4.0"
NO_ROWS = "    settings: Strided\n\n    def copy_row(self, row, source):\n        pass\n"


@pytest.fixture
def check(tmp_path, monkeypatch, capsys, request):
    """A function that checks a module of the working directory with this source."""
    monkeypatch.setattr(registry, "PLUGINS", {})
    for one in (registry.POLICIES, registry.DRAFTS):
        monkeypatch.setattr(one, "_entries", {name: one[name] for name in one})  # all are loaded now

    def run(source, options=OPTIONS):
        module = re.sub(r"\W", "_", request.node.name)
        monkeypatch.chdir(written(tmp_path, {f"{module}.py": source, **options}))
        monkeypatch.syspath_prepend(tmp_path)
        return conformance.main([module]), capsys.readouterr()

    return run


@pytest.mark.parametrize(("source", "lines"), [(POLICY, 7), (DRAFT, 4), (POLICY + DRAFT, 11)])
def test_the_examples_of_the_documentation_pass(check, source, lines):
    code, said = check(source)
    assert (code, said.err, said.out.count("\n")) == (0, "", lines)
    assert "FAILED" not in said.out


@pytest.mark.parametrize(
    ("source", "wrong", "by", "line"),
    [
        (POLICY, "compact = True", ONE_MORE, "takes the bytes"),
        (POLICY, "return max(0, budget", "1 / 0\n        return max(0, budget", "ZeroDivisionError: division by zero"),
        (POLICY, "    settings: Strided\n", NO_ROWS, "copy_row leaves out what proposals depend on"),
        (
            DRAFT,
            "    @classmethod\n",
            "    cache_bytes = 64\n\n    @classmethod\n",
            "declared 0, reported 64, allocated 0 bytes",
        ),
    ],
)
def test_what_is_wrong_is_found(check, source, wrong, by, line):
    assert wrong in source
    code, said = check(source.replace(wrong, by))
    assert code == 1
    assert line in "".join(found for found in said.out.splitlines() if found.startswith("FAILED"))


def test_an_output_that_is_not_the_targets_is_found(check, monkeypatch):
    generate = conformance.both_ways
    monkeypatch.setattr(conformance, "both_ways", lambda batch: (False, *generate(batch)[1:]))
    code, said = check(DRAFT)
    assert (code, said.out.count("its output is not the target's at gamma 1, budget 40")) == (1, 1)


@pytest.mark.parametrize(
    ("source", "options", "code", "line"),
    [
        (DRAFT, {}, 1, "FAILED  draft=echo          has an option: conf/draft/echo.yaml is missing"),
        ("x = 1\n", {}, 2, "registers neither a cache policy nor a draft"),
        ("1 / 0\n", {}, 2, "cannot be imported (ZeroDivisionError: division by zero)"),
    ],
)
def test_a_module_without_an_option_or_a_choice(check, source, options, code, line):
    got, said = check(source, options)
    assert got == code
    assert line in said.out + said.err
