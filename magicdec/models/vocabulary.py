"""The check that a draft and its target share a vocabulary."""

from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Strict
from pydantic.dataclasses import dataclass

from magicdec.architectures.model_config import ModelConfig, TokenId
from magicdec.errors import UserError
from magicdec.inputs.rules import JSON, must
from magicdec.models.metadata import read_json

TOKENIZER = "tokenizer.json"
# By which the embeddings of one family's models may differ, where a prediction reads no tokenizer.
PADDING = 512


@dataclass(frozen=True, config=JSON)
class TokenizerModel:
    """The tokens in a tokenizer.json: with their ids or, in a Unigram model, a list of them with
    their scores.
    """

    vocab: Annotated[
        dict[str, TokenId] | list[Annotated[tuple[str, Any], Strict(False)]],
        must("must map tokens to ids, or be a list of tokens with their scores"),
    ] = field(default_factory=dict)


@dataclass(frozen=True, config=JSON)
class Tokenizer:
    """The keys of a tokenizer.json that are read."""

    model: TokenizerModel = TokenizerModel()


def check_vocabularies(
    target: ModelConfig,
    draft: ModelConfig,
    target_folder: Path | None = None,
    draft_folder: Path | None = None,
    key: str = "draft.model",
    padding: int = 0,
) -> None:
    """Raise UserError for a draft whose token ids mean something else than the target's, before
    weights are read.

    Where both folders hold a tokenizer.json, their tokens are compared, and the sizes may differ:
    embeddings are padded, by another amount in each size of Qwen2.5 (151936 and 152064 for the same
    tokens). A draft then proposes nothing that the target does not have (drafts/base.py). Without
    tokenizers the sizes must be equal, but for `padding` entries.
    """
    ours, theirs = _tokens(target_folder), _tokens(draft_folder)
    fits = (
        f"a draft must share the target's vocabulary of {target.vocab_size}: take a smaller model"
        " of its own family"
    )
    sizes = (
        f"{key}: its vocabulary has {draft.vocab_size} entries against the target's"
        f" {target.vocab_size}"
    )
    if ours is None or theirs is None:
        if abs(target.vocab_size - draft.vocab_size) > padding:
            raise UserError(f"{sizes}; {fits}")
        return
    differing = [i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i)]
    if differing:
        first = min(differing)
        raise UserError(
            f"{sizes}, and {len(differing)} token ids differ in meaning, the first of them {first}:"
            f" {theirs.get(first)!r} against {ours.get(first)!r}; {fits}"
        )
    if max(ours) >= min(target.vocab_size, draft.vocab_size):
        raise UserError(f"{sizes}, too few for the target's token {max(ours)}; {fits}")


def _tokens(folder: Path | None) -> dict[int, str] | None:
    """Return the ids of a tokenizer's own tokens; None without a tokenizer.json.

    Added tokens (chat markers, reserved ones) are left out: releases of one family rename them, and
    a draft that disagrees on those costs acceptance at worst.
    """
    if folder is None or not (folder / TOKENIZER).exists():
        return None
    vocabulary = read_json(folder / TOKENIZER, Tokenizer).model.vocab
    if isinstance(vocabulary, dict):
        return {i: token for token, i in vocabulary.items()} or None
    return {i: token for i, (token, _score) in enumerate(vocabulary)} or None
