"""The bundled pair: what the models' card promises of the files."""

import json
from pathlib import Path

import pytest

import magicdec
from magicdec.data import PromptRequest, load_prompts, stdlib
from magicdec.data.tokenizer import load_tokenizer
from tests.refusals import refusal

TINY = Path(magicdec.__file__).parent / "models" / "tiny"
END_OF_TEXT = 0


@pytest.fixture(scope="module", params=["target", "draft"])
def model(request):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(TINY / request.param)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY / "target")


def config(name: str) -> dict:
    return json.loads((TINY / name / "config.json").read_text())


def test_transformers_loads_it(model, tokenizer):
    assert model.config.vocab_size == len(tokenizer) == 1024
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    assert model.config.max_position_embeddings == 8448
    assert model.config.eos_token_id == tokenizer.eos_token_id == END_OF_TEXT


def test_it_was_trained(model, tokenizer):
    """Held-out text costs it far less than the ln(1024) = 6.93 nats per token of a model that knows
    nothing.
    """
    import torch

    ids = torch.tensor(load_prompts("stdlib", PromptRequest(1, 512, 1024, tokenizer)).tokens)
    assert model.float()(input_ids=ids, labels=ids).loss.item() < 5.5


def test_the_tokenizers_are_one():
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (TINY / "target" / name).read_bytes() == (TINY / "draft" / name).read_bytes()


def test_the_tokenizer_writes_any_text(tokenizer):
    text = "def f(x):\n\treturn 'ünï ☃ 汉字' if x else None  # \x00\n\n\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert END_OF_TEXT not in tokenizer.encode(text)
    assert (
        END_OF_TEXT not in load_prompts("stdlib", PromptRequest(1, 8192, 1024, tokenizer)).tokens[0]
    )


def test_the_draft_is_at_least_six_times_smaller():
    def size(name: str) -> int:
        return (TINY / name / "model.safetensors").stat().st_size

    assert 6 * size("draft") <= size("target")
    assert sum(path.stat().st_size for path in TINY.rglob("*") if path.is_file()) <= 20 * 2**20


def test_the_evaluation_is_of_this_split_and_the_draft_is_the_worse_model():
    record = json.loads((TINY / "evaluation.json").read_text())
    assert set(record["corpus"]["held_out"]["stdlib"]) == stdlib.HELD_OUT
    for kind in ("stdlib", "books"):
        target, draft = (
            record[name]["held_out"][kind]["full_nats_per_token"] for name in ("target", "draft")
        )
        assert target < draft


def test_enough_prompts_for_a_large_batch(tokenizer):
    prompts = load_prompts("stdlib", PromptRequest(128, 4096, 1024, tokenizer))
    assert len({tuple(row) for row in prompts.tokens}) == 128
    assert {len(row) for row in prompts.tokens} == {4096}


def test_missing_tokenizers_are_one_line(tmp_path):
    with refusal("no tokenizer in this folder"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("not json")
    with refusal("cannot load its tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: {}["vocab"])
        with refusal("cannot load its tokenizer (KeyError: 'vocab')"):
            load_tokenizer(tmp_path)
