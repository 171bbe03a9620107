"""Families that run as transformers' modules over our caches, against transformers' own `generate`,
token for token in fp32.
"""

import itertools
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from magicdec.architectures.modules_config import ModulesConfig
from magicdec.attention.cpp import CppAttention
from magicdec.commands import doctor
from magicdec.config.groups import SamplingConfig
from magicdec.config.load import compose
from magicdec.conformance.examine import both_ways
from magicdec.engine.output_audit import audit
from magicdec.errors import UserError
from magicdec.kernels.library import compiler
from magicdec.models.adapter import transformers_library
from magicdec.models.adapter.linears import OperatorLinear
from magicdec.models.description import describe, read_config
from magicdec.models.kv_cache import KVCache, resting
from magicdec.models.taps import Taps
from magicdec.planning.resolve import resolve
from magicdec.planning.setup import setup_of
from magicdec.serving.request import Params, Request
from magicdec.serving.scheduler import Scheduler
from magicdec.serving.slots import Slots
from magicdec.verification.sampling import Sampling
from tests.checkpoints import MODULES, SIZES, load_modules, load_reference, written
from tests.models.adapter_cases import (
    FAMILIES,
    GAMMAS,
    LENGTHS,
    NEW_TOKENS,
    VOCABULARY,
    drafter,
    expected_of,
    prompts,
    target_of,
)
from tests.small import new_engine, open_batch, random_prompts


@pytest.mark.parametrize("family", FAMILIES)
def test_autoregressive_tokens_are_those_of_generate(family, folders):
    folder = folders(family)
    batch = open_batch(target_of(folder), prompts(), generate_len=NEW_TOKENS)
    assert batch.decoder.generate().tokens == expected_of(folder)


def test_tokens_are_varied_enough_to_tell_models_apart(folders):
    rows = [tuple(row) for family in FAMILIES for row in expected_of(folders(family))]
    assert len(set(rows)) == len(rows)
    assert sum(len(set(row)) for row in rows) / len(rows) > 4


needs_compiler = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")


@needs_compiler
@pytest.mark.parametrize(
    ("family", "gamma"), list(zip(FAMILIES, itertools.cycle(GAMMAS), strict=False))
)
def test_kernels_for_cpus_write_the_same_tokens(family, gamma, folders):
    target = target_of(folders(family), CppAttention)
    keys = {"policy": "streaming", "budget": 16, "num_sink": 2, "generate_len": NEW_TOKENS}
    batch = open_batch(target, prompts(), draft_name="self", gamma=gamma, **keys)
    passed, plain, fast = both_ways(batch)
    assert passed
    assert plain.tokens == fast.tokens == expected_of(folders(family))
    of_ours = [module for module in target.modules() if isinstance(module, OperatorLinear)]
    assert len(of_ours) > 3
    plain_model = target.plain()
    assert not any(isinstance(module, OperatorLinear) for module in plain_model.modules())
    weights, others = ({x.data_ptr() for x in m.parameters()} for m in (target, plain_model))
    assert weights == others


@pytest.mark.parametrize("family", ["gemma2", "qwen3-moe", "gpt-oss", "deepseek-v3"])
def test_logits_and_inner_states_are_those_of_transformers(family, folders):
    """With the soft cap of Gemma 2's logits; in chunks, and with rows that are left out."""
    model, reference = target_of(folders(family)), load_reference(folders(family))
    tokens_BT = torch.tensor(random_prompts([20, 20, 20], vocab=VOCABULARY))
    with torch.no_grad():
        theirs = reference(tokens_BT, output_hidden_states=True)
        cache, taps = KVCache(model.config, 3, 20, torch.float32, "cpu"), Taps((3, 0, 2))
        for part_BT in tokens_BT[:, :19].split(7, dim=1):
            hidden_BTE = model(part_BT, cache)
        rest_B = torch.tensor([False, True, False])
        with resting(rest_B, cache):
            hidden_B1E = model(tokens_BT[:, 19:], cache, taps)
    close = {"rtol": 0, "atol": 1e-4}
    logits_BTV = model.logits(hidden_BTE)
    torch.testing.assert_close(logits_BTV, theirs.logits[:, 14:19], **close)
    last_BV = model.logits(hidden_B1E)[:, 0]
    torch.testing.assert_close(last_BV[~rest_B], theirs.logits[~rest_B, 19], **close)
    behind_BE, first_BE, second_BE = taps.hidden_BTN[:, 0].chunk(3, dim=-1)
    # transformers keeps the last states normalised.
    states = {0: first_BE, 2: second_BE, 3: model.decoder.norm(behind_BE)}
    for layer, ours_BE in states.items():
        inner_BE = theirs.hidden_states[layer][:, 19]
        torch.testing.assert_close(ours_BE[~rest_B], inner_BE[~rest_B], **close)


