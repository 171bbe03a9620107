"""Random tokens: for timing only, since nothing that a model says about noise can be guessed."""

import numpy as np

from magicdec.data.base import Prompts


def load(*, vocab_size: int, num_rows: int, context_len: int, seed: int) -> Prompts:
    """`num_rows` rows of `context_len` token ids, drawn evenly from the vocabulary."""
    generator = np.random.default_rng(seed)
    # Row by row, so that more rows begin with the fewer rows.
    rows = [generator.integers(vocab_size, size=context_len).tolist() for _ in range(num_rows)]
    return Prompts.of(rows, [f"random@{row}" for row in range(num_rows)])
