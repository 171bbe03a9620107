"""A real pretrained model: SmolLM2-135M (4-bit, dequantized), in the folder that MAGICDEC_SMOLLM2
names.

`python tools/get_smollm2.py --out FOLDER` makes it.
"""

import argparse
import inspect
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from magicdec.models.description import read_config
from magicdec.models.kv_cache import KVCache
from tests.checkpoints import load_model, load_reference

FOLDER = os.environ.get("MAGICDEC_SMOLLM2", "")
pytestmark = pytest.mark.skipif(
    not FOLDER, reason="MAGICDEC_SMOLLM2 names no folder made by tools/get_smollm2.py"
)


def test_logits_equal_those_of_transformers():
    """Prefill by chunks, verify three tokens, and take single steps.

    The tokens are text: after random ones this model's logits have errors of 0.02 in fp32, in
    either library.
    """
    text = inspect.getdoc(argparse) + inspect.getsource(argparse.ArgumentParser)
    tokens_BS = torch.tensor(AutoTokenizer.from_pretrained(FOLDER)(text).input_ids[:142]).view(
        2, 71
    )
    with torch.inference_mode():
        expected_BSV = load_reference(Path(FOLDER))(tokens_BS).logits
        model = load_model(Path(FOLDER))
        cache = KVCache(read_config(Path(FOLDER)), 2, 71, torch.float32, "cpu")
        hidden = [model(part, cache) for part in tokens_BS.split([32, 32, 3, 1, 1, 1, 1], dim=1)]
        logits_BSV = model.logits(torch.cat(hidden, dim=1))
    assert expected_BSV.std() > 1
    torch.testing.assert_close(logits_BSV, expected_BSV, rtol=0, atol=1e-4)
