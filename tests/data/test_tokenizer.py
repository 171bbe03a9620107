"""Prompts as tokens: with the tokenizer's prefix once, against transformers' own chat templates."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from magicdec import data
from magicdec.data.base import PromptRequest
from magicdec.data.prompts import encode
from magicdec.data.tokenizer import encode_prompt, load_tokenizer, prefix_of
from magicdec.peers.endpoint import text_of

TEMPLATE = "{{ bos_token }}{% for one in messages %}{{ one.role }}: {{ one.content }}{% endfor %}"
FORMS = {"none": "$A", "one": "<s> $A", "two": "[g] <s> $A", "both ends": "<s> $A </s>"}
TARGET = Path(data.__file__).parents[1] / "models" / "tiny" / "target"
MESSAGES = [{"role": "user", "content": "hi"}]


def byte_tokenizer(folder: Path, form: str):
    """A tokenizer of bytes that puts special tokens around a text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(
        models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[])
    )
    made.pre_tokenizer, made.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    special = ["<s>", "[g]", "</s>"]
    made.add_special_tokens(special)
    tokens = [(text, made.token_to_id(text)) for text in special]
    made.post_processor = processors.TemplateProcessing(single=form, special_tokens=tokens)
    made.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder)


@pytest.fixture(params=FORMS)
def tokenizer(request, tmp_path: Path):
    return byte_tokenizer(tmp_path, FORMS[request.param])


def test_a_text_that_begins_with_the_prefix_gets_no_second_one(tokenizer):
    usual = tokenizer.encode("user: hi")
    prefix = list(prefix_of(tokenizer))
    assert usual[: len(prefix)] == prefix
    assert encode_prompt(tokenizer, "user: hi") == usual
    assert encode_prompt(tokenizer, tokenizer.decode(prefix) + "user: hi") == usual
    assert encode_prompt(tokenizer, "") == tokenizer.encode("")
    assert encode_prompt(tokenizer, "user<s>: hi") == tokenizer.encode("user<s>: hi")


def test_a_prompt_that_has_been_through_the_template_is_the_chat(tmp_path):
    """Messages, and the text that transformers makes of them, are the tokens that transformers
    makes of them.
    """
    tokenizer = byte_tokenizer(tmp_path, FORMS["one"])
    request = PromptRequest(num_rows=1, context_len=64, vocab_size=300, tokenizer=tokenizer)
    expected = tokenizer.apply_chat_template(MESSAGES, tokenize=True, return_dict=False)
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    assert text.startswith("<s>")
    assert encode(request, MESSAGES, "line 1") == encode(request, text, "line 1") == expected


def test_a_server_that_takes_text_adds_its_own_prefix(tokenizer):
    prompt = [*prefix_of(tokenizer), *tokenizer.encode("user: hi", add_special_tokens=False)]
    assert text_of(prompt, tokenizer) == "user: hi"
    assert text_of(prompt[-3:], tokenizer) == " hi"


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mistral", "unheard_of"])
@pytest.mark.parametrize(
    "named",
    ["PreTrainedTokenizerFast", "LlamaTokenizerFast", "Qwen2Tokenizer", "GPT2TokenizerFast", None],
)
def test_the_tokenizer_is_the_one_that_transformers_chooses(tmp_path, named, model_type):
    """Although it is not given all of the model's configuration."""
    shutil.copytree(TARGET, tmp_path, dirs_exist_ok=True)
    own = {"tokenizer_class": named, "add_bos_token": True, "bos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own if named else {}))
    model = json.loads((TARGET / "config.json").read_text()) | {"model_type": model_type}
    (tmp_path / "config.json").write_text(json.dumps(model))
    right = AutoTokenizer.from_pretrained(str(tmp_path))
    ours = load_tokenizer(tmp_path)
    assert type(ours) is type(right)
    assert ours.backend_tokenizer.to_str() == right.backend_tokenizer.to_str()
    text = "def f(x):\n    return 'é' * 3  <|endoftext|>"
    assert ours.encode(text) == right.encode(text)
    assert ours.decode(right.encode(text)) == right.decode(right.encode(text))


def test_loading_a_tokenizer_does_not_import_what_loads_models():
    program = (
        "import sys; from pathlib import Path; from magicdec.data.tokenizer import load_tokenizer;"
        f"load_tokenizer(Path({str(TARGET)!r}));"
        "sys.exit('torch.distributed.tensor' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
