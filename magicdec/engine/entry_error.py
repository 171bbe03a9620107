"""The distance of entries that were computed again from those of a cache.

B rows, T tokens, N numbers of a vector.
"""

import torch
from torch import Tensor


def relative_error(got: Tensor, expected: Tensor) -> Tensor:
    """Return the distance of vectors (B, T, N) as a share of their size, or of the usual size among
    the T if that is larger; infinite where it is not a number.
    """
    got, expected = got.float(), expected.float()
    size = got.norm(dim=-1)
    usual = size.square().mean(-1, keepdim=True).sqrt()
    error = (got - expected).norm(dim=-1) / size.maximum(usual)
    return error.nan_to_num(nan=torch.inf)
