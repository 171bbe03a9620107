"""Heads against the speculators library, whose results are recorded (record_heads.py), and their
checkpoints.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from magicdec.architectures.head_config import HeadConfig, unread_keys_of_head
from magicdec.architectures.mtp_config import unread_keys_of_mtp
from magicdec.attention.sdpa import SdpaAttention
from magicdec.errors import UserError
from magicdec.models.checkpoint import load
from magicdec.models.description import read_config
from magicdec.models.head import Head
from magicdec.models.kv_cache import KVCache
from magicdec.models.taps import Taps
from tests.checkpoints import load_model
from tests.runs import TINY

HEADS = Path(__file__).parent / "heads"
CASES = ["llama-eagle", "qwen3-eagle", "llama-speculators", "qwen3-speculators"]
CLOSE = {"rtol": 0, "atol": 1e-4}


def load_head(folder: Path, target) -> Head:
    config = read_config(folder)
    assert isinstance(config, HeadConfig)
    head = Head(config, SdpaAttention())
    head.load_state_dict(load(folder, config, torch.float32, "cpu"))
    return head.on(target)


@pytest.fixture(params=CASES)
def case(request) -> tuple[Head, dict[str, Tensor], torch.nn.Module]:
    target = load_model(HEADS / f"target-{request.param.partition('-')[0]}")
    expected = load_file(HEADS / request.param / "expected.safetensors")
    return load_head(HEADS / request.param, target), expected, target


@torch.inference_mode()
def test_it_reads_the_same_hidden_states(case):
    head, expected, target = case
    taps = Taps(head.config.taps_of(target.config))
    tokens_BS = expected["tokens"][None]
    target(tokens_BS, KVCache(target.config, 1, tokens_BS.shape[1], torch.float32, "cpu"), taps)
    torch.testing.assert_close(taps.hidden_BTN[0], expected["hidden"], **CLOSE)


@torch.inference_mode()
def test_outputs_logits_and_proposals(case):
    """All tokens of a text at once; then, behind each of them, steps over the head's own output."""
    head, expected, _ = case
    tokens_S, hidden_SN = expected["tokens"], expected["hidden"]
    T = len(tokens_S) - 1
    cache = KVCache(head.config, 1, T + 3, torch.float32, "cpu")
    outputs = head(tokens_S[None, 1:], cache, head.fused(hidden_SN[None, :-1]))
    assert_same(head, expected, 0, slice(0, T), outputs)
    for last in reversed(range(T - 2)):  # a step overwrites the entries behind its own
        cache.rollback(torch.tensor([last + 1], dtype=torch.int32))
        output = outputs[:, last : last + 1]
        for step in (1, 2):
            output = head(tokens_S[None, last + 1 + step, None], cache, output)
            assert_same(head, expected, step, slice(last, last + 1), output)


def assert_same(
    head: Head, expected: dict[str, Tensor], step: int, where: slice, output_BTE: Tensor
) -> None:
    logits_BTV, found = head.logits(output_BTE), expected["outputs"][step, where]
    # With norm_output the next step reads the normalised output, and the library's layer is hooked
    # before the norm.
    torch.testing.assert_close(
        output_BTE[0], head.norm(found) if head.config.norm_output else found, **CLOSE
    )
    torch.testing.assert_close(logits_BTV[0], expected["logits"][step, where], **CLOSE)
    assert torch.equal(logits_BTV.argmax(-1)[0], expected["draft_ids"][step, where])


def test_vocabulary_embedding_and_parameters(case):
    """Draft tokens have the target's ids, and the embedding is the target's where the head has
    none.
    """
    head, _, target = case
    assert head.config.num_logits == len(head.target_ids_V) == 23
    assert head.target_ids_V.diff().min() > 0
    assert head.target_ids_V.max() < head.config.vocab_size
    assert head.config.own_embedding == (head.embed is not target.embed)
    own = [
        p
        for name, p in head.named_parameters()
        if head.config.own_embedding or name != "embed.weight"
    ]
    assert sum(p.numel() for p in own) == head.config.num_parameters


