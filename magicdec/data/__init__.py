"""Prompts: windows of real documents, a user's own prompts, or random tokens; one file per corpus."""

import platform
from pathlib import Path
from typing import Any

from magicdec.data import pg19, prompts, random, repeat, ruler, stdlib, text
from magicdec.data.base import Encoder, Prompts
from magicdec.errors import UserError
from magicdec.fingerprint import of_files

__all__ = ["CORPORA", "Prompts", "fingerprint", "load_prompts"]

CORPORA = ("stdlib", "text", "prompts", "pg19", "repeat", "ruler", "random")


def load_prompts(
    name: str,
    *,
    tokenizer: Any,
    num_rows: int,
    context_len: int,
    seed: int,
    path: str | None = None,
    task: str | None = None,
    vocab_size: int,
) -> Prompts:
    """Prompts of the corpus called `name`, one of CORPORA: `num_rows` rows (batch size times batches).

    Every row has exactly `context_len` tokens and no two rows overlap, except for `prompts`, whose rows are as long as
    the user wrote them, and at most that. `tokenizer` is a transformers tokenizer (unused, and may be None, for
    `random`), `vocab_size` the model's, `task` one of ruler's. The same arguments give the same prompts.

    Raises UserError where the corpus is missing, malformed or too short, or the tokenizer does not fit the model.
    """
    if name not in CORPORA:
        raise UserError(f"data={name} is unknown; valid: {', '.join(CORPORA)}")
    if name == "random":
        return random.load(vocab_size=vocab_size, num_rows=num_rows, context_len=context_len, seed=seed)
    if tokenizer is None:
        raise UserError(f"data={name} needs a tokenizer; without one only data=random works")
    if name == "prompts":
        loaded = prompts.load(tokenizer, path=path, num_rows=num_rows, context_len=context_len)
    elif name == "stdlib":
        loaded = stdlib.load(Encoder.of(tokenizer), num_rows=num_rows, context_len=context_len, seed=seed)
    elif name == "ruler":
        if task not in ruler.TASKS:
            raise UserError(f"data.task={task} is unknown; valid: {', '.join(ruler.TASKS)}")
        loaded = ruler.load(
            Encoder.of(tokenizer), task=task, path=path, num_rows=num_rows, context_len=context_len, seed=seed
        )
    else:
        load = {"text": text.load, "pg19": pg19.load, "repeat": repeat.load}[name]
        loaded = load(Encoder.of(tokenizer), path=path, num_rows=num_rows, context_len=context_len, seed=seed)
    largest = max(max(row) for row in loaded.tokens)
    if largest >= vocab_size:
        raise UserError(f"the tokenizer gives token {largest}, but the model's vocabulary has {vocab_size} tokens")
    return loaded


def fingerprint(name: str, path: str | None) -> str:
    """Return what identifies the text behind a corpus, before any of it is tokenised: a hash of the user's files, or
    where it comes from. Raise UserError where there are no such files.
    """
    if name == "random":
        return "random"
    if path is None or name == "stdlib":
        return "hub" if name == "pg19" else f"Python {platform.python_version()}"
    files_at = pg19.books_at if name == "pg19" else text.files_at
    return of_files(files_at(Path(path), f"data={name} data.path={path}"))
