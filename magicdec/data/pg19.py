"""PG-19 (Rae et al. 2019), the books that long-context decoding is usually measured on: its test split of 100 books.

From a local copy (a folder of .txt files, or the published layout with `test/` in it), or through the optional
`datasets` library. The original repository on the hub is a loading script, which current versions refuse; hence the
mirror in Parquet.
"""

from pathlib import Path
from typing import Any

from magicdec.data.base import Encoder, Prompts, cut_windows
from magicdec.data.text import files_at, windows_of
from magicdec.errors import UserError

HUB_DATASET, SPLIT = "emozilla/pg19", "test"
SUFFIXES = frozenset({".txt"})


def load(encoder: Encoder, *, path: str | None, num_rows: int, context_len: int, seed: int) -> Prompts:
    """Windows of the books at `path`, or of the hub's where it is None; see `cut_windows`.

    Raises UserError where the folder is missing, the library is not installed or the hub does not answer.
    """
    if path is not None:
        corpus = f"data=pg19 data.path={path}"
        return windows_of(books_at(Path(path), corpus), corpus, encoder, num_rows, context_len, seed)
    books = _download()
    return cut_windows(
        books, books.__getitem__, encoder, num_rows=num_rows, context_len=context_len, seed=seed, corpus="data=pg19"
    )


def books_at(path: Path, corpus: str) -> dict[str, Path]:
    """Return the books of a local copy by name. Raise UserError where there is none."""
    folder = path.expanduser()
    return files_at(folder / SPLIT if (folder / SPLIT).is_dir() else folder, corpus, SUFFIXES)


def _download() -> dict[str, str]:
    """The test split by title."""
    try:
        import datasets  # optional, and slow to import: only when chosen
    except ImportError:
        raise UserError(
            "data=pg19 needs the datasets library (pip install 'magicdec[pg19]') or data.path=FOLDER"
        ) from None
    try:
        # Streaming, because anything else downloads the training split too, which is 11 GB.
        rows: list[dict[str, Any]] = list(datasets.load_dataset(HUB_DATASET, split=SPLIT, streaming=True))
    except Exception as error:  # the library lets the errors of half a dozen others through
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"data=pg19: cannot load {HUB_DATASET} ({reason}); use data.path=FOLDER") from None
    return {f"{row['short_book_title']} ({number})": row["text"] for number, row in enumerate(rows)}
