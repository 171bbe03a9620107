"""Copy the only row of one batch to a row of another, for a request that was prefilled by itself.

L layers, B rows, K KV heads, S slots, D head dim.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor


def copy_row(target: Any, source: Any, row: int, apart: Collection[str] = ()) -> None:
    """Copy the only row of `source` to a row of `target`: its part of every tensor in
    `target.per_row`, without those that the caller copies.
    """
    for name, axis in target.per_row.items():
        theirs = getattr(source, name)
        if name not in apart and theirs is not None:
            getattr(target, name).select(axis, row).copy_(theirs.select(axis, 0))


def copy_valid(ours_LBKSD: Tensor, theirs_LBKSD: Tensor, row: int, length_1: Tensor) -> None:
    """Copy the first `length_1` slots of the only row to a row, and write zeros behind them.

    What an earlier request has left there may not be finite, and a weight of 0 does not hide that.
    """
    slot_S = torch.arange(theirs_LBKSD.shape[3], device=length_1.device)
    is_valid_S1 = (slot_S < length_1)[:, None]
    theirs_LKSD = theirs_LBKSD.select(1, 0)
    torch.where(is_valid_S1, theirs_LKSD, theirs_LKSD.new_zeros(()), out=ours_LBKSD.select(1, row))
