"""Greedy output, autoregressive and speculative, against transformers' `generate`, token for token
in fp32.
"""

import pytest
import torch

from magicdec.config.registry import POLICIES
from tests.checkpoints import load_model, load_reference, make_checkpoint
from tests.small import noisy_copy, open_batch, random_prompts

NEW_TOKENS = 12
LENGTHS = [37, 23, 50]


@pytest.mark.parametrize(
    "family", ["llama", "llama-llama3", "mistral-sliding", "qwen2", "qwen3-tied"]
)
def test_against_generate(tmp_path, family):
    folder = make_checkpoint(tmp_path, family, eos_token_id=None)
    target, reference = load_model(folder), load_reference(folder)
    prompts = random_prompts(LENGTHS, vocab=96)
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    ids = [torch.tensor([prompt]) for prompt in prompts]
    # With a mask of its own: generate would take tokens that equal the padding's for padding.
    written = [reference.generate(i, attention_mask=torch.ones_like(i), **settings)[0] for i in ids]
    expected = [row[len(prompt) :].tolist() for row, prompt in zip(written, prompts, strict=True)]
    drafts = [("self", policy) for policy in POLICIES]
    drafts += [
        ("model", policy) for policy in (POLICIES if family == "llama" else ["streaming", "snapkv"])
    ]
    assert (
        open_batch(target, prompts, generate_len=NEW_TOKENS).decoder.generate().tokens == expected
    )
    for draft, policy in drafts:
        model = noisy_copy(target, 0.1) if draft == "model" else None
        keys = {
            "gamma": 3,
            "policy": policy,
            "budget": 16,
            "num_sink": 2,
            "generate_len": NEW_TOKENS,
        }
        batch = open_batch(target, prompts, draft_name=draft, draft_model=model, **keys)
        assert batch.decoder.generate(batch.draft).tokens == expected
