"""The common part of all corpora: the request for prompts, and windows of an exact length cut from
documents.
"""

import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np

from magicdec.config.choices import DataConfig
from magicdec.data.tokenizer import encode_bare, prefix_of
from magicdec.errors import UserError
from magicdec.units import enumerated

# Documents are tokenised in sections of this many characters per token of the context, so that one
# window of a book does not cost the whole book. A section holds four windows or more, so that
# little is lost at its end.
SECTION_CHARS_PER_TOKEN = 16


@dataclass(frozen=True)
class Prompts:
    """Token ids to decode from, one list per row.

    `tokens[i]` came from `sources[i]`, such as `asyncio#2@4096`: the document, its section, the
    first token. `answers[i]`, for a corpus of tasks, is what the output of row i should contain.
    `categories`, `output_lens` (new tokens) and `arrivals_s` (since the first) are those of the
    rows, where the corpus has them.
    """

    tokens: list[list[int]]
    sources: list[str]
    answers: Sequence[list[str]] = ()
    categories: Sequence[str] = ()
    output_lens: Sequence[int] = ()
    arrivals_s: Sequence[float] = ()
    num_left_out: int = 0  # rows of the corpus that do not fit

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, order: Sequence[int]) -> "Prompts":
        """Return these rows, in this order."""
        columns = {
            name: rows for name, rows in vars(self).items() if isinstance(rows, Sequence) and rows
        }
        columns = {name: [rows[place] for place in order] for name, rows in columns.items()}
        return replace(self, **columns)  # type: ignore[arg-type]

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of the token ids: runs with the same one decode the same prompts."""
        return rows_fingerprint(self.tokens)

    @property
    def facts(self) -> dict[str, str | float]:
        """Return the metrics that describe the prompts."""
        lengths = [len(row) for row in self.tokens]
        return {
            "data/fingerprint": self.fingerprint,
            "data/context_len_mean": fmean(lengths),
            "data/context_len_min": min(lengths),
            "data/context_len_max": max(lengths),
            **({"data/rows_left_out": self.num_left_out} if self.num_left_out else {}),
        }


def rows_fingerprint(rows: Iterable[Sequence[int]]) -> str:
    """Return 16 hexadecimal digits: a hash of all token ids in order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(_bytes([len(row), *row]))
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class PromptRequest:
    """The prompts that a run asks a corpus for: `num_rows` rows of `context_len` tokens.

    `path`, `task` and `keys` are those of the data's configuration. The same request gives the same
    prompts.
    """

    num_rows: int
    context_len: int
    vocab_size: int
    tokenizer: Any = None  # of transformers; None for random tokens
    seed: int = 0
    path: str | None = None
    task: str | None = None
    keys: DataConfig | None = None  # all of them, for a corpus that has keys of its own
    # Of a request that has an output length of its own; None: nobody reads it.
    most_new_tokens: int | None = None
    # The keys that say how many rows there are, and how long they are, for errors.
    size_keys: Sequence[str] = ("batch.size", "batch.num_batches", "batch.context_len")

    @cached_property
    def prefix(self) -> tuple[int, ...]:
        """Return the tokens that the tokenizer puts before a text, if any.

        A window from the middle of a document starts with them too. A model trained with them
        relies on them: they are the first of the attention sinks that a streaming cache keeps.
        """
        return prefix_of(self.tokenizer)

    def encode(self, text: str) -> Sequence[int]:
        """Return a text as token ids, without the prefix."""
        return encode_bare(self.tokenizer, text)


def cut_windows(
    names: Iterable[str], read: Callable[[str], str], request: PromptRequest, corpus: str
) -> Prompts:
    """Cut windows of exactly `context_len` tokens, no two of them overlapping or equal.

    `names` are the documents and `read` returns the text of one. The documents take turns, one
    window each, so that a few rows are not all of one book; their order and the windows' places
    depend on the seed alone. Every window is within one document, after the tokenizer's prefix.
    With the same seed, a larger request begins with the rows of a smaller one.

    Raise UserError if all documents together hold too few windows; `corpus` is their name in the
    message.
    """
    order = sorted(names)
    random.Random(request.seed).shuffle(order)
    lengths: list[int] = []  # of the sections read so far
    turns = deque(_windows(name, read, request, lengths) for name in order)
    tokens: list[list[int]] = []
    sources: list[str] = []
    seen: set[bytes] = set()
    while turns and len(tokens) < request.num_rows:
        document = turns.popleft()
        window, source = next(document, (None, ""))
        if window is None:
            continue
        turns.append(document)
        if (key := _bytes(window)) not in seen:
            seen.add(key)
            tokens.append(window)
            sources.append(source)
    if len(tokens) < request.num_rows:
        needed = request.num_rows * request.context_len
        size_keys = enumerated(request.size_keys, "or")
        raise UserError(
            f"{corpus} is too short: {request.num_rows} rows x context_len={request.context_len}"
            f" need {needed:,} tokens, its {len(order)} documents hold {sum(lengths):,}"
            f" ({len(tokens)} distinct windows); lower {size_keys}, or take more"
            " text with data.path"
        )
    return Prompts(tokens, sources)


def _windows(
    name: str, read: Callable[[str], str], request: PromptRequest, lengths: list[int]
) -> Iterator[tuple[list[int], str]]:
    """Yield the windows of one document in seeded order, with their sources; tokenise a section at
    a time.
    """
    prefix = list(request.prefix)
    length = request.context_len - len(prefix)
    if length < 1:
        return
    generator = random.Random(f"{request.seed}/{name}")
    sections = list(enumerate(_sections(read(name), SECTION_CHARS_PER_TOKEN * request.context_len)))
    generator.shuffle(sections)
    for number, text in sections:
        ids = request.encode(text)
        lengths.append(len(ids))
        if len(ids) < length:
            continue
        first = generator.randint(0, len(ids) % length)
        starts = list(range(first, len(ids) - length + 1, length))
        generator.shuffle(starts)
        for start in starts:
            window = ids[start : start + length]
            yield [*prefix, *window], f"{name}#{number}@{start}"


def _sections(text: str, size: int) -> list[str]:
    """Cut a text at line ends into parts of about equal length, each of at least `size` characters
    if possible.
    """
    count = max(1, len(text) // size)
    cuts = [0]
    for i in range(1, count):
        place = len(text) * i // count
        cuts.append(max(cuts[-1], text.find("\n", place) + 1 or place))
    cuts.append(len(text))
    return [text[begin:end] for begin, end in pairwise(cuts) if end > begin]


def _bytes(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype="<u4").tobytes()
