"""Random tokens: for timing only, because a draft cannot predict what a model says about noise."""

import numpy as np

from magicdec.config.choices import Corpus
from magicdec.config.registry import CORPORA
from magicdec.data.base import PromptRequest, Prompts


@CORPORA.register(Corpus("random", is_noise=True, origin="random", ignores=("path",)))
def load(request: PromptRequest) -> Prompts:
    """Return rows of token ids, drawn evenly from the vocabulary."""
    generator = np.random.default_rng(request.seed)
    # Row by row, so that a larger request begins with the rows of a smaller one.
    rows = [
        generator.integers(request.vocab_size, size=request.context_len).tolist()
        for _ in range(request.num_rows)
    ]
    return Prompts(rows, [f"random@{row}" for row in range(request.num_rows)])