def test_a_pickle_names_the_tool_that_converts_it(tmp_path):
    shutil.copy(HEADS / "llama-eagle/config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"pytorch_model.bin is a pickle.*tools/convert_head.py"):
        read_config(tmp_path)


def changed(folder: Path, tmp_path: Path, **values) -> Path:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return tmp_path


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_hidden_layers": 2}, "a head of 2 layers of llama is not supported"),
        ({"model_type": "mistral"}, "a head of 1 layers of mistral is not supported"),
        ({"draft_vocab_size": "many"}, "draft_vocab_size"),
        (
            {"speculators_model_type": "hass"},
            "speculators_model_type='hass' is not supported; supported: eagle3",
        ),
        (
            {"eagle_config": {"use_aux_hidden_state": False}},
            "use_aux_hidden_state=false is not supported",
        ),
        (
            {"transformer_layer_config": [1]},
            r"transformer_layer_config=\[1\]: must be a JSON object",
        ),
    ],
)
def test_heads_of_another_kind_are_refused(tmp_path, values, message):
    with pytest.raises(UserError, match=message):
        read_config(changed(HEADS / "llama-eagle", tmp_path, **values))


def test_a_layer_that_is_null_is_next_to_the_keys_of_the_head(tmp_path):
    folder = HEADS / "llama-eagle"
    head = read_config(changed(folder, tmp_path, transformer_layer_config=None))
    assert head == read_config(folder)


@pytest.mark.parametrize("missing", ["d2t", "lm_head.weight"])
def test_a_smaller_vocabulary_takes_ids_and_an_output_matrix_of_its_own(tmp_path, missing):
    folder = changed(HEADS / "llama-eagle", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors[missing]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=rf"draft_vocab_size=23 of 37 .* {missing} is missing"):
        read_config(folder)


def test_tokens_of_a_head_that_are_the_same_of_the_target_are_refused(tmp_path):
    folder = changed(HEADS / "llama-eagle", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["d2t"][1] = tensors["d2t"][0] - 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match="d2t does not map 23 tokens into a vocabulary of 37"):
        load(folder, read_config(folder), torch.float32, "cpu")


def test_a_vocabulary_that_is_not_the_targets_is_refused(tmp_path):
    folder = changed(HEADS / "llama-eagle", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"d2t": tensors["d2t"] + 20}, folder / "model.safetensors")
    config = read_config(folder)
    with pytest.raises(UserError, match="d2t does not map 23 tokens into a vocabulary of 37"):
        load(folder, config, torch.float32, "cpu")


def test_a_mask_that_contradicts_the_vocabulary_is_refused(tmp_path):
    folder = changed(HEADS / "llama-eagle", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    config = read_config(folder)
    marked = torch.zeros(37, dtype=torch.bool)
    marked[tensors["d2t"] + torch.arange(23)] = True
    save_file(tensors | {"t2d": marked}, folder / "model.safetensors")
    load(folder, config, torch.float32, "cpu")
    save_file(tensors | {"t2d": ~marked}, folder / "model.safetensors")
    with pytest.raises(UserError, match="t2d marks other tokens of the target than d2t"):
        load(folder, config, torch.float32, "cpu")


@pytest.mark.parametrize("case_name", CASES)
def test_no_key_of_a_known_head_is_reported(case_name):
    assert unread_keys_of_head(json.loads((HEADS / case_name / "config.json").read_text())) == {}


def test_keys_around_the_layer_of_a_module_are_reported():
    plain = json.loads((TINY / "mtp" / "config.json").read_text())
    assert unread_keys_of_mtp(plain) == {}
    layer = plain["transformer_layer_config"] | {"odd": 1}
    changed = plain | {"strange": 3, "transformer_layer_config": layer}
    assert unread_keys_of_mtp(changed) == {"strange": 3, "odd": 1}


def test_keys_of_a_head_that_are_not_read_are_reported():
    for name in ("llama-eagle", "qwen3-speculators"):
        plain = json.loads((HEADS / name / "config.json").read_text())
        plain |= {"eagle_config": {"use_last_layernorm": True}, "use_mtp": True}
        assert unread_keys_of_head(plain) == {
            "eagle_config.use_last_layernorm": True,
            "use_mtp": True,
        }


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": 32}, "a hidden size of 16 against the target's 32"),
        ({"vocab_size": 38}, "a vocabulary of 37 against the target's 38"),
        ({"num_hidden_layers": 4}, "layer 5 of 4"),
    ],
)
def test_a_head_of_another_target_is_refused(tmp_path, sizes, message):
    head = read_config(HEADS / "llama-speculators")
    target = read_config(changed(HEADS / "target-llama", tmp_path, **sizes))
    with pytest.raises(UserError, match=f"made for another target: {message}"):
        head.check(target)
