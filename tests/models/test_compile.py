"""Layers through torch.compile (hardware.compile): the same tokens, and few kernels around each matmul."""

import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from magicdec.kernels.library import compiler
from tests.small import open_batch, random_prompts, small_model

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")


@torch.inference_mode()
def test_compiled_layers_write_the_same_tokens_in_four_kernels():
    """A sum with a norm, the rotation with the write to the cache, a sum with a norm, SwiGLU: no cache is copied."""
    target = small_model()
    batch = open_batch(target, random_prompts([50, 61, 70]), draft_name="self", policy="streaming", gamma=3, budget=16)
    expected = batch.decoder.generate(batch.draft)
    batch.decoder.restart()
    target.compile_layers()
    _, sources = run_and_get_code(batch.decoder.decode_token)
    kernels = re.findall(r"^(cpp_fused\w+) = ", "\n".join(sources), re.MULTILINE)
    assert len(kernels) == 4
    assert [("index_put" in name, "silu" in name, "rsqrt" in name) for name in kernels] == [
        (False, False, True),
        (True, False, False),
        (False, False, True),
        (False, True, False),
    ]
    written = batch.decoder.generate(batch.draft)
    assert written.tokens == expected.tokens
    assert torch.equal(written.accepted_RB, expected.accepted_RB)
