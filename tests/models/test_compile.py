"""Layers through torch.compile (hardware.compile): the same tokens, and few kernels around each
matmul.
"""

import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from magicdec.kernels.library import compiler
from tests.small import drafting, small_model

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")


@torch.inference_mode()
@pytest.mark.slow
def test_a_compiled_model_writes_the_same_tokens_in_few_kernels():
    """The table of rotations; a sum with a norm, the rotation with the write to the cache, a sum
    with a norm, SwiGLU; the last norm; and one each to look for infinite logits and to commit: no
    cache is copied.
    """
    target = small_model()
    options = {"policy": "streaming", "gamma": 3, "budget": 16, "prefill_chunk": 64}
    lengths = [50, 61, 64]  # of a single chunk: each width is compiled
    batch = drafting("self", target, lengths, **options)
    expected = batch.decoder.generate(batch.draft)
    target.compile_layers()
    batch = drafting("self", target, lengths, **options)
    batch.decoder.restart()
    _, sources = run_and_get_code(batch.decoder.decode_token)
    kernels = re.findall(r"^(cpp_fused\w+) = ", "\n".join(sources), re.MULTILINE)
    marks = ["cos", "rsqrt", "index_put", "rsqrt", "silu", "rsqrt", "isfinite|abs", "index_put"]
    assert len(kernels) == len(marks)
    assert all(re.search(mark, name) for mark, name in zip(marks, kernels, strict=True))
    written = batch.decoder.generate(batch.draft)
    assert written.tokens == expected.tokens
    assert torch.equal(written.accepted_RB, expected.accepted_RB)
