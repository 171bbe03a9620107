"""Logits against transformers, in fp32, for every family and every use of the one forward pass."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from magicdec.kernels.library import compiler
from magicdec.models.description import read_config
from magicdec.models.kv_cache import KVCache
from magicdec.models.operators import CppOperators
from magicdec.models.transformer import Transformer
from tests.checkpoints import SIZES, load_model, load_reference, make_checkpoint
from tests.programs import ROOT

TOLERANCE = 1e-4
# Past every sliding window and every original context, and not.
LENGTHS = torch.tensor([40, 23, 5], dtype=torch.int32)
CAPACITY = 64


@pytest.fixture(scope="module", params=["sdpa", "cpp"])
def model(checkpoint: Path, request: pytest.FixtureRequest) -> Transformer:
    if request.param == "cpp" and compiler() is None:
        pytest.skip("needs a C++ compiler")
    model = load_model(checkpoint)
    if request.param == "cpp":  # with attention that takes any head dim
        model.__class__ = type("CppTransformer", (Transformer,), {"operators": CppOperators()})
    return model


@pytest.fixture(scope="module")
def tokens_BS(checkpoint: Path) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, read_config(checkpoint).vocab_size, (3, CAPACITY), generator=generator)


@pytest.fixture(scope="module")
def expected_BSV(checkpoint: Path, tokens_BS: Tensor) -> Tensor:
    """Return transformers' logits of every position: rows are whole here, so that nothing is padded
    or masked.
    """
    with torch.no_grad():
        return load_reference(checkpoint)(tokens_BS).logits


@pytest.fixture
def cache(checkpoint: Path) -> KVCache:
    return KVCache(read_config(checkpoint), 3, CAPACITY, torch.float32, "cpu")


def assert_close(logits: Tensor, expected: Tensor) -> None:
    assert expected.std() > 0.3  # else the tolerance would mean little
    torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)


def prefill_ragged(model: Transformer, cache: KVCache, tokens_BS: Tensor, chunk: int) -> Tensor:
    """Prefill rows of LENGTHS, padded to the longest, and forget the padding; returns the logits of
    all positions.
    """
    longest = int(LENGTHS.max())
    hidden = [
        model(tokens_BS[:, start : min(start + chunk, longest)], cache)
        for start in range(0, longest, chunk)
    ]
    cache.rollback(LENGTHS)
    return model.logits(torch.cat(hidden, dim=1))


def at(values_BS: Tensor, starts_B: Tensor, count: int) -> Tensor:
    """`count` entries of each row from its own start on."""
    index_BT = starts_B.long()[:, None] + torch.arange(count)
    return values_BS[torch.arange(len(starts_B))[:, None], index_BT]


@pytest.mark.parametrize("chunk", [CAPACITY, 7, 1])
def test_prefill(model, cache, tokens_BS, expected_BSV, chunk):
    hidden = [
        model(tokens_BS[:, start : start + chunk], cache) for start in range(0, CAPACITY, chunk)
    ]
    assert_close(model.logits(torch.cat(hidden, dim=1)), expected_BSV)


@pytest.mark.parametrize("chunk", [40, 7])
def test_ragged_prefill(model, cache, tokens_BS, expected_BSV, chunk):
    logits = prefill_ragged(model, cache, tokens_BS, chunk)
    for row, length in enumerate(LENGTHS):
        assert_close(logits[row, :length], expected_BSV[row, :length])


@pytest.mark.parametrize("count", [1, 5], ids=["decode", "verify"])
def test_steps_of_ragged_rows(model, cache, tokens_BS, expected_BSV, count):
    prefill_ragged(model, cache, tokens_BS, chunk=16)
    for step in range(3):
        starts_B = LENGTHS + step * count
        logits = model.logits(model(at(tokens_BS, starts_B, count), cache))
        assert_close(logits, at(expected_BSV, starts_B, count))
    assert torch.equal(cache.seqlens_B, LENGTHS + 3 * count)


def test_a_step_after_a_rollback(model, cache, tokens_BS, expected_BSV):
    # Rows accept their own number of tokens: slots beyond seqlens must not be seen.
    prefill_ragged(model, cache, tokens_BS, chunk=40)
    model(torch.zeros(3, 5, dtype=torch.int64), cache)
    kept_B = LENGTHS - torch.tensor([0, 3, 1], dtype=torch.int32)
    cache.rollback(kept_B)
    assert_close(model.logits(model(at(tokens_BS, kept_B, 5), cache)), at(expected_BSV, kept_B, 5))


def test_a_known_target_beyond_its_sliding_window(tmp_path):
    """mistral-7b-v0.1 in small, over more than its 4,096 tokens: prefilled in chunks, and one
    step.
    """
    published = json.loads((ROOT / "conf/target/mistral-7b-v0.1.json").read_text())
    kept = {
        key: published[key] for key in ("sliding_window", "max_position_embeddings", "rope_theta")
    }
    folder = make_checkpoint(tmp_path, "mistral-sliding", **kept)
    model, config = load_model(folder), read_config(folder)
    tokens_BS = torch.randint(
        0, SIZES["vocab_size"], (1, 4200), generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        expected = load_reference(folder)(tokens_BS).logits[:, -1]
    found = []
    for model.config in (config, replace(config, sliding_window=None, sliding_layers=())):
        cache = KVCache(model.config, 1, 4200, torch.float32, "cpu")
        for start in range(0, 4199, 600):
            model(tokens_BS[:, start : min(start + 600, 4199)], cache)
        found.append(model.logits(model(tokens_BS[:, -1:], cache))[:, -1])
    assert config.sliding_window == 4096
    assert_close(found[0], expected)
    assert (found[1] - expected).abs().max() > 10 * TOLERANCE, "the window makes no difference here"
