"""The text of an answer, up to the first stop string."""

from collections.abc import Sequence
from typing import Any

from magicdec.data.tokenizer import Detokenizer


class StoppableText:
    """Text up to the first stop string, which may span tokens and rounds, and its tokens.

    An ending that may begin a stop string is held back until more tokens arrive. The token that
    completes a stop string is the last one, as if each were decoded alone.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()):
        self._detokenizer = Detokenizer(tokenizer)
        self._stops, self._held = stops, ""
        self.tokens: list[int] = []  # up to the end of the text
        self.stopped = False  # a stop string was found: nothing follows

    def add(self, tokens: list[int]) -> str:
        """Return the text that these tokens add."""
        text = ""
        for part in [[token] for token in tokens] if self._stops else [tokens]:
            if not self.stopped:
                self.tokens += part
                text += self._grown(self._detokenizer.add(part), last=False)
        return text

    def rest(self) -> str:
        """Return the text that was held back, at the end."""
        return "" if self.stopped else self._grown(self._detokenizer.add([], last=True), last=True)

    def _grown(self, new: str, last: bool) -> str:
        """Return the text that is not held back any more."""
        text = self._held + new
        places = [at for at in map(text.find, self._stops) if at >= 0]
        self.stopped = bool(places)
        end = min(places) if places else len(text)
        if not (places or last):
            end -= max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[end:]
        return text[:end]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest prefix of a stop string that the text ends with."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
