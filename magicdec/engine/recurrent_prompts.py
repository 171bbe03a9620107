"""The prompts of a target with recurrent layers, computed again: no pass can begin in the middle of
a prompt, because the states there are not kept.

So some rows are prefilled once more from their first token, by PyTorch's operators and attention,
into a cache of their own. Entries, the states behind the prompts and the last hidden states must be
those that the batch's cache holds.

B rows, S tokens of a prompt, T tokens of a pass.
"""

import torch
from torch import Tensor

from magicdec.engine.decoder import Decoder
from magicdec.engine.entry_error import relative_error
from magicdec.models.kv_cache import KVCache
from magicdec.models.transformer import Transformer

SHARE = 8  # one of so many rows is computed again,
FEWEST = 1024  # but so many tokens at least
AT_ONCE = 512  # tokens of a pass


def errors_of_rows(decoder: Decoder, seed: int) -> tuple[Tensor, Tensor]:
    """Return the largest error (B, S) of each token, 0 of those that were not compared, and which
    were compared. The seed chooses the rows. The error of a row's states is that of its last token.
    """
    model = decoder.target.plain()
    tokens_BS = decoder.state.tokens_BS
    error_BS = torch.zeros_like(tokens_BS, dtype=torch.float32)
    checked_BS = torch.zeros_like(tokens_BS, dtype=torch.bool)
    rows = len(tokens_BS)
    count = max(rows // SHARE, min(rows, -(-FEWEST // decoder.state.max_prompt_len)), 1)
    chosen = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))[:count]
    for row in chosen.tolist():
        length = int(decoder.state.prompt_len_B[row])
        error_BS[row, :length] = _errors_of_row(decoder, model, row, length)
        checked_BS[row, :length] = True
    return error_BS, checked_BS


def _errors_of_row(decoder: Decoder, model: Transformer, row: int, length: int) -> Tensor:
    """Return the largest error of each token of a row (S,)."""
    cache = decoder.cache
    tokens_1S = decoder.state.tokens_BS[row : row + 1, :length]
    again = KVCache(model.config, 1, length, cache.k_LBKSD.dtype, decoder.device)
    for tokens_1T in tokens_1S.split(AT_ONCE, dim=1):
        hidden_1TE = model(tokens_1T, again)
    pairs = [
        (ours_1KSD, theirs_BKSD[row : row + 1, :, :length])
        for ours, theirs in ((again.k_LBKSD, cache.k_LBKSD), (again.v_LBKSD, cache.v_LBKSD))
        for ours_1KSD, theirs_BKSD in zip(ours, theirs, strict=True)
    ]
    error_S = torch.stack(
        [relative_error(*(x.transpose(1, 2).flatten(2) for x in pair))[0] for pair in pairs]
    ).amax(0)
    last_1E = decoder.last_BE[row : row + 1]
    behind = [relative_error(hidden_1TE[:, -1:], last_1E[:, None])]
    if cache.states is not None and again.states is not None:
        behind += [
            relative_error(ours[:, None].flatten(2), theirs[row : row + 1, None].flatten(2))
            for ours_L, theirs_L in zip(again.states.now, cache.states.marked, strict=True)
            for ours, theirs in zip(ours_L, theirs_L, strict=True)
        ]
    error_S[-1] = torch.stack([error_S[-1], *(error.amax() for error in behind)]).amax()
    return error_S


def rehearse_row(decoder: Decoder) -> None:
    """Run a pass over a row's first tokens, to estimate the memory that it takes."""
    model = decoder.target.plain()
    tokens_1S = decoder.state.tokens_BS[:1]
    again = KVCache(model.config, 1, tokens_1S.shape[1], model.dtype, decoder.device)
    model(tokens_1S[:, :AT_ONCE], again)
