"""`magicdec check-plugin`: what is right passes, and what is wrong is found, of policies and
drafts.
"""

import re

import pytest
import torch

from magicdec.commands import check_plugin
from magicdec.config import registry
from magicdec.conformance import examine as conformance
from magicdec.conformance.contracts import drawn_otherwise
from magicdec.errors import UserError
from tests.inputs.test_plugins import EXAMPLES, OPTIONS, written

POLICY, DRAFT = EXAMPLES
ONE_MORE = "compact = True\n\n    def extra_bytes(self, *_):\n        return 4.0"
SAMPLES = """
        tokens_BG = state.tokens_BS.gather(1, place_B1).repeat(1, gamma)
        q_BGV = torch.zeros(*tokens_BG.shape, 61).scatter_(-1, tokens_BG[..., None], 1.0)
        return Proposal(tokens_BG, {q})
"""
RETURNS = "        return Proposal(state.tokens_BS.gather(1, place_B1).repeat(1, gamma), None)\n"
REMEMBERS = """
        known_BS = getattr(self, "known_BS", state.tokens_BS)
        is_known_BS = torch.arange(known_BS.shape[1]) < state.num_tokens_B[:, None]
        self.known_BS = torch.where(is_known_BS, state.tokens_BS, known_BS)
        return Proposal(self.known_BS.gather(1, state.next_positions_BT(gamma)), None)
"""
SELECTS = "(step_F * older_B1 // self.num_fixed)[:, None]"
# The latest tokens, by index.
LATEST = """
import torch
from pydantic.dataclasses import dataclass
from magicdec.cache.dynamic import DynamicCache
from magicdec.config.choices import CacheConfig
from magicdec.config.registry import POLICIES
from magicdec.inputs.rules import STRICT

@dataclass(frozen=True, config=STRICT)
class Strided(CacheConfig):
    policy: str = "strided"
    recent: int = 8
    selects = "step"

@POLICIES.register(Strided)
class StridedCache(DynamicCache):
    def select(self, layer, q_BTHD, attention, plan):
        slot_BN = self.length_B.long()[:, None] + torch.arange(-self.budget, 0)
        return slot_BN[:, None].expand(-1, self.config.num_kv_heads, -1)
"""
# A mistake that does not depend on the sizes is found at this one as at all.
ONE_SIZE = (conformance.COPIED,)
CHECKS = ("wrong_tokens", "wrong_calls", "wrong_bytes", "wrong_rows")
NO_ROWS = "    settings: Strided\n\n    def copy_row(self, row, source):\n        pass\n"


@pytest.fixture
def check(tmp_path, monkeypatch, capsys, request):
    """A function that checks a module of the working directory with this source."""
    monkeypatch.setattr(registry, "PLUGINS", {})
    for one in (registry.POLICIES, registry.DRAFTS):
        # All are loaded now.
        monkeypatch.setattr(one, "_entries", {name: one[name] for name in one})

    def run(source, options=OPTIONS):
        module = re.sub(r"\W", "_", request.node.name)
        monkeypatch.chdir(written(tmp_path, {f"{module}.py": source, **options}))
        monkeypatch.syspath_prepend(tmp_path)
        return check_plugin.main([module]), capsys.readouterr()

    return run


@pytest.fixture
def check_with(check, monkeypatch):
    """The same function for a module in which one of CHECKS, at one size, finds a mistake."""

    def run(name, source):
        monkeypatch.setattr(conformance, "SIZES", ONE_SIZE)
        for other in set(CHECKS) - {name}:
            monkeypatch.setattr(conformance, other, lambda *_: iter(()))
        return check(source)

    return run


def test_the_examples_of_the_documentation_pass(check):
    """A policy and a draft of one module, at every gamma and budget."""
    code, said = check(POLICY + DRAFT)
    assert (code, said.err) == (0, "")
    assert (said.out.count("cache=strided "), said.out.count("draft=echo ")) == (9, 5)
    assert (said.out.count("ok"), said.out.count("\n")) == (14, 14)


