"""A user's own text: one UTF-8 file, or every text file of a folder and the folders in it."""

from pathlib import Path

from magicdec.data import stdlib
from magicdec.data.base import Encoder, Prompts, cut_windows
from magicdec.errors import UserError

# What counts as text in a folder. A file named by itself may have any suffix.
SUFFIXES = frozenset({".txt", ".md", ".rst", ".tex", ".py", ".c", ".h", ".cpp", ".cu", ".java", ".js", ".go", ".rs"})


def load(encoder: Encoder, *, path: str | None, num_rows: int, context_len: int, seed: int) -> Prompts:
    """Windows of the file or the files at `path`, one document per file; see `cut_windows`.

    Raises UserError where the path is missing or not text, or holds too little of it.
    """
    if path is None:
        raise UserError("data=text needs data.path=FILE_OR_FOLDER")
    corpus = f"data.path={path}"
    return windows_of(files_at(Path(path), corpus), corpus, encoder, num_rows, context_len, seed)


def load_or_stdlib(encoder: Encoder, *, path: str | None, num_rows: int, context_len: int, seed: int) -> Prompts:
    """Windows of the files at `path`, or, where it is None, of the held-out standard library."""
    if path is None:
        return stdlib.load(encoder, num_rows=num_rows, context_len=context_len, seed=seed)
    return load(encoder, path=path, num_rows=num_rows, context_len=context_len, seed=seed)


def windows_of(
    files: dict[str, Path], corpus: str, encoder: Encoder, num_rows: int, context_len: int, seed: int
) -> Prompts:
    """Return windows of the files by name; `corpus` is what errors call them."""
    return cut_windows(
        files,
        lambda name: read_text(files[name], corpus),
        encoder,
        num_rows=num_rows,
        context_len=context_len,
        seed=seed,
        corpus=corpus,
    )


def read_text(path: Path, corpus: str) -> str:
    """The text of a file; UserError where it is not UTF-8 or cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{corpus}: {path} is not UTF-8 text (byte {error.start}); convert or remove it") from None
    except OSError as error:
        raise UserError(f"{corpus}: cannot read {path} ({error.strerror})") from None


def files_at(path: Path, corpus: str, suffixes: frozenset[str] = SUFFIXES) -> dict[str, Path]:
    """Return the text files at a path by name, relative to the folder so that it is the same on every machine.

    Raise UserError where there is none; `corpus` is what the message calls them.
    """
    path = path.expanduser()
    if path.is_file():
        return {path.name: path}
    if not path.is_dir():
        raise UserError(f"{corpus}: no such file or folder")
    found = {p.relative_to(path): p for p in path.rglob("*") if p.suffix.lower() in suffixes and p.is_file()}
    files = {name.as_posix(): p for name, p in found.items() if not any(part.startswith(".") for part in name.parts)}
    if not files:
        raise UserError(f"{corpus}: no text files in it (looked for {' '.join(sorted(suffixes))})")
    return files
