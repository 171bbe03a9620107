"""The rows of a batch that a pass computes: on a CPU not those that rest.

B rows, M of them that are computed.
"""

from torch import Tensor


def active_rows(resting_B: Tensor | None) -> Tensor | None:
    """Return the indices of the rows that do not rest; None where none rests, and beyond CPUs,
    where shapes are static.
    """
    if resting_B is None or resting_B.device.type != "cpu" or not bool(resting_B.any()):
        return None
    return (~resting_B).nonzero()[:, 0]


def among(rows: Tensor | None, x_M: Tensor, num_rows: int) -> Tensor:
    """Return a tensor of `num_rows` rows, 0 but for `rows`, which are those of `x_M`; `x_M` itself
    if that is None.
    """
    return (
        x_M if rows is None else x_M.new_zeros(num_rows, *x_M.shape[1:]).index_copy_(0, rows, x_M)
    )
