"""PG-19 (Rae et al. 2019), the usual corpus for long-context decoding: its test split of 100 books.

Read from a local copy (a folder of .txt files, or the published layout with `test/` in it), or
through the optional `datasets` library. Current versions of that library refuse the original
repository, which is a loading script; hence the mirror in Parquet.
"""

import os
from pathlib import Path
from typing import Any

from magicdec.config.choices import Corpus
from magicdec.config.registry import CORPORA
from magicdec.data.base import PromptRequest, Prompts, cut_windows
from magicdec.data.text import files_at, windows_of
from magicdec.errors import UserError, in_one_line

HUB_DATASET, SPLIT = "emozilla/pg19", "test"
SUFFIXES = frozenset({".txt"})


def books_at(path: Path, corpus: str) -> dict[str, Path]:
    """Return the books of a local copy by name. Raise UserError if there is none."""
    folder = Path(os.path.expanduser(path))
    return files_at(folder / SPLIT if os.path.isdir(folder / SPLIT) else folder, corpus, SUFFIXES)


def _download() -> dict[str, str]:
    """Return the test split by title."""
    try:
        import datasets  # optional, and slow to import
    except ImportError:
        hint = "pip install 'magicdec[pg19]'"
        raise UserError(
            f"data=pg19 needs the datasets library ({hint}) or data.path=FOLDER"
        ) from None
    try:
        # Streaming, because otherwise the training split, which is 11 GB, would be downloaded too.
        rows: list[dict[str, Any]] = list(
            datasets.load_dataset(HUB_DATASET, split=SPLIT, streaming=True)
        )
    except Exception as error:  # the library does not wrap the errors of the libraries below it
        reason = in_one_line(error)
        raise UserError(
            f"data=pg19: cannot load {HUB_DATASET} ({reason}); use data.path=FOLDER"
        ) from None
    return {f"{row['short_book_title']} ({number})": row["text"] for number, row in enumerate(rows)}


@CORPORA.register(Corpus("pg19", origin="hub", files_at=books_at))
def load(request: PromptRequest) -> Prompts:
    """Return windows of the books at `path`, or of the hub's without a path; see `cut_windows`.

    Raise UserError if the folder is missing, the library is not installed or the hub does not
    answer.
    """
    if request.path is not None:
        corpus = f"data=pg19 data.path={request.path}"
        return windows_of(books_at(Path(request.path), corpus), request, corpus)
    books = _download()
    return cut_windows(books, books.__getitem__, request, "data=pg19")
