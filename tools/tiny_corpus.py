"""Text that the bundled pair is trained and measured on, its split by name, and its tokenizer."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from magicdec.data import stdlib

HELD_OUT_BOOKS = ("pride-and-prejudice", "sherlock-holmes")
END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 1024
CODE_SHARE = 0.55  # of what is trained on; the rest is books


@dataclass
class Corpus:
    """Token ids of both splits by kind of text, documents in seeded order with an end-of-text token
    after each.
    """

    tokenizer: Tokenizer
    train: dict[str, np.ndarray]
    held_out: dict[str, np.ndarray]
    held_out_bytes: dict[str, int]

    @classmethod
    def load(cls, books_folder: Path | None, work: Path) -> "Corpus":
        """Read all text; train the tokenizer on the training split, or take the one in the work
        folder.
        """
        train = {
            "stdlib": stdlib.documents(held_out=False),
            "books": books(books_folder, held_out=False),
        }
        held_out = {
            "stdlib": stdlib.documents(held_out=True),
            "books": books(books_folder, held_out=True),
        }
        path = work / "tokenizer.json"
        if not path.exists():
            train_tokenizer([text for split in train.values() for text in split.values()]).save(
                str(path)
            )
        tokenizer = Tokenizer.from_file(str(path))
        return cls(
            tokenizer,
            {kind: encode(tokenizer, split) for kind, split in train.items() if split},
            {kind: encode(tokenizer, split) for kind, split in held_out.items() if split},
            {
                kind: sum(len(text.encode()) for text in split.values())
                for kind, split in held_out.items()
            },
        )

    def training_window(
        self, generator: np.random.Generator, is_code: bool, size: int
    ) -> np.ndarray:
        """Return a random window of source code or of books, or of code where there are no
        books.
        """
        ids = self.train["stdlib" if is_code or "books" not in self.train else "books"]
        start = generator.integers(len(ids) - size)
        return ids[start : start + size]


def books(folder: Path | None, *, held_out: bool) -> dict[str, str]:
    """Return the books of a folder (*.txt) that are held out by name, or all the others."""
    if folder is None:
        return {}
    paths = [
        path for path in sorted(folder.rglob("*.txt")) if (path.stem in HELD_OUT_BOOKS) == held_out
    ]
    return {path.stem: path.read_text(encoding="utf-8") for path in paths}


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Return a byte-level BPE tokenizer: it can write any text, and its first token ends a
    document.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, documents: dict[str, str]) -> np.ndarray:
    """Return the token ids of all documents, each followed by an end-of-text token."""
    texts = list(documents.values())
    order = np.random.default_rng(0).permutation(len(texts))
    encoded = tokenizer.encode_batch([texts[i] for i in order])
    end = tokenizer.token_to_id(END_OF_TEXT)
    return np.concatenate([np.array([*e.ids, end], dtype=np.int64) for e in encoded])