@pytest.mark.parametrize(
    ("by_check", "source", "wrong", "by", "line"),
    [
        ("wrong_bytes", POLICY, "compact = True", ONE_MORE, "takes the bytes"),
        (
            "wrong_tokens",
            POLICY,
            "return max(0, budget",
            "1 / 0\n        return max(0, budget",
            "ZeroDivisionError: division by zero",
        ),
        (
            "wrong_rows",
            POLICY,
            "    settings: Strided\n",
            NO_ROWS,
            "copy_row leaves out what proposals depend on",
        ),
        (
            "wrong_bytes",
            DRAFT,
            "    @classmethod\n",
            "    cache_bytes = 64\n\n    @classmethod\n",
            "declared 0, reported 64, allocated 0 bytes",
        ),
    ],
)
def test_what_is_wrong_is_found(check_with, by_check, source, wrong, by, line):
    assert wrong in source
    code, said = check_with(by_check, source.replace(wrong, by))
    assert code == 1
    assert line in "".join(found for found in said.out.splitlines() if found.startswith("FAILED"))


@pytest.mark.parametrize(
    ("source", "right", "wrong", "line"),
    [
        (
            POLICY,
            SELECTS,
            f"{SELECTS} + 100000",
            "select: layer 0 of row 0 selects slots 100000, 1000",
        ),
        (POLICY, SELECTS, f"{SELECTS} - 1", "selects slots -1: must be from 0 to "),
        (POLICY, SELECTS, f"{SELECTS} * 0", "selects slots 0 more than once"),
        (POLICY, SELECTS, f"{SELECTS} * 0 + older_B1[:, None]", ": what follows is kept anyway"),
        (
            POLICY,
            SELECTS,
            f"{SELECTS}[:1]",
            "select: returns 1 x 1 x 4 slots: must be 3 x 2 (or 1) x 4",
        ),
        (
            POLICY,
            "return max(0, budget - self.settings.recent)",
            "return budget + 50",
            "fixed_slots: returns 62 of 12",
        ),
        (
            POLICY,
            "return max(0, budget - self.settings.recent)",
            "return -1",
            "fixed_slots: returns -1 of 12",
        ),
        (
            POLICY,
            "compact = True",
            "compact = True\n    tokens_read = lambda *_: 9",
            "reads 12 committed entries",
        ),
        (
            POLICY,
            "    settings: Strided\n",
            "    settings: Strided\n    observes = 8\n",
            "its fact `selects` is never",
        ),
        (
            POLICY.replace("compact = True", 'compact = True\n    selects = "prefill"'),
            "    settings: Strided\n",
            "    settings: Strided\n    observes = 8\n",
            "observed: returns 0 of 8 tokens",
        ),
        (
            LATEST,
            "return slot_BN[",
            "slot_BN[:, -1] += 40\n        return slot_BN[",
            "must be from 0 to ",
        ),
        (
            LATEST,
            "return slot_BN[",
            "slot_BN[:, 0] += 1\n        return slot_BN[",
            " more than once",
        ),
        (
            LATEST,
            "-self.budget, 0",
            "-self.budget - 4, 0",
            "reads 16 committed entries: its facts (tokens_read)",
        ),
        (
            LATEST,
            "self.config.num_kv_heads",
            "1",
            "select: layer 0 selects 3 x 1 x 16 slots: must be 3 x 2 x N",
        ),
        (
            DRAFT,
            ".repeat(1, gamma)",
            ".repeat(1, gamma) + 61",
            "propose: returns tokens 96, 118: must be from 0 to 60",
        ),
        (
            DRAFT,
            ".repeat(1, gamma)",
            ".repeat(1, 1)",
            "propose: returns 3 x 1 tokens: must be 3 x 3",
        ),
        (DRAFT, "cls(spec.gamma,", "cls(spec.gamma + 1,", "gamma: it proposes up to 4 tokens"),
        (DRAFT, "- self.back)", "+ self.back)", "propose: reads tokens behind the end of a row"),
        (
            DRAFT,
            RETURNS,
            REMEMBERS,
            "prefill: leaves something of an earlier pass",
        ),
        (
            DRAFT,
            RETURNS,
            SAMPLES.format(q="q_BGV[..., :60]"),
            "q_BGV: has 3 x 3 x 60 numbers: must be 3 x 3 x 61",
        ),
        (
            DRAFT,
            RETURNS,
            SAMPLES.format(q="q_BGV * 2"),
            "q_BGV: holds negative numbers, or sums of 2",
        ),
        (
            DRAFT,
            RETURNS,
            SAMPLES.format(q="q_BGV.roll(1, -1)"),
            "q_BGV: gives no chance to tokens ",
        ),
        (
            DRAFT,
            RETURNS,
            SAMPLES.format(q="q_BGV / 2 + torch.ones(61) / 122"),
            "q_BGV: the tokens are not drawn from the distributions that it returns",
        ),
    ],
)
def test_what_a_round_would_hide_is_found(check_with, source, right, wrong, line):
    """Right slots and tokens pass, wrong ones fail: clamped or masked, they would only lower the
    acceptance.
    """
    assert right in source
    source = "import torch\n" + source
    code, said = check_with("wrong_calls", source.replace(right, wrong))
    failed = [found for found in said.out.splitlines() if found.startswith("FAILED")]
    assert code == 1
    assert line in " ".join(failed), said.out


