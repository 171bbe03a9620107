"""Load tokenizers of checkpoints through transformers, without running code of the checkpoint."""

import json
from pathlib import Path
from typing import Any

from magicdec.errors import UserError, in_brief, in_one_line

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


def load_tokenizer(folder: Path) -> Any:
    """Return the transformers tokenizer of a checkpoint's folder. Raise UserError if there is
    none.
    """
    # Transformers opens all of them, and opening a pipe may never end.
    for file in folder.iterdir():
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise UserError(f"{file} is not a regular file")
    if not any((folder / name).exists() for name in FILES):
        raise UserError(f"{folder}: no tokenizer in this folder (looked for {', '.join(FILES)})")
    # Imported here because it takes seconds, which `data=random` and `--help` do not need.
    from transformers import AutoTokenizer

    try:
        config = _config(folder)
        return AutoTokenizer.from_pretrained(str(folder), config=config, trust_remote_code=False)
    except Exception as error:  # a broken file may raise any exception
        reason = in_one_line(error)
        raise UserError(f"{folder}: cannot load its tokenizer ({reason})") from None


def _config(folder: Path) -> Any:
    """Return what transformers needs of a model's configuration to load a tokenizer that names its
    own class; None where it has to read all of it.

    The class of a family's configuration imports what loads and divides models of any family, which
    takes a second.
    """
    from transformers import PretrainedConfig

    settings = _json(folder / "tokenizer_config.json")
    model = _json(folder / "config.json")
    if not settings.get("tokenizer_class") or "auto_map" in settings or "model_type" not in model:
        return None
    config: Any = PretrainedConfig()
    config.name_or_path = str(folder)
    config.model_type = model["model_type"]
    if "model_name" in model:
        config.model_name = model["model_name"]
    return config


def _json(path: Path) -> dict[str, Any]:
    """Return the keys of a JSON file; {} for one that transformers would refuse, in its words."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def prefix_of(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that a tokenizer puts before a text, such as the beginning of a sequence;
    () if none.
    """
    bare = list(tokenizer.encode("a", add_special_tokens=False))
    full = list(tokenizer.encode("a", add_special_tokens=True))
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start])
    return ()


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """Return a prompt's text as token ids, with the tokenizer's prefix once.

    A text that has been through a chat template may begin with the prefix's own text already.
    """
    # verbose=False: transformers would warn that a long prompt is longer than the model's maximum.
    ids: list[int] = list(tokenizer.encode(text, verbose=False))
    prefix = list(prefix_of(tokenizer))
    count = len(prefix)
    return ids[count:] if prefix and ids[count : 2 * count] == prefix else ids


def encode_bare(tokenizer: Any, text: str) -> list[int]:
    """Return a text as token ids, without the tokenizer's prefix."""
    # verbose=False: transformers would warn that a long text is longer than the model's maximum.
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return ids


def encode_chat(tokenizer: Any, messages: list[dict[str, Any]], where: str) -> list[int]:
    """Return a conversation as token ids, up to where the model's answer begins.

    Raise UserError for messages that the tokenizer's chat template refuses; `where` is what the
    error calls them.
    """
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program of the checkpoint, and may raise anything
        raise UserError(
            f"{where}: refused by the model's chat template: {in_brief(str(error))}"
        ) from None
    return encode_bare(tokenizer, text)  # the template adds the prefix


class Detokenizer:
    """The text of tokens that arrive one by one. The first half of a character waits for the second
    half.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._tokens = list[int]()
        # A token's text may depend on the one before: decode from there.
        self._start = self._told = 0

    def add(self, tokens: list[int], last: bool = False) -> str:
        """Return the text that these tokens add."""
        self._tokens += tokens
        decode = self._tokenizer.decode
        told = self._tokens[self._start : self._told]
        before = decode(told, skip_special_tokens=True)
        now = decode(self._tokens[self._start :], skip_special_tokens=True)
        if now.endswith("\ufffd") and not last:
            return ""
        self._start = self._told
        self._told = len(self._tokens)
        return now[len(before) :]
