"""What every corpus gives: documents, and prompts cut from them as windows of an exact length."""

import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np

from magicdec.errors import UserError

# A long document is tokenised in sections of about this size times context_len, because one window of a book should
# not cost the whole book. A section holds four windows or more, so that little is lost at its end.
SECTION_CHARS_PER_TOKEN = 16


@dataclass(frozen=True)
class Document:
    """One text of a corpus: a book, a module, a package."""

    name: str
    text: str


@dataclass(frozen=True)
class Prompts:
    """Token ids to decode from, one list per row.

    `tokens[i]` came from `sources[i]`, such as `asyncio#2@4096`: the document, its section, the first token.
    `fingerprint` identifies the token ids: two runs with the same one decoded the same prompts. `answers[i]`, where
    the corpus is a task, is what the output of row i should contain.
    """

    tokens: list[list[int]]
    sources: list[str]
    fingerprint: str
    answers: Sequence[list[str]] = ()

    @classmethod
    def of(cls, tokens: list[list[int]], sources: list[str], answers: Sequence[list[str]] = ()) -> "Prompts":
        """Prompts with their fingerprint."""
        return cls(tokens, sources, fingerprint(tokens), answers)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def facts(self) -> dict[str, str | float]:
        """What results say of the prompts: which they are, and how long."""
        lengths = [len(row) for row in self.tokens]
        return {
            "data/fingerprint": self.fingerprint,
            "data/context_len_mean": fmean(lengths),
            "data/context_len_min": min(lengths),
            "data/context_len_max": max(lengths),
        }


def fingerprint(rows: Iterable[Sequence[int]]) -> str:
    """16 hexadecimal digits over all token ids in order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(_bytes([len(row), *row]))
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Encoder:
    """Text to token ids, and `prefix`: what the tokenizer puts before a text (a beginning-of-text token, or nothing).

    A window from the middle of a document has that prefix too. A model trained with one expects it, and leans on
    it: it is the first of the attention sinks that a streaming cache keeps.
    """

    encode: Callable[[str], Sequence[int]]
    prefix: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Any) -> "Encoder":
        """The encoder of a transformers tokenizer."""
        bare = tokenizer.encode("a", add_special_tokens=False)
        full = tokenizer.encode("a", add_special_tokens=True)
        starts = [i for i in range(len(full) - len(bare) + 1) if full[i : i + len(bare)] == bare]
        prefix = tuple(full[: starts[0]]) if starts else ()
        # verbose=False: a whole book is longer than any model's maximum, which is no reason for a warning here.
        return cls(lambda text: tokenizer.encode(text, add_special_tokens=False, verbose=False), prefix)


def cut_windows(
    names: Iterable[str],
    read: Callable[[str], str],
    encoder: Encoder,
    *,
    num_rows: int,
    context_len: int,
    seed: int,
    corpus: str,
) -> Prompts:
    """Cut `num_rows` windows of exactly `context_len` tokens each, no two of them overlapping or equal.

    `names` are the documents and `read` gives the text of one. The documents take turns, one window each, so that a
    few rows are not all of one book; their order and the windows' places depend on `seed` alone. Every window lies
    within one document, after the encoder's prefix: documents are never joined, and one shorter than a window gives
    none. With the same seed, more rows begin with the fewer rows.

    Raises UserError where all documents together hold too few windows; `corpus` is what the message calls them.
    """
    order = sorted(names)
    random.Random(seed).shuffle(order)
    tally = _Tally()
    turns = deque(_windows(name, read, encoder, context_len, seed, tally) for name in order)
    tokens: list[list[int]] = []
    sources: list[str] = []
    seen: set[bytes] = set()
    while turns and len(tokens) < num_rows:
        document = turns.popleft()
        window, source = next(document, (None, ""))
        if window is None:
            continue
        turns.append(document)
        if (key := _bytes(window)) not in seen:
            seen.add(key)
            tokens.append(window)
            sources.append(source)
    if len(tokens) < num_rows:
        raise UserError(
            f"{corpus} is too short: {num_rows} rows x context_len={context_len} need {num_rows * context_len:,} "
            f"tokens, its {len(order)} documents hold {tally.tokens:,} ({len(tokens)} distinct windows); "
            "lower batch.size, batch.num_batches or batch.context_len, or take more text with data.path"
        )
    return Prompts.of(tokens, sources)


@dataclass
class _Tally:
    """Tokens read so far."""

    tokens: int = 0


def _windows(
    name: str, read: Callable[[str], str], encoder: Encoder, context_len: int, seed: int, tally: _Tally
) -> Iterator[tuple[list[int], str]]:
    """The windows of one document in seeded order, with their names; tokenises a section at a time."""
    prefix = list(encoder.prefix)
    length = context_len - len(prefix)
    if length < 1:
        return
    generator = random.Random(f"{seed}/{name}")
    sections = list(enumerate(_sections(read(name), SECTION_CHARS_PER_TOKEN * context_len)))
    generator.shuffle(sections)
    for number, text in sections:
        ids = encoder.encode(text)
        tally.tokens += len(ids)
        if len(ids) < length:
            continue
        starts = list(range(generator.randint(0, len(ids) % length), len(ids) - length + 1, length))
        generator.shuffle(starts)
        for start in starts:
            yield [*prefix, *ids[start : start + length]], f"{name}#{number}@{start}"


def _sections(text: str, size: int) -> list[str]:
    """Cut a text into parts of about equal length, at least `size` characters where it is that long, at line ends."""
    count = max(1, len(text) // size)
    cuts = [0]
    for i in range(1, count):
        place = len(text) * i // count
        cuts.append(max(cuts[-1], text.find("\n", place) + 1 or place))
    cuts.append(len(text))
    return [text[begin:end] for begin, end in pairwise(cuts) if end > begin]


def _bytes(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype="<u4").tobytes()