def counting(target: Any) -> list[int]:
    """Return a list to which each call of the first layer with experts adds its tokens."""
    seen: list[int] = []
    modules = target.decoder.modules()
    experts = next(m for m in modules if hasattr(m, "num_experts") and hasattr(m, "down_proj"))
    experts.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[0]))
    return seen


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss", "deepseek-v3"])
def test_no_expert_sees_padding_or_resting_rows(family, folders):
    target = load_modules(folders(family))
    seen = counting(target)
    keys = {"policy": "window", "budget": 16, "gamma": 3, "generate_len": NEW_TOKENS}
    batch = open_batch(target, prompts(), draft_name="self", **keys)
    assert sum(seen) == sum(LENGTHS)
    seen.clear()
    fast = batch.decoder.generate(batch.draft)
    active = (fast.accepted_RB >= 0).sum(1)
    draft_steps, verification = 3, 4
    assert sum(seen) == int(active.sum()) * (draft_steps + verification)
    assert active.min() < len(LENGTHS)


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_rows_of_a_batch_write_what_they_write_alone(family, experts, folders):
    target = load_modules(folders(family))
    target.decoder.config._experts_implementation = experts
    keys = {"generate_len": NEW_TOKENS}
    alone = [open_batch(target, [one], **keys).decoder.generate().tokens[0] for one in prompts()]
    assert open_batch(target, prompts(), **keys).decoder.generate().tokens == alone
    assert alone == expected_of(folders(family))


@pytest.mark.parametrize("family", ["qwen3-moe", "gemma3"])
def test_an_end_of_sequence_within_a_round(family, folders):
    expected = expected_of(folders(family))
    ends = expected[0][5]
    folder = folders(family)
    target = load_modules(folder)
    target.config = replace(target.config, eos_token_ids=(ends,))
    keys = {"policy": "full", "gamma": 4, "generate_len": NEW_TOKENS, "ignore_eos": False}
    batch = open_batch(target, prompts(), draft_name="self", **keys)
    cut = [row[: row.index(ends) + 1] if ends in row else row for row in expected]
    assert batch.decoder.generate(batch.draft).tokens == cut


@pytest.mark.parametrize(("family", "draft"), [("qwen3-moe", "self"), ("gpt-oss", "model")])
def test_sampled_tokens_are_samples_of_the_target(family, draft, folders):
    target = target_of(folders(family))
    keys = {"policy": "streaming", "budget": 16, "num_sink": 2, "gamma": 3, "generate_len": 40}
    keys |= {"draft_model": drafter(draft, folders, family, target), "draft_name": draft}
    batch = open_batch(target, prompts(), sampling=SamplingConfig(temperature=0.8), **keys)
    passed, plain, fast = both_ways(batch)
    assert passed
    assert plain.tokens != fast.tokens


@pytest.mark.parametrize(
    ("family", "draft", "policy"),
    [("qwen3-moe", "self", "streaming"), ("gemma3", "self", "quest"), ("gpt-oss", "ngram", "full")],
)
def test_served_tokens_are_those_of_generate(family, draft, policy, folders):
    target = target_of(folders(family))
    keys = {"policy": policy, "gamma": 3, "budget": 16, "num_sink": 2, "page_size": 4}
    engine = new_engine(target, draft, prefill_chunk=16, ignore_eos=False, **keys)
    scheduler = Scheduler(Slots(engine, 2, max(LENGTHS) + NEW_TOKENS))
    params = Params(NEW_TOKENS, Sampling(ignore_eos=True))
    requests = [Request(prompt, params) for prompt in prompts()]
    left, generator = list(requests), random.Random(0)
    while left or not scheduler.idle:
        if left and generator.random() < 0.5:
            scheduler.submit(left.pop())
        scheduler.step()
    assert [request.tokens for request in requests] == expected_of(folders(family))


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss", "deepseek-v3"])
def test_the_audit_finds_a_lost_entry_of_a_prompt(family, folders):
    batch = open_batch(target_of(folders(family)), prompts(), generate_len=4)
    tokens = batch.decoder.generate().tokens
    assert audit(batch.decoder, tokens, tokens).passed
    batch.decoder.cache.v_LBKSD[0, 1, :, 3] = 1.0
    found = audit(batch.decoder, tokens, tokens)
    assert found.passed is False
    assert found.prompts.wrong > 0


