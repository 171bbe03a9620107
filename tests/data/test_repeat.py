"""The copying task: a prompt ends as one of its early passages begins."""

import pytest

from magicdec.data import load_prompts
from magicdec.errors import UserError
from tests.data.characters import CharacterTokenizer


def load(path, context_len: int, bos: bool = False, seed: int = 0):
    return load_prompts(
        "repeat",
        tokenizer=CharacterTokenizer(bos),
        num_rows=3,
        context_len=context_len,
        seed=seed,
        path=path and str(path),
        vocab_size=0x110000,
    )


@pytest.mark.parametrize("context_len", [41, 100, 640, 4096])
@pytest.mark.parametrize("bos", [False, True])
def test_the_end_repeats_a_passage_of_the_first_quarter(tmp_path, context_len, bos):
    (tmp_path / "a.txt").write_text("".join(chr(0x4E00 + i) for i in range(16_000)))  # no character twice
    prompts = load(tmp_path, context_len, bos)
    cue = min(256, max(8, context_len // 8))
    for row, source in zip(prompts.tokens, prompts.sources, strict=True):
        assert len(row) == context_len
        start = row.index(row[-cue])
        assert row[start : start + cue] == row[-cue:]
        assert bos <= start <= bos + (context_len - cue) // 4
        assert source.endswith(f"+{start}")
    assert load(tmp_path, context_len, bos).fingerprint == prompts.fingerprint
    assert load(tmp_path, context_len, bos, seed=1).fingerprint != prompts.fingerprint


def test_without_a_path_it_is_the_standard_library():
    assert all(len(row) == 300 for row in load(None, 300).tokens)


def test_too_short_a_context_is_refused():
    with pytest.raises(UserError, match=r"batch\.context_len=20: data=repeat needs at least 40 tokens"):
        load(None, 20)
