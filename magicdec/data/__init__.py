"""Prompts: windows of real documents, a user's own prompts, or random tokens; one file per
corpus.
"""

from pathlib import Path

from magicdec.config.registry import CORPORA
from magicdec.data.base import PromptRequest, Prompts
from magicdec.errors import UserError
from magicdec.inputs.fingerprint import of_files

__all__ = ["PromptRequest", "Prompts", "load_prompts", "text_fingerprint"]


def load_prompts(name: str, request: PromptRequest) -> Prompts:
    """Return the prompts of the corpus called `name`.

    Every row has exactly `context_len` tokens and no two rows overlap, except for `prompts` and
    `jsonl`, whose rows are as long as their file says, up to `context_len`. Raise UserError if the
    corpus is missing, malformed or too short, or if the tokenizer does not fit the model.
    """
    corpus = CORPORA[name]
    if request.tokenizer is None and not corpus.facts.is_noise:
        raise UserError(f"data={name} needs a tokenizer; without one only data=random works")
    loaded: Prompts = corpus.work(request)
    largest = max(max(row) for row in loaded.tokens)
    if largest >= request.vocab_size:
        size = f"the model's vocabulary has {request.vocab_size} tokens"
        raise UserError(f"the tokenizer gives token {largest}, but {size}")
    return loaded


def text_fingerprint(name: str, path: str | None) -> str:
    """Return what identifies the text of a corpus before it is tokenised: a hash of the user's
    files, or its origin.

    Raise UserError if there are no such files.
    """
    corpus = CORPORA[name].facts
    if path is None or corpus.files_at is None:
        return corpus.origin
    where = f"data={name} data.path={path}"
    return of_files(corpus.files_at(Path(path), where), where)
