"""A tokenizer small enough to check by hand, with transformers' interface, and prompts made with it."""

from pathlib import Path

from magicdec.data import PromptRequest, Prompts, load_prompts

UNICODE = 0x110000  # tokens of a vocabulary of all characters


class CharacterTokenizer:
    """One token per character, numbered by its code point; optionally a beginning-of-text token 1."""

    def __init__(self, bos: bool = False, chat_template: str | None = None) -> None:
        self.bos, self.chat_template = bos, chat_template
        self.characters_read = 0

    def encode(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> list[int]:
        self.characters_read += len(text)
        return [1] * (self.bos and add_special_tokens) + [ord(character) for character in text]

    def apply_chat_template(self, messages: list[dict], tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        assert add_generation_prompt
        if any(message["role"] == "nobody" for message in messages):
            raise RuntimeError("unknown role nobody")
        return "".join(f"[{message['role']}]{message['content']}" for message in messages) + "[assistant]"


def load(
    name: str,
    path: Path | None = None,
    *,
    rows: int = 2,
    context: int = 20,
    tokenizer: CharacterTokenizer | None = None,
    seed: int = 0,
    vocab: int = UNICODE,
    task: str | None = None,
) -> Prompts:
    """Prompts of a corpus; a token a character, unless another tokenizer is given."""
    where = None if path is None else str(path)
    request = PromptRequest(rows, context, vocab, tokenizer or CharacterTokenizer(), seed, where, task)
    return load_prompts(name, request)