@pytest.mark.parametrize("longest", [45, 80])
def test_a_rotary_embedding_with_two_tables_keeps_one(longest, folders):
    """Prompts of 37 and 40 tokens cross the bound within a round."""
    folder = folders("phi3-long")
    config = read_config(folder, "transformers")
    assert config.long_rope_from == 45
    assert ("long one" in config.remarks_on(longest)[0]) == (longest > 45)
    load = transformers.AutoModelForCausalLM.from_pretrained
    reference = load(folder, dtype=torch.float32).eval()
    rope = reference.model.rotary_emb
    table = ROPE_INIT_FUNCTIONS["longrope"](reference.config, "cpu", seq_len=longest)
    rope.inv_freq, rope.rope_type = table[0], "default"
    some = random_prompts([37, 40, 9], vocab=VOCABULARY)
    expected = written(reference, some, NEW_TOKENS)
    keys = {"policy": "streaming", "budget": 16, "num_sink": 2, "gamma": 5}
    target = load_modules(folder, longest=longest)
    batch = open_batch(target, some, draft_name="self", generate_len=NEW_TOKENS, **keys)
    assert batch.decoder.generate(batch.draft).tokens == expected


def plain_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def quantized(method: str) -> dict[str, Any]:
    return {"model_type": "qwen3_moe", "quantization_config": {"quant_method": method}}


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
REFUSED = [
    ({"model_type": "no_such_model"}, "is not known to transformers"),
    (
        {"model_type": "mine", "auto_map": {"AutoModel": "x.Y"}},
        "from a checkpoint is never run",
    ),
    ({"model_type": "t5"}, "not a decoder alone|is not a causal"),
    (
        {"model_type": "llama4_text"} | SIZES,
        "layer_types='chunked_attention' of model_type='llama4_text' is not supported",
    ),
    ({"model_type": "mamba"}, "is not supported|cannot run over a cache"),
    ({"model_type": "bloom"}, "its configuration has no max_position_embeddings, which"),
    ({"model_type": "mpt"}, "its configuration has no max_position_embeddings, which"),
    ({"model_type": "bert", "num_hidden_layers": 1}, "its modules keep no keys and values"),
    ({"model_type": "openai-gpt"}, "its modules keep no keys and values"),
    ({"model_type": "musicgen"}, "transformers refuses it .*: Multiple valid text configs"),
    (
        {"model_type": "mllama", "text_config": {"num_hidden_layers": 2}},
        "its decoder does not return one residual stream",
    ),
    # Its configuration does not say whether embeddings are tied.
    ({"model_type": "inkling_text", "num_hidden_layers": 2}, "layer_types='hybrid_sliding'"),
    (
        SIZES | {"model_type": "olmo2", "rope_parameters": DYNAMIC},
        "rope_type=dynamic is not supported",
    ),
    (quantized("fp8"), r"\(fp8\) are not supported; take the one in bfloat16"),
    (quantized("mxfp4"), r"\(mxfp4\) are not supported; write a copy in bfloat16 once"),
    *(
        (quantized(method), rf"\({method}\) are not supported; take the unquantized one")
        for method in ("awq", "gptq", "compressed-tensors", "bitsandbytes")
    ),
]


@pytest.mark.parametrize(("plain", "said"), REFUSED)
def test_what_cannot_run_is_refused_in_one_line(plain, said):
    with pytest.raises(UserError, match=said) as refusal:
        describe(plain, "config.json")
    assert str(refusal.value).startswith("config.json: ")
    assert "\n" not in str(refusal.value)


def test_an_old_transformers_is_refused_and_the_native_path_is_not(monkeypatch, folders):
    monkeypatch.setattr(transformers_library.transformers, "__version__", "5.2.0")
    with pytest.raises(UserError, match=r"transformers 5.24 or newer, and 5.2.0 is installed"):
        transformers_library.check_version()
    assert read_config(folders("llama-modules")).implementation == "native"
    with pytest.raises(UserError, match="needs transformers"):
        read_config(folders("llama-modules"), "transformers")


