"""A user's own prompts, one JSON object per line: `{"prompt": "..."}` or `{"messages": [{"role": ..., ...}]}`.

Messages go through the tokenizer's chat template, if it has one. Rows are as long as their prompts; `context_len` is
the most that a prompt may have.
"""

import json
from pathlib import Path
from typing import Any

from magicdec.config.choices import Corpus
from magicdec.config.registry import CORPORA
from magicdec.data.base import PromptRequest, Prompts
from magicdec.data.text import files_at, read_text
from magicdec.errors import UserError, in_one_line


@CORPORA.register(Corpus("prompts", needs_path=True, own_lengths=True, files_at=files_at))
def load(request: PromptRequest) -> Prompts:
    """Return the file's first `num_rows` prompts, in its order.

    Raise UserError, with the line, for a line that is not a prompt or is too long, and for a file with too few prompts.
    """
    if request.path is None:
        raise UserError("data=prompts needs data.path=FILE.jsonl")
    corpus = f"data=prompts data.path={request.path}"
    file, rows = Path(request.path).expanduser(), request.num_rows
    if not file.is_file():
        raise UserError(f"{corpus}: no such file")
    lines = [(n, line) for n, line in enumerate(read_text(file, corpus).split("\n"), start=1) if line.strip()]
    if len(lines) < rows:
        raise UserError(f"{corpus}: {rows} rows need as many prompts, the file has {len(lines)}; lower batch.size")
    tokens, sources = [], []
    for number, line in lines[:rows]:
        where = f"{corpus}, line {number}"
        tokens.append(_encode(request.tokenizer, _parse(line, where), where, request.context_len))
        sources.append(f"{file.name}:{number}")
    return Prompts(tokens, sources)


def _parse(line: str, where: str) -> str | list[dict[str, Any]]:
    """Return the prompt's text, or its messages."""
    try:
        entry = json.loads(line)
        json.dumps(entry, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} cannot be read ({in_one_line(error)})") from None
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise UserError(f'{where} must be an object with either "prompt" or "messages"')
    if "prompt" in entry:
        if not isinstance(entry["prompt"], str):
            raise UserError(f'{where}: "prompt" must be a string')
        return entry["prompt"]
    messages = entry["messages"]
    if not isinstance(messages, list) or not messages or not all(_is_message(message) for message in messages):
        raise UserError(f'{where}: "messages" must be a list of objects with strings "role" and "content"')
    return messages


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _encode(tokenizer: Any, prompt: str | list[dict[str, Any]], where: str, context_len: int) -> list[int]:
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt, verbose=False)
    elif getattr(tokenizer, "chat_template", None):
        ids = tokenizer.encode(_templated(tokenizer, prompt, where), add_special_tokens=False, verbose=False)
    else:  # a base model, which was trained on plain text
        ids = tokenizer.encode("\n\n".join(message["content"] for message in prompt), verbose=False)
    if not ids:
        raise UserError(f"{where}: the prompt is empty")
    if len(ids) > context_len:
        raise UserError(f"{where}: the prompt has {len(ids):,} tokens, more than batch.context_len={context_len}")
    return list(ids)


def _templated(tokenizer: Any, messages: list[dict[str, Any]], where: str) -> str:
    """Return a conversation as text, up to where the model's answer begins."""
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates are programs of the checkpoint: any exception is possible
        raise UserError(f"{where}: the chat template refuses these messages ({error})") from None
