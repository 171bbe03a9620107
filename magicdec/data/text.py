"""A user's own text: one UTF-8 file, or every text file of a folder and the folders in it."""

import os
from pathlib import Path

from magicdec.config.choices import Corpus
from magicdec.config.registry import CORPORA
from magicdec.data import stdlib
from magicdec.data.base import PromptRequest, Prompts, cut_windows
from magicdec.errors import UserError

# The text files of a folder. A single file may have any suffix.
SUFFIXES = frozenset(
    {".txt", ".md", ".rst", ".tex", ".py", ".c", ".h", ".cpp", ".cu", ".java", ".js", ".go", ".rs"}
)


def windows_of(files: dict[str, Path], request: PromptRequest, corpus: str) -> Prompts:
    """Return windows of the files by name; `corpus` is their name in errors."""
    return cut_windows(files, lambda name: read_text(files[name], corpus), request, corpus)


def read_text(path: Path, corpus: str) -> str:
    """Return the text of a file. Raise UserError if it is not UTF-8 or cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{corpus}: {path} is not UTF-8 text (byte {error.start}); convert or remove it"
        ) from None
    except OSError as error:
        raise UserError(f"{corpus}: cannot read {path} ({error.strerror})") from None


def files_at(path: Path, corpus: str, suffixes: frozenset[str] = SUFFIXES) -> dict[str, Path]:
    """Return the text files at a path by name, relative to the folder so that names do not depend
    on the machine.

    Raise UserError if there is none; `corpus` is its name in the message.
    """
    path = Path(os.path.expanduser(path))
    # Path.is_file and is_dir raise for a path that is too long; these two return False.
    if os.path.isfile(path):
        return {path.name: path}
    if not os.path.isdir(path):
        raise UserError(f"{corpus}: no such file or folder")
    paths = {
        p.relative_to(path): p
        for p in path.rglob("*")
        if p.suffix.lower() in suffixes and p.is_file()
    }
    files = {
        name.as_posix(): p
        for name, p in paths.items()
        if not any(part.startswith(".") for part in name.parts)
    }
    if not files:
        raise UserError(f"{corpus}: no text files in it (looked for {' '.join(sorted(suffixes))})")
    return files


@CORPORA.register(Corpus("text", needs_path=True, files_at=files_at))
def load(request: PromptRequest) -> Prompts:
    """Return windows of the files at `path`, one document per file; see `cut_windows`.

    Raise UserError if the path is missing or not text, or holds too little of it.
    """
    if request.path is None:
        raise UserError("data=text needs data.path=FILE_OR_FOLDER")
    corpus = f"data.path={request.path}"
    return windows_of(files_at(Path(request.path), corpus), request, corpus)


def load_or_stdlib(request: PromptRequest) -> Prompts:
    """Return windows of the files at `path`, or of the held-out standard library without a path."""
    return stdlib.load(request) if request.path is None else load(request)
