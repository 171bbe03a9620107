"""Modules that predict further tokens: what they propose and what they keep, against the published
formulas over the whole text, and against transformers.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from magicdec.architectures.modules_config import MtpModulesConfig
from magicdec.attention.sdpa import SdpaAttention
from magicdec.config.load import compose
from magicdec.conformance.examine import both_ways
from magicdec.errors import UserError
from magicdec.models.adapter import mtp_modules
from magicdec.models.adapter.mtp_modules import load_mtp
from magicdec.models.checkpoint import load
from magicdec.models.description import read_config
from magicdec.models.kv_cache import KVCache
from magicdec.models.mtp_head import MtpHead
from magicdec.models.taps import Taps
from magicdec.planning import build
from magicdec.planning.resolve import resolve
from magicdec.serving.request import Params, Request
from magicdec.serving.scheduler import Scheduler
from magicdec.serving.slots import Slots
from magicdec.tracking.progress import progress
from magicdec.verification.sampling import Sampling
from tests.checkpoints import (
    SIZES,
    add_mtp,
    load_model,
    load_modules,
    load_reference,
    make_checkpoint,
)
from tests.drafts.proposals import proposals_of
from tests.small import new_engine, open_batch, random_prompts, small_model, small_modules

LENGTHS = [20, 33, 27]
TARGET = small_model()
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def opened(count: int = 2, lengths=LENGTHS, **settings):
    settings = {"policy": "full", "gamma": 3, "budget": 24, "num_sink": 2} | settings
    modules, prompts = small_modules(TARGET, count), random_prompts(lengths)
    return open_batch(TARGET, prompts, draft_name="mtp", draft_model=modules, **settings)


def new_cache(config: Any, capacity: int) -> KVCache:
    return KVCache(config, 1, capacity, torch.float32, "cpu")


def proposed_by_formula(batch, tokens_1N: Tensor, gamma: int) -> tuple[list[int], KVCache]:
    """Return what the modules propose behind a text, by the published formulas over all places at
    once, and the entries that they have written. Beyond the number of modules, the last one runs
    over one place more, each time over everything.
    """
    target, modules = batch.decoder.target, batch.draft.model
    count, num_modules = tokens_1N.shape[1], modules.num_modules
    taps = Taps((target.config.num_layers + 1,))
    target(tokens_1N[:, : count - 1], new_cache(target.config, count), taps)
    hidden, entries = taps.hidden_BTN, new_cache(modules.config, count + gamma)
    text, proposed = tokens_1N, []
    for step in range(gamma):
        module = min(step, num_modules - 1)
        entries.seqlens_B.zero_()
        tokens = text[:, module + 1 : module + 1 + hidden.shape[1]]
        output = modules(tokens, entries, hidden, module)
        token = modules.logits(output[:, -1:]).argmax(-1)
        proposed.append(int(token))
        text = torch.cat((text, token), dim=1)
        is_last = step >= num_modules - 1
        hidden = torch.cat((hidden, output[:, -1:]), dim=1) if is_last else output
    return proposed, entries


@pytest.mark.parametrize("sampling", [None, Sampling(1.0, seed=3)])
@pytest.mark.parametrize(
    ("count", "gamma"), [(1, 1), (1, 4), (2, 2), (2, 5), (3, 2), (3, 3), (3, 5)]
)
@torch.inference_mode()
def test_proposals_are_those_of_the_formulas_over_the_whole_text(count, gamma, sampling):
    """After rounds in which rows have accepted different numbers of proposals."""
    batch = opened(count, gamma=gamma, sampling=sampling, prefill_chunk=7)
    batch.restart()
    for _ in range(4):
        batch.decoder.cycle_for(batch.draft)()
    state = batch.decoder.state
    batch.draft.sampling = Sampling()
    proposed_BG = batch.draft.propose(state, gamma).tokens_BG
    for row, length in enumerate(state.num_tokens_B.tolist()):
        expected, _ = proposed_by_formula(batch, state.tokens_BS[row : row + 1, :length], gamma)
        assert proposed_BG[row].tolist() == expected


@pytest.mark.parametrize("count", [1, 2, 3])
@torch.inference_mode()
def test_entries_of_committed_tokens_are_exact(count):
    batch = opened(count, sampling=Sampling(1.0, seed=3))
    batch.restart()
    for _ in range(4):
        batch.decoder.cycle_for(batch.draft)()
    state, entries = batch.decoder.state, batch.draft.entries
    assert torch.equal(entries.seqlens_B, state.num_tokens_B - 1 - count)
    for row, length in enumerate(state.num_tokens_B.tolist()):
        text_1N = state.tokens_BS[row : row + 1, :length]
        _, exact = proposed_by_formula(batch, text_1N, count)
        known = length - 1 - count
        for ours, theirs in ((entries.k_LBKSD, exact.k_LBKSD), (entries.v_LBKSD, exact.v_LBKSD)):
            torch.testing.assert_close(ours[:, row, :, :known], theirs[:, 0, :, :known], **CLOSE)


def test_some_proposals_are_accepted_and_some_are_not():
    """Otherwise the tests here would follow one path alone."""
    accepted = both_ways(opened(2))[2].accepted_RB
    assert {0, 1} <= {*accepted[accepted >= 0].tolist()}


def test_prompts_shorter_than_the_modules_are_many():
    batch = opened(3, lengths=[1, 2, 40, 3], policy="snapkv")
    passed, _, fast = both_ways(batch)
    assert passed
    assert all(len(row) == 24 for row in fast.tokens)


def test_rounds_without_proposals_leave_the_draft_as_good():
    """As draft.gamma=auto takes them."""
    paused, plain = opened(2), opened(2)
    for batch in (paused, plain):
        batch.restart()
    with torch.inference_mode():
        for _ in range(3):
            paused.decoder.round(paused.draft, 0, 0)
            plain.decoder.round(plain.draft, 0, 0)
        tokens = plain.decoder.state.tokens_BS[:1, : int(plain.decoder.state.num_tokens_B[0])]
        expected, _ = proposed_by_formula(plain, tokens, 3)
        assert paused.draft.propose(paused.decoder.state, 3).tokens_BG[0].tolist() == expected


@pytest.mark.parametrize("policy", ["streaming", "snapkv"])
def test_served_requests_are_answered_as_without_a_draft(policy):
    """They join and leave one after the other, one of them shorter than the modules are many."""
    prompts = random_prompts([30, 1, 52, 17, 41])
    alone = [open_batch(TARGET, [prompt], generate_len=12) for prompt in prompts]
    expected = [batch.decoder.generate().tokens[0] for batch in alone]
    keys = {"policy": policy, "gamma": 3, "budget": 16, "num_sink": 2}
    engine = new_engine(TARGET, "mtp", draft_model=small_modules(TARGET, 2), **keys)
    scheduler = Scheduler(Slots(engine, 2, 64))
    requests = [Request(prompt, Params(12, Sampling(ignore_eos=True))) for prompt in prompts]
    for request in requests:
        scheduler.submit(request)
        scheduler.step()
    while not scheduler.idle:
        scheduler.step()
    assert [request.tokens for request in requests] == expected


def test_modules_of_another_target_are_refused():
    other = small_modules(small_model(hidden_size=64)).config
    with pytest.raises(UserError, match="made for another target: a hidden size of 64 against"):
        other.check(TARGET.config)


def saved(modules: MtpHead, folder: Path) -> Path:
    """Write modules for a target that our own transformer runs as the guide describes them."""
    c, tensors = modules.config, {}
    ours = {"embedding_norm": "enorm", "state_norm": "hnorm", "joined": "eh_proj"}
    ours |= {"output_norm": "shared_head.norm", "attention_norm": "input_layernorm"}
    ours |= {"mlp_norm": "post_attention_layernorm", "output": "self_attn.o_proj"}
    ours |= {"down": "mlp.down_proj"}
    sizes = [heads * c.head_dim for heads in (c.num_heads, c.num_kv_heads, c.num_kv_heads)]
    for number in range(c.num_layers):
        layer, prefix = modules.module(number), f"layers.{number}."
        named = {theirs: layer.get_submodule(name).weight for name, theirs in ours.items()}
        parts = layer.qkv.weight.split(sizes)
        named |= {f"self_attn.{n}_proj": part for n, part in zip("qkv", parts, strict=True)}
        named |= zip(("mlp.gate_proj", "mlp.up_proj"), layer.gate_up.weight.chunk(2), strict=True)
        tensors |= {f"{prefix}{name}.weight": part.clone() for name, part in named.items()}
    save_file(tensors, folder / "model.safetensors")
    alike = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "rms_norm_eps")
    alike += ("max_position_embeddings", "rope_theta")
    plain: dict[str, Any] = {name: getattr(c, name) for name in alike}
    plain |= {"model_type": "llama", "num_hidden_layers": 1}
    plain |= {"num_attention_heads": c.num_heads, "num_key_value_heads": c.num_kv_heads}
    described = {"speculators_model_type": "mtp", "num_nextn_predict_layers": c.num_layers}
    described["transformer_layer_config"] = plain
    (folder / "config.json").write_text(json.dumps(described))
    return folder


@torch.inference_mode()
def test_modules_are_read_from_a_folder(tmp_path, capsys):
    modules = small_modules(TARGET, 2)
    folder = saved(modules, tmp_path)
    config = read_config(folder)
    assert config == modules.config
    assert "warning" not in capsys.readouterr().err
    read = MtpHead(config, SdpaAttention())
    read.load_state_dict(load(folder, config, torch.float32, "cpu"))
    for name, weight in modules.named_parameters():
        assert torch.equal(read.get_parameter(name), weight), name
    assert config.num_parameters == sum(weight.numel() for weight in modules.parameters())


@pytest.mark.parametrize("differs", [False, True])
def test_a_copy_of_the_targets_output_matrix_must_have_the_same_numbers(tmp_path, differs):
    target = load_model(make_checkpoint(tmp_path / "target", "llama"))
    folder = saved(small_modules(target, 1), tmp_path)
    stored, head = load_file(folder / "model.safetensors"), target.head.weight + differs
    save_file(stored | {"lm_head.weight": head}, folder / "model.safetensors")
    keys = [f"target.path={tmp_path / 'target'}", "draft=mtp", f"draft.model.path={folder}"]
    keys += ["data=random", "draft.synthetic_acceptance=0.7", "batch.context_len=20"]
    config = compose(["target=custom", "hardware=cpu", *keys])
    if not differs:
        assert resolve(config).draft.folder == folder
        return
    with pytest.raises(UserError, match=r"lm_head.weight differs from the target's .*model.path"):
        resolve(config)


def test_a_vocabulary_of_their_own_is_refused(tmp_path):
    folder = saved(small_modules(TARGET, 1), tmp_path)
    stored = load_file(folder / "model.safetensors")
    save_file(stored | {"d2t": torch.arange(9)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"1 tensors have no place in the .* such as d2t"):
        load(folder, read_config(folder), torch.float32, "cpu")


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        ([1], r"transformer_layer_config=\[1\]: must be a JSON object"),
        ("llama", "transformer_layer_config='llama': must be a JSON object"),
        (None, "no model_type is given"),  # null: as if it were missing
    ],
)
def test_modules_whose_layers_are_no_object_are_refused(layer, said, tmp_path):
    described = {"speculators_model_type": "mtp", "transformer_layer_config": layer}
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match=said):
        read_config(tmp_path)


def test_a_target_of_our_own_without_a_folder_of_modules_is_refused():
    with pytest.raises(
        UserError, match=r"^draft.model.path=null: the target's checkpoint holds no"
    ):
        resolve(compose(["draft=mtp", "hardware=cpu"]))


def test_random_modules_of_a_target_can_be_timed():
    keys = ["draft=mtp", "target.weights=random", "draft.synthetic_acceptance=0.7"]
    with progress() as bars:
        engine = build.engine(resolve(compose([*keys, "hardware=cpu"])), bars)
    assert isinstance(engine.draft_model, MtpHead)
    assert engine.draft_model.num_modules == 1


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Any:
    """GLM-4-MoE checkpoints with one and with two modules, by their number."""
    other = make_checkpoint(tmp_path_factory.mktemp("other"), "glm4-moe", seed=5)
    made = {}
    for count in (1, 2):
        folder = tmp_path_factory.mktemp(f"mtp{count}")
        make_checkpoint(folder, "glm4-moe", eos_token_id=None)
        made[count] = add_mtp(folder, other, count)
    return made


def of_checkpoint(folder, prompts, **settings):
    target = load_modules(folder)
    config = MtpModulesConfig.of(target.config)
    where = (torch.float32, torch.device("cpu"), SdpaAttention())
    settings = {"policy": "full", "budget": 16, "num_sink": 2, "generate_len": 16} | settings
    modules = load_mtp(folder, config, *where)
    return open_batch(target, prompts, draft_name="mtp", draft_model=modules, **settings)


def recorded(folder, prompt, num_new, monkeypatch) -> tuple[list[int], list[list[int]]]:
    """Return what transformers writes with these modules, and what they propose in each round."""
    reference, rounds = load_reference(folder), []
    names = [rf"\.layers\.{SIZES['num_hidden_layers'] + module}\." for module in range(2)]
    monkeypatch.setattr(reference, "_keys_to_ignore_on_load_unexpected", names, raising=False)
    proposer = transformers.generation.candidate_generator.MTPCandidateGenerator
    method = proposer.get_candidates

    def noting(self, input_ids, *args, **kwargs):
        ids, logits = method(self, input_ids, *args, **kwargs)
        rounds.append(ids[0, input_ids.shape[1] :].tolist())
        return ids, logits

    monkeypatch.setattr(proposer, "get_candidates", noting)
    ids = torch.tensor([prompt])
    settings = {"max_new_tokens": num_new, "do_sample": False, "use_mtp": True}
    row = reference.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0]
    return row[len(prompt) :].tolist(), [proposed for proposed in rounds if proposed]


@pytest.mark.parametrize("count", [1, 2])
def test_proposals_are_those_of_transformers(count, folders, monkeypatch):
    prompt = random_prompts([23], vocab=SIZES["vocab_size"])[0]
    written, rounds = recorded(folders[count], prompt, 24, monkeypatch)
    batch = of_checkpoint(folders[count], [prompt], gamma=count, generate_len=24)
    ours = proposals_of(batch)
    assert batch.decoder.generate(batch.draft).tokens == [written]
    assert len(rounds) > 4
    assert ours[: len(rounds) - 1] == rounds[:-1]  # the last one may be cut at the limit


@pytest.mark.parametrize(("count", "gamma", "policy"), [(1, 3, "streaming"), (2, 2, "snapkv")])
def test_a_batch_of_ragged_rows_equals_its_rows_one_by_one(count, gamma, policy, folders):
    prompts = random_prompts([37, 9, 50], vocab=SIZES["vocab_size"])
    settings = {"gamma": gamma, "policy": policy}
    passed, _, together = both_ways(of_checkpoint(folders[count], prompts, **settings))
    assert passed
    for row, prompt in enumerate(prompts):
        batch = of_checkpoint(folders[count], [prompt], **settings)
        alone = batch.decoder.generate(batch.draft)
        assert alone.tokens == [together.tokens[row]]
        rounds = len(alone.accepted_RB)
        assert torch.equal(alone.accepted_RB[:, 0], together.accepted_RB[:rounds, row])


def test_a_checkpoint_says_how_many_modules_it_has(folders):
    config = read_config(folders[2], "transformers")
    modules = MtpModulesConfig.of(config)
    predictor = of_checkpoint(folders[2], [[1, 2, 3]], gamma=2).draft.model.predictor
    weights = sum(weight.numel() for weight in predictor.layers.parameters())
    assert (modules.num_layers, modules.parameters) == (2, weights)


def test_no_random_modules_are_made_where_a_checkpoint_is_read(folders, monkeypatch):
    read_alone = SimpleNamespace(from_pretrained=mtp_modules.MtpModel.from_pretrained)
    monkeypatch.setattr(mtp_modules, "MtpModel", read_alone)
    assert of_checkpoint(folders[1], [[1, 2, 3]], gamma=1).draft.model.num_modules == 1


def test_a_checkpoint_without_the_modules_of_its_config_is_refused(tmp_path):
    folder = make_checkpoint(tmp_path, "glm4-moe")
    with pytest.raises(UserError, match="modules that predict further tokens cannot be loaded"):
        of_checkpoint(folder, [[1, 2, 3]], gamma=1)


def test_a_target_without_modules_is_refused(tmp_path):
    folder = make_checkpoint(tmp_path, "llama-modules")
    with pytest.raises(UserError, match="names no modules that predict further tokens"):
        MtpModulesConfig.of(read_config(folder, "transformers"))
