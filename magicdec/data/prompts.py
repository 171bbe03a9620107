"""A user's own prompts, one JSON object per line: `{"prompt": "..."}` or `{"messages": [{"role":
..., ...}]}`.

Messages go through the tokenizer's chat template, if it has one. Rows are as long as their prompts;
`context_len` is the most that a prompt may have.
"""

from itertools import islice
from pathlib import Path
from typing import Any

from magicdec.config.choices import Corpus
from magicdec.config.registry import CORPORA
from magicdec.data.base import PromptRequest, Prompts
from magicdec.data.records import Unfit, check_text, records
from magicdec.data.text import files_at
from magicdec.data.tokenizer import encode_chat, encode_prompt
from magicdec.errors import UserError


@CORPORA.register(
    Corpus("prompts", needs_path=True, own_lengths=True, files_at=files_at, ignores=("seed",))
)
def load(request: PromptRequest) -> Prompts:
    """Return the file's first `num_rows` prompts, in its order.

    Raise UserError, with the line, for a line that is not a prompt or is too long, and for a file
    with too few prompts.
    """
    if request.path is None:
        raise UserError("data=prompts needs data.path=FILE.jsonl")
    corpus = f"data=prompts data.path={request.path}"
    tokens, sources = [], []
    for number, where, content in islice(records(request.path, corpus), request.num_rows):
        check_text(content, where)
        tokens.append(encode(request, _checked(content, where), where))
        sources.append(f"{Path(request.path).name}:{number}")
    if len(tokens) < request.num_rows:
        raise too_few(corpus, request.num_rows, len(tokens))
    return Prompts(tokens, sources)


def too_few(corpus: str, wanted: int, available: int, left_out: str = "") -> UserError:
    """Return the error for a file with too few prompts."""
    return UserError(
        f"{corpus}: {wanted} rows need as many prompts, the file has {available}{left_out}; "
        "lower batch.size, batch.num_batches or scenario.num_requests"
    )


def _checked(entry: Any, where: str) -> str | list[dict[str, Any]]:
    """Return the prompt's text, or its messages."""
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise UserError(f'{where} must be an object with either "prompt" or "messages"')
    if "prompt" in entry:
        if not isinstance(entry["prompt"], str):
            raise UserError(f'{where}: "prompt" must be a string')
        return entry["prompt"]
    if not is_chat(entry["messages"]):
        raise UserError(
            f'{where}: "messages" must be a list of objects with strings "role" and "content"'
        )
    return entry["messages"]


def is_chat(messages: Any) -> bool:
    """Return whether a value is a list of messages."""
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(_is_message(message) for message in messages)
    )


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(
        isinstance(message.get(key), str) for key in ("role", "content")
    )


def encode(request: PromptRequest, prompt: str | list[dict[str, Any]], where: str) -> list[int]:
    """Return a prompt as token ids. Raise Unfit if it is empty or longer than `context_len`."""
    tokenizer = request.tokenizer
    if isinstance(prompt, str):
        ids = encode_prompt(tokenizer, prompt)
    elif getattr(tokenizer, "chat_template", None):
        ids = encode_chat(tokenizer, prompt, where)
    else:  # a base model, which was trained on plain text
        ids = encode_prompt(tokenizer, "\n\n".join(message["content"] for message in prompt))
    if not ids:
        raise Unfit(f"{where}: the prompt is empty")
    check_length(len(ids), request, where)
    return list(ids)


def check_length(length: int, request: PromptRequest, where: str) -> None:
    """Raise Unfit for a prompt of more tokens than `context_len`."""
    if length > request.context_len:
        most = f"more than batch.context_len={request.context_len}"
        raise Unfit(f"{where}: the prompt has {length:,} tokens, {most}")
