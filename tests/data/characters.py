"""A tokenizer small enough to check by hand, with transformers' interface, and prompts made with
it.
"""

from dataclasses import replace
from pathlib import Path

from magicdec.data import PromptRequest, Prompts, load_prompts

UNICODE = 0x110000  # tokens of a vocabulary of all characters


class CharacterTokenizer:
    """One token per character, numbered by its code point; optionally a beginning-of-text token
    1.
    """

    def __init__(self, bos: bool = False, chat_template: str | None = None) -> None:
        self.bos, self.chat_template = bos, chat_template
        self.characters_read = 0

    def encode(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> list[int]:
        self.characters_read += len(text)
        return [1] * (self.bos and add_special_tokens) + [ord(character) for character in text]

    def apply_chat_template(
        self, messages: list[dict], tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        assert add_generation_prompt
        if any(message["role"] == "nobody" for message in messages):
            raise RuntimeError("unknown role nobody")
        return (
            "".join(f"[{message['role']}]{message['content']}" for message in messages)
            + "[assistant]"
        )


def texts(prompts: Prompts) -> list[str]:
    """Prompts as text, where a token is a character."""
    return ["".join(map(chr, row)) for row in prompts.tokens]


def load(name: str, path: Path | None = None, **changes) -> Prompts:
    """Prompts of a corpus: two rows of 20 tokens, which are characters, unless `changes` say
    otherwise.
    """
    request = PromptRequest(
        2, 20, UNICODE, CharacterTokenizer(), path=None if path is None else str(path)
    )
    return load_prompts(name, replace(request, **changes))
