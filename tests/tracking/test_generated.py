"""Text that a run has generated, as it is stored by round and as `show` prints it."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magicdec.commands.show import main
from magicdec.errors import printable
from magicdec.tracking.unit_files import by_round
from tests.tracking.sample import ROUNDS, SAMPLE, TOKENS
from tests.tracking.stores import write_run

GENERATIONS = [
    {"row": i, "context_len": 9, "speculative": [5, 6, 7, 8, 9, 10, 11], "rounds": ROUNDS}
    for i in (0, 1)
]


@pytest.fixture
def folder(tmp_path):
    """A run whose first row has text."""
    folder = tmp_path / "abc"
    write_run(tmp_path, folder.name)
    (folder / "samples.jsonl").write_text(json.dumps(SAMPLE) + "\n")
    (folder / "generations.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in GENERATIONS)
    )
    return folder


@pytest.fixture
def show(folder, capsys):
    """Return what the command prints, after its exit code if it fails."""

    def run(*arguments):
        code = main([*arguments, "--runs-dir", str(folder.parent)])
        out, err = capsys.readouterr()
        return f"{code} {err}" if code else out

    return run


def test_a_round_is_its_accepted_proposals_and_the_bonus_token():
    assert by_round(TOKENS[:6], ROUNDS) == [
        {"proposed": 0, "accepted": [], "bonus": "the"},
        {"proposed": 2, "accepted": [" c", "at"], "bonus": " s"},
        {"proposed": 2, "accepted": [], "bonus": "at"},
        {"proposed": 2, "accepted": ["\n"], "bonus": None},
    ]


@given(st.lists(st.integers(0, 4), max_size=6), st.integers(0, 5))
def test_no_token_is_lost_or_repeated(accepted, cut):
    whole = [str(i) for i in range(1 + sum(n + 1 for n in accepted))]
    tokens = whole[: max(len(whole) - min(cut, accepted[-1] if accepted else 0), 1)]
    found = by_round(tokens, [(4, n) for n in accepted])
    flat = [
        token for one in found for token in [*one["accepted"], one["bonus"]] if token is not None
    ]
    assert flat == tokens
    assert [len(one["accepted"]) for one in found[1:-1]] == accepted[:-1]


def test_a_pipe_gets_text_and_rounds_without_colours(show):
    out = show("ab")
    assert "\x1b" not in out
    assert "once\\u202e" in out
    assert "the cat sat\n\\x1b[31m" in out
    lines = [line.split("   ") for line in out.splitlines() if " of 2 " in line]
    assert [[part.strip() for part in line if part.strip()] for line in lines] == [
        ["1", "2 of 2", '" c" "at"', '" s"'],
        ["2", "0 of 2", '"at"'],
        ["3", "1 of 2", '"\\n"', '"\\x1b[31m"'],
    ]


def test_a_terminal_shows_accepted_tokens_in_colour(show, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    out = show("abc")
    assert "the\x1b[1;32m cat\x1b[0m s" in out


def test_rows_without_text_show_ids_and_rounds_are_limited(show):
    out = show("abc", "--row", "1", "--rounds", "1")
    assert "5 6 7 8 …" in out
    assert "2 more rounds; --rounds 0 shows all" in out
    assert "11" not in out
    assert "11" in show("abc", "--row", "1", "--rounds", "0")


def test_mistakes_are_one_line(show, folder):
    assert re.fullmatch(r"2 error: --row 7: .* holds rows 0 to 1\n", show("abc", "--row", "7"))
    assert show("abc", "--rounds", "-3") == "2 error: --rounds=-3: must be at least 0\n"
    words = "2 error: xyz: no such run; name a run's folder, or the beginning of an id in "
    assert re.fullmatch(f"{words}.*\n", show("xyz"))
    for name in ("samples", "generations"):
        (folder / f"{name}.jsonl").unlink()
    assert re.fullmatch("2 error: .*: this run has stored no output\n", show("abc"))


def test_a_run_without_rounds_shows_its_text(show, folder):
    """Such as that of another engine."""
    (folder / "samples.jsonl").write_text(
        json.dumps({"row": 0, "autoregressive": "written", "speculative": None})
    )
    out = show("abc")
    assert "continuation, autoregressive\nwritten" in out
    assert "round" not in out


@given(st.text())
def test_what_is_printed_is_printable(text):
    assert printable(text).isprintable()
    assert printable(text, keep="\n").replace("\n", "").isprintable()
