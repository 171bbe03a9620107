import json
from pathlib import Path

import pytest

from magicdec.architectures.model_config import ModelConfig
from magicdec.errors import UserError
from magicdec.models.vocabulary import check_vocabularies


def sized(vocab_size: int) -> ModelConfig:
    return ModelConfig(vocab_size, 64, 96, 2, 4, 2, 16, 256)


@pytest.fixture
def tokenizer(tmp_path):
    """Writes a tokenizer.json with these tokens and returns its folder."""

    def write(
        name: str, tokens: list[str], added: tuple[str, ...] = (), unigram: bool = False
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        vocabulary = (
            [[t, -1.0] for t in tokens] if unigram else {t: i for i, t in enumerate(tokens)}
        )
        extra = [{"id": len(tokens) + i, "content": token} for i, token in enumerate(added)]
        (folder / "tokenizer.json").write_text(
            json.dumps({"model": {"vocab": vocabulary}, "added_tokens": extra})
        )
        return folder

    return write


def test_vocabularies_of_other_sizes_are_refused_before_anything_is_read():
    check_vocabularies(sized(32000), sized(32000))
    said = "32000 entries against the target's 128256.*a smaller model of its own family"
    with pytest.raises(UserError, match=said):
        check_vocabularies(sized(128256), sized(32000))


def test_the_same_tokens_padded_differently_fit(tokenizer):
    a = tokenizer("a", ["x", "y", "z"], added=("<eos>",))
    b = tokenizer("b", ["x", "y", "z"], added=("<end>", "<tool>"))
    check_vocabularies(sized(152064), sized(151936), a, b)
    check_vocabularies(sized(151936), sized(152064), a, b)


def test_other_tokens_under_the_same_number_of_ids_do_not_fit(tokenizer):
    a, b = tokenizer("a", ["x", "y", "z", "w"]), tokenizer("b", ["x", "z", "y", "w"])
    with pytest.raises(
        UserError, match=r"2 token ids differ in meaning, the first of them 1: 'z' against 'y'"
    ):
        check_vocabularies(sized(4), sized(4), a, b)


def test_a_draft_without_room_for_the_tokens_does_not_fit(tokenizer):
    a, b = tokenizer("a", ["x", "y", "z"]), tokenizer("b", ["x", "y", "z"], unigram=True)
    with pytest.raises(UserError, match="too few for the target's token 2"):
        check_vocabularies(sized(4), sized(2), a, b)


def test_a_tokenizer_on_one_side_only_leaves_the_sizes(tokenizer, tmp_path):
    a = tokenizer("a", ["x", "y"])
    check_vocabularies(sized(4), sized(4), a, tmp_path)
    with pytest.raises(UserError, match="4 entries against the target's 5"):
        check_vocabularies(sized(5), sized(4), a, tmp_path)
