"""Hidden states at listed layers, against transformers and on every path of a forward pass."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from magicdec.attention.cpp import CppAttention
from magicdec.kernels.library import compiler
from magicdec.models import passes
from magicdec.models.description import read_config
from magicdec.models.kv_cache import KVCache
from magicdec.models.taps import Taps
from tests.checkpoints import load_model, load_reference
from tests.small import VOCAB, small_model

TOKENS = 24


def hidden_states(model, tokens_BS: Tensor, taps: Taps, chunk: int) -> Tensor:
    cache, found = KVCache(model.config, len(tokens_BS), TOKENS, torch.float32, "cpu"), []
    for part_BT in tokens_BS.split(chunk, dim=1):
        model(part_BT, cache, taps)
        found.append(taps.hidden_BTN)
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("chunk", [TOKENS, 5])
def test_they_are_those_of_transformers(checkpoint: Path, chunk):
    model, layers = load_model(checkpoint), (2, 0, 1)
    tokens_BS = torch.randint(0, read_config(checkpoint).vocab_size, (3, TOKENS))
    with torch.no_grad():
        theirs = load_reference(checkpoint)(tokens_BS, output_hidden_states=True).hidden_states
    expected = torch.cat([theirs[layer] for layer in layers], dim=-1)
    torch.testing.assert_close(
        hidden_states(model, tokens_BS, Taps(layers), chunk), expected, rtol=0, atol=1e-4
    )


def test_the_last_one_is_what_the_last_norm_reads():
    model, taps = small_model(), Taps((2,))
    cache = KVCache(model.config, 1, TOKENS, torch.float32, "cpu")
    normed_BTE = model(torch.randint(0, VOCAB, (1, TOKENS)), cache, taps)
    torch.testing.assert_close(model.norm(taps.hidden_BTN), normed_BTE)


@pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("layers", [(0,), (1, 3), (3, 0, 4), (2, 2), (4,)])
@torch.inference_mode()
def test_passes_in_one_call_hand_out_the_same(layers, monkeypatch):
    """With taps a pass of few rows is several calls: states and output stay the same, bit for
    bit.
    """
    model = small_model(num_layers=4)
    model.attention = CppAttention()
    tokens_BT = torch.randint(0, VOCAB, (3, 4))
    found = []
    for taps in (Taps(layers), None, Taps(layers)):
        cache = KVCache(model.config, 3, 8, torch.float32, "cpu")
        hidden_BTE = model(tokens_BT, cache, taps)
        states = taps.hidden_BTN if taps else found[0][1]
        found.append((hidden_BTE, states, cache.k_LBKSD, cache.v_LBKSD))
        if taps is None:
            monkeypatch.setattr(passes, "run", lambda *_: None)
    for other in found[1:]:
        for ours, theirs in zip(found[0], other, strict=True):
            assert torch.equal(ours, theirs)