@pytest.mark.parametrize("family", MODULES)
def test_counts_are_those_of_the_checkpoint(family, folders):
    config = read_config(folders(family), "transformers")
    reference = load_reference(folders(family))
    assert config.num_parameters == sum(weight.numel() for weight in reference.parameters())
    assert config.parameters_read(1) <= config.num_parameters
    assert config.parameters_read(10_000) == pytest.approx(config.num_parameters)
    named = reference.named_parameters()
    routed = sum(weight.numel() for name, weight in named if ".mlp.experts." in name)
    assert config.expert_parameters == routed
    assert bool(config.num_experts) == bool(routed)


def test_experts_that_a_step_does_not_choose_are_not_counted_as_read(folders):
    target = target_of(folders("qwen3-moe"))
    config, size = target.config, 4
    one, many = target.step_weight_bytes(1), target.step_weight_bytes(1000)
    assert one == pytest.approx(many - config.expert_parameters * size * (1 - 2 / 8))


def test_keys_that_nobody_reads_are_reported(tmp_path, folders, capsys):
    shutil.copytree(folders("qwen3-moe"), tmp_path, dirs_exist_ok=True)
    plain = plain_of(tmp_path)
    read_config(tmp_path)
    assert "not read" not in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps(plain | {"moe_router_mood": "good"}))
    read_config(tmp_path)
    assert "keys that are not read: moe_router_mood='good'" in capsys.readouterr().err


def planned(folder: Path, *keys: str) -> Any:
    fixed = ["hardware=cpu", "data=random", "draft.synthetic_acceptance=0.5", "target=custom"]
    sizes = ["batch.context_len=64", "batch.generate_len=8", "batch.size=2", "cache.budget=16"]
    return resolve(compose([*fixed, *sizes, f"target.path={folder}", *keys]))


@needs_compiler
def test_a_plan_says_who_runs_the_model(folders, tmp_path):
    plan = planned(folders("gpt-oss"))
    assert (plan.config.target.implementation, plan.config.attention) == ("transformers", "cpp")
    assert planned(folders("llama-modules")).config.target.implementation == "native"
    other = planned(folders("llama-modules"), "target.implementation=transformers")
    assert isinstance(other.target.config, ModulesConfig)
    assert "two tables" in " ".join(planned(folders("phi3-long")).warnings())
    assert not planned(folders("gemma3")).warnings()
    [warning] = planned(folders("deepseek-v3")).warnings()
    kept, latents = 2 * 4 * 24, 16 + 8
    assert "its latents are expanded here, in each step" in warning
    assert f"{kept / latents:.0f}x the memory of the latents" in warning
    assert "predictions describe the absorbed form" in warning
    assert setup_of(plan, 30.0, 1.0).target.num_parameters == plan.target.config.num_parameters


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["hardware.tensor_parallel=2"], "runs on one device"),
        (["draft.quantization=int8"], "draft.quantization=int8: our kernels"),
        (["target.implementation=native"], "model_type='qwen3_moe' is not supported"),
        (
            [
                "draft=model",
                "target@draft.model=custom",
                "draft.model.path={draft}",
                "draft.model.weights=random",
            ],
            "runs as transformers' modules",
        ),
    ],
)
def test_what_a_plan_refuses(keys, said, folders, tmp_path):
    folder = folders("qwen3-moe")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    short = plain_of(tmp_path) | {"max_position_embeddings": 40}
    (tmp_path / "config.json").write_text(json.dumps(short))
    with pytest.raises(UserError, match=said):
        planned(folder, *(key.format(draft=tmp_path) for key in keys))


def test_doctor_says_what_a_model_will_do_here(folders, capsys):
    assert doctor.main(["--model", str(folders("gpt-oss"))]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in (
        "its modules for gpt_oss over our caches",
        "4 experts, of which a token takes 2",
        "a window of 12 tokens in 2 layers; attention sinks",
        "fits into",
    ):
        assert part in shown
    entries = 3 * 2 * 2 * 16 * 1000 * 4 / 2**30
    assert f"{entries:,.4f} GiB per 1,000 tokens in float32" in shown
    assert doctor.main(["--model", str(folders("llama-modules") / "config.json")]) == 0
    assert "native: our own transformer" in capsys.readouterr().out
    assert doctor.main(["--model", "no such/folder at all"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --model=no such/folder at all is not a folder; valid: ")
