"""A copying task: the prompt ends with the beginning of a passage from its first quarter.

The first half of the text is shuffled, token by token, so that only the passage itself shows how it
continues. A sliding window no longer holds the passage when its copy begins. A policy that selects
by attention can find it.
"""

import random
from dataclasses import replace

from magicdec.config.choices import Corpus
from magicdec.config.registry import CORPORA
from magicdec.data import text
from magicdec.data.base import PromptRequest, Prompts
from magicdec.errors import UserError

# The part of the passage that is given: long enough to recognise it, short next to the context.
CUE_SHARE, SHORTEST_CUE, LONGEST_CUE = 8, 8, 256


@CORPORA.register(Corpus("repeat", files_at=text.files_at))
def load(request: PromptRequest) -> Prompts:
    """Return windows of `path`, or of the held-out standard library, each followed by the beginning
    of a passage.

    Sources name the passage, such as `asyncio#2@4096+117`: the window, and where in the row the
    passage begins.
    """
    context_len = request.context_len
    cue = min(LONGEST_CUE, max(SHORTEST_CUE, context_len // CUE_SHARE))
    length = context_len - cue
    first = len(request.prefix)
    if length < first + 4 * cue:
        least = 5 * SHORTEST_CUE + first
        raise UserError(
            f"batch.context_len={context_len}: data=repeat needs at least {least} tokens"
        )
    windows = text.load_or_stdlib(replace(request, context_len=length))
    tokens, sources = [], []
    for row, source in zip(windows.tokens, windows.sources, strict=True):
        chance = random.Random(f"{request.seed}/{source}")
        start = chance.randint(first, first + length // 4)
        shuffled = chance.sample(row[first : length // 2], length // 2 - first)
        text_of_row = row[:first] + shuffled + row[length // 2 :]
        tokens.append(text_of_row + text_of_row[start : start + cue])
        sources.append(f"{source}+{start}")
    return Prompts(tokens, sources)
