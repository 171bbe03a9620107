"""A copying task: the prompt ends with the beginning of a passage from its first quarter, whose rest lies far back.

The first half of the text is shuffled, token by token: nothing tells how the passage goes on but the passage. A sliding
window no longer holds it when its copy begins; a policy that retrieves finds it.
"""

import random

from magicdec.data import text
from magicdec.data.base import Encoder, Prompts
from magicdec.errors import UserError

# How much of the passage is given: enough to recognise it, little beside the context.
CUE_SHARE, SHORTEST_CUE, LONGEST_CUE = 8, 8, 256


def load(encoder: Encoder, *, path: str | None, num_rows: int, context_len: int, seed: int) -> Prompts:
    """Windows of `path`, or of the held-out standard library, each followed by the beginning of one of its passages.

    Sources name the passage, such as `asyncio#2@4096+117`: the window, and where in the row the passage begins.
    """
    cue = min(LONGEST_CUE, max(SHORTEST_CUE, context_len // CUE_SHARE))
    length = context_len - cue
    first = len(encoder.prefix)
    if length < first + 4 * cue:
        raise UserError(
            f"batch.context_len={context_len}: data=repeat needs at least {5 * SHORTEST_CUE + first} tokens"
        )
    windows = text.load_or_stdlib(encoder, path=path, num_rows=num_rows, context_len=length, seed=seed)
    tokens, sources = [], []
    for row, source in zip(windows.tokens, windows.sources, strict=True):
        chance = random.Random(f"{seed}/{source}")
        start = chance.randint(first, first + length // 4)
        shuffled = chance.sample(row[first : length // 2], length // 2 - first)
        text_of_row = row[:first] + shuffled + row[length // 2 :]
        tokens.append(text_of_row + text_of_row[start : start + cue])
        sources.append(f"{source}+{start}")
    return Prompts.of(tokens, sources)