def test_a_dynamic_policy_passes(check, monkeypatch):
    monkeypatch.setattr(conformance, "SIZES", ONE_SIZE)
    code, said = check(LATEST)
    assert (code, said.out.count("ok")) == (0, 9), said.out


def test_ranks_that_are_drawn_evenly_pass():
    even = torch.rand(400, generator=torch.Generator().manual_seed(0))
    assert not drawn_otherwise(even.tolist())
    assert drawn_otherwise((even / 2).tolist())


def test_an_output_that_is_not_the_targets_is_found(check, monkeypatch):
    generate = conformance.both_ways
    monkeypatch.setattr(conformance, "both_ways", lambda batch: (False, *generate(batch)[1:]))
    code, said = check(DRAFT)
    assert (code, said.out.count("its output is not the target's at gamma 1, budget 40")) == (1, 1)


@pytest.mark.parametrize(
    ("source", "options", "code", "line"),
    [
        (
            DRAFT,
            {},
            1,
            "FAILED  draft=echo          has an option: conf/draft/echo.yaml is missing",
        ),
        ("x = 1\n", {}, 2, "registers neither a cache policy nor a draft"),
        (
            "1 / 0\n",
            {},
            2,
            "cannot be imported (ZeroDivisionError: division by zero); correct it, or name another",
        ),
    ],
)
def test_a_module_without_an_option_or_a_choice(check, source, options, code, line):
    got, said = check(source, options)
    assert got == code
    assert line in said.out + said.err


def test_only_what_a_built_in_module_registers_itself_is_checked(monkeypatch):
    """Quest is one of a dozen policies of the package."""
    monkeypatch.setattr(conformance, "SIZES", ())
    for module in ("magicdec.cache.quest", "magicdec.drafts.ngram"):
        assert {finding.choice for finding in conformance.examine(module)} == {
            f"{'cache' if '.cache.' in module else 'draft'}={module.rpartition('.')[2]}"
        }
    with pytest.raises(UserError, match="registers neither a cache policy nor a draft"):
        list(conformance.examine("magicdec.errors"))


@pytest.mark.usefixtures("check")  # which leaves no choice behind
def test_a_module_that_imports_the_one_that_registers_stands_for_its_package(tmp_path, monkeypatch):
    files = {"around/drafts.py": DRAFT, "around/plugin.py": "import around.drafts\n"}
    monkeypatch.chdir(written(tmp_path, files | OPTIONS))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(conformance, "SIZES", ())
    found = list(conformance.examine("around.plugin"))
    assert {finding.choice for finding in found} == {"draft=echo"}
