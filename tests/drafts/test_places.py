"""Drafts ask for no place that a tensor does not have, also for rows that are much shorter than
others.

`take_along_dim` does not check: on a CPU, such an index wraps; on a GPU, it may read anything.
"""

import pytest
from torch.overrides import TorchFunctionMode

from tests.small import drafting, small_model

TARGET = small_model(num_kv_heads=4)


class Checked(TorchFunctionMode):
    """Every index of `take_along_dim`, which is counted, is within its tensor."""

    taken = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "take_along_dim":
            (x, index), dim = args, kwargs["dim"]
            assert 0 <= index.min() <= index.max() < x.shape[dim]
            self.taken += 1
        return func(*args, **kwargs)


@pytest.mark.parametrize("policy", ["full", "snapkv", "h2o"])
@pytest.mark.parametrize("draft", ["eagle3", "hierarchical", "mtp"])
def test_short_rows_take_what_is_there(draft, policy):
    keys = {"policy": policy, "gamma": 3, "budget": 24, "num_sink": 2, "generate_len": 12}
    with Checked() as checked:
        batch = drafting(draft, TARGET, [4, 60, 1, 33], **keys)
        batch.decoder.generate(batch.draft)
    assert checked.taken > 0
