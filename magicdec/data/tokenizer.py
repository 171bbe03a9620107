"""Load tokenizers of checkpoints through transformers, without running code of the checkpoint."""

from pathlib import Path
from typing import Any

from magicdec.errors import UserError

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


def load_tokenizer(folder_or_hub_id: str | Path) -> Any:
    """Return the transformers tokenizer of a local folder or of a Hugging Face hub id.

    Raise UserError if there is none.
    """
    path = Path(folder_or_hub_id).expanduser()
    if path.is_dir():
        for file in path.iterdir():  # transformers opens all of them, and opening a pipe may never end
            if file.exists() and not (file.is_file() or file.is_dir()):
                raise UserError(f"{file} is no regular file")
        if not any((path / name).exists() for name in FILES):
            raise UserError(f"{folder_or_hub_id}: no tokenizer in this folder (looked for {', '.join(FILES)})")
        source = str(path)
    elif path.is_absolute() or str(folder_or_hub_id).startswith((".", "~")) or str(folder_or_hub_id).count("/") > 1:
        raise UserError(f"{folder_or_hub_id}: no such folder")
    else:
        source = str(folder_or_hub_id)
    # Imported here because it takes seconds, which `data=random` and `--help` do not need.
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # a broken file may raise any exception
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"{folder_or_hub_id}: cannot load its tokenizer ({reason})") from None


class Detokenizer:
    """Text as it grows. What may be half of a character is held back until the other half is there."""

    def __init__(self, tokenizer: Any):
        self._tokenizer, self._tokens = tokenizer, list[int]()
        self._start = self._told = 0  # a token's text may depend on the one before: decode from there

    def add(self, tokens: list[int], last: bool = False) -> str:
        """Return the text that these tokens add."""
        self._tokens += tokens
        before, now = (self._text(self._tokens[self._start : end]) for end in (self._told, len(self._tokens)))
        if now.endswith("\ufffd") and not last:
            return ""
        self._start, self._told = self._told, len(self._tokens)
        return now[len(before) :]

    def _text(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)
