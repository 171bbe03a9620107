"""Rows that have finished: attention leaves them out, in both ways of decoding, and nothing else
changes.

On CPUs, the kernel of all layers and the head's matmul leave them out, too.
"""

import pytest
import torch

from magicdec.attention.cpp import CppAttention
from magicdec.attention.sdpa import SdpaAttention
from magicdec.config.registry import POLICIES
from magicdec.engine import decoder
from magicdec.kernels.library import compiler
from magicdec.models import kv_cache, passes
from magicdec.models.operators import CppOperators
from magicdec.models.passes import PassCall
from magicdec.verification.sampling import Sampling
from tests.small import drafting, small_model

TARGET = small_model(spread=0.15)
LENGTHS, LIMITS = [40, 61, 53, 47], [3, 11, 6, 11]
CPP = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")
CASES = [("self", policy) for policy in POLICIES] + [
    ("model", "streaming"),
    ("hierarchical", "snapkv"),
]


def decode(draft: str, policy: str, sampling: Sampling):
    """Tokens of both ways, of rows with limits of their own."""
    keys = {
        "gamma": 3,
        "budget": 16,
        "num_sink": 2,
        "page_size": 4,
        "sampling": sampling,
        "generate_len": 11,
    }
    batch = drafting(draft, TARGET, LENGTHS, policy=policy, **keys)
    batch.decoder.state.limit_B.copy_(torch.tensor(LENGTHS) + torch.tensor(LIMITS))
    plain, fast = batch.decoder.generate(), batch.decoder.generate(batch.draft)
    again = batch.decoder.generate(batch.draft)
    assert again.tokens == fast.tokens, "entries of the rows that rested are as they were"
    return plain.tokens, fast.tokens, fast.accepted_RB.tolist()


@pytest.mark.parametrize(("draft", "policy"), CASES)
@pytest.mark.parametrize(
    ("attention", "sampling"),
    [
        pytest.param(SdpaAttention, Sampling(0.8, seed=3), id="sdpa-sampled"),
        pytest.param(CppAttention, Sampling(), marks=CPP, id="cpp-greedy"),
    ],
)
def test_other_rows_write_what_they_write_anyway(attention, draft, policy, sampling, monkeypatch):
    monkeypatch.setattr(TARGET, "attention", attention())
    resting = decode(draft, policy, sampling)
    assert [len(row) for row in resting[1]] == LIMITS
    monkeypatch.setattr(
        kv_cache.KVCache, "read_B", lambda cache, num_new: cache.seqlens_B + num_new
    )
    for module in (passes, decoder):
        monkeypatch.setattr(module, "active_rows", lambda resting_B: None)
    assert resting == decode(draft, policy, sampling)


def step(batch) -> None:
    """Decode one token, or a round of the draft."""
    if batch.draft is None:
        batch.decoder.decode_token()
    else:
        batch.decoder.round(batch.draft, 2, 0)


@CPP
@pytest.mark.parametrize("draft", ["none", "self", "eagle3"])
def test_matmuls_leave_finished_rows_out(draft, monkeypatch):
    """Count the rows that the C++ library is given, in the target's passes and in the head."""
    monkeypatch.setattr(TARGET, "attention", CppAttention())
    batch = drafting(draft, TARGET, LENGTHS, gamma=2, budget=16)
    batch.restart()
    batch.decoder.state.finished_B[[1, 2]] = True
    hidden, rows = [], []
    monkeypatch.setattr(
        passes, "PassCall", lambda *args: rows.append(args[-5].rows) or PassCall(*args)
    )
    matmul = CppOperators.matmul

    def counted(self, x, *rest):
        hidden.append(x.shape[:-1].numel())
        return matmul(self, x, *rest)

    monkeypatch.setattr(CppOperators, "matmul", counted)
    step(batch)
    assert set(rows) == {2}
    assert 2 * (1 if draft == "none" else 3) in hidden


@pytest.mark.parametrize("speculates", [False, True])
def test_a_finished_row_is_not_read(speculates, monkeypatch):
    """Record the slots of each row that attention is given to read, in every pass."""
    seen, plan = [], SdpaAttention.plan

    def recorded(attention, seqlens_B, shape, *rest):
        seen.append((shape.num_new, shape.capacity, seqlens_B.tolist()))
        return plan(attention, seqlens_B, shape, *rest)

    keys = {"policy": "streaming", "gamma": 2, "budget": 16, "generate_len": 12}
    batch = drafting("self" if speculates else "none", TARGET, LENGTHS, **keys)
    batch.restart()
    batch.decoder.state.finished_B[1] = True
    monkeypatch.setattr(SdpaAttention, "plan", recorded)
    step(batch)
    assert seen
    for num_new, _, read in seen:
        assert read[1] == num_new
        assert min(read[0], read[2], read[3]) > 12
    verified = [
        read for num_new, capacity, read in seen if capacity == batch.decoder.cache.capacity
    ]
    assert verified[-1][0] == LENGTHS[0] + (3 if speculates else 1)
    assert batch.decoder.cache.resting_B is None
