"""The copying task: a prompt ends as one of its early passages begins."""

from functools import partial
from itertools import pairwise

import pytest

from magicdec.errors import UserError
from tests.data.characters import CharacterTokenizer, load


@pytest.mark.parametrize("context_len", [41, 100, 640, 4096])
@pytest.mark.parametrize("bos", [False, True])
def test_the_end_repeats_a_passage_of_the_first_quarter(tmp_path, context_len, bos):
    # No character twice.
    (tmp_path / "a.txt").write_text("".join(chr(0x4E00 + i) for i in range(16_000)))
    again = partial(
        load,
        "repeat",
        tmp_path,
        num_rows=3,
        context_len=context_len,
        tokenizer=CharacterTokenizer(bos),
    )
    prompts = again()
    cue = min(256, max(8, context_len // 8))
    for row, source in zip(prompts.tokens, prompts.sources, strict=True):
        assert len(row) == context_len
        start = row.index(row[-cue])
        assert row[start : start + cue] == row[-cue:]
        assert bos <= start <= bos + (context_len - cue) // 4
        assert source.endswith(f"+{start}")
        half = (context_len - cue) // 2
        steps = [after - before for before, after in pairwise(row[bos:half])]
        assert steps.count(1) < len(steps) / 4, (
            "shuffled: only the passage itself tells how it goes on"
        )
        assert {after - before for before, after in pairwise(row[half:-cue])} == {1}
    assert again().fingerprint == prompts.fingerprint
    assert again(seed=1).fingerprint != prompts.fingerprint


def test_without_a_path_it_is_the_standard_library():
    assert all(len(row) == 300 for row in load("repeat", context_len=300).tokens)


def test_too_short_a_context_is_refused():
    with pytest.raises(
        UserError, match=r"batch\.context_len=20: data=repeat needs at least 40 tokens"
    ):
        load("repeat")
