"""A draft that fills a block in one pass: what it proposes, what it keeps, what it costs, and that
independent places keep the target's distribution.
"""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from magicdec.architectures.block_config import BlockConfig
from magicdec.attention.sdpa import SdpaAttention
from magicdec.config.choices import ModelChoice
from magicdec.config.registry import POLICIES
from magicdec.conformance.examine import both_ways
from magicdec.costmodel.hardware import hardware_named
from magicdec.costmodel.prediction import predict
from magicdec.costmodel.round import Setup, round_times, select_time
from magicdec.costmodel.targets import architecture
from magicdec.drafts.dflash import Dflash
from magicdec.errors import UserError
from magicdec.models.block import BlockHead
from magicdec.models.checkpoint import load
from magicdec.models.description import read_config
from magicdec.serving.request import Params, Request
from magicdec.serving.scheduler import Scheduler
from magicdec.serving.slots import Slots
from magicdec.verification import accept
from magicdec.verification.sampling import Sampling
from tests.checkpoints import SIZES, load_model, load_reference, make_checkpoint
from tests.drafts.proposals import proposals_of
from tests.small import new_engine, open_batch, random_prompts, small_block, small_model

TARGET = small_model()
KEYS = {"policy": "full", "gamma": 3, "budget": 24, "num_sink": 2}


def opened(lengths=(20, 33, 27), **settings):
    prompts, block = random_prompts(lengths), small_block(TARGET)
    return open_batch(TARGET, prompts, draft_name="dflash", draft_model=block, **(KEYS | settings))


def saved(block: BlockHead, folder: Path) -> Path:
    """Write a draft in the layout of DFlash's authors."""
    c, tensors = block.config, {}
    tensors = {"fc.weight": block.fc.weight, "norm.weight": block.norm.weight}
    tensors["hidden_norm.weight"] = block.state_norm.weight
    named = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    named |= {"output": "self_attn.o_proj", "down": "mlp.down_proj"}
    named |= {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
    sizes = [heads * c.head_dim for heads in (c.num_heads, c.num_kv_heads, c.num_kv_heads)]
    for number, layer in enumerate(block.layers):
        parts = {theirs: layer.get_submodule(ours).weight for ours, theirs in named.items()}
        rows = layer.qkv.weight.split(sizes)
        parts |= {f"self_attn.{n}_proj": part for n, part in zip("qkv", rows, strict=True)}
        parts |= zip(("mlp.gate_proj", "mlp.up_proj"), layer.gate_up.weight.chunk(2), strict=True)
        tensors |= {f"layers.{number}.{name}.weight": part for name, part in parts.items()}
    save_file({name: part.clone() for name, part in tensors.items()}, folder / "model.safetensors")
    alike = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "rms_norm_eps")
    alike += ("max_position_embeddings", "rope_theta", "block_size")
    plain: dict[str, Any] = {name: getattr(c, name) for name in alike}
    plain |= {"model_type": "qwen3", "num_hidden_layers": c.num_layers}
    plain |= {"num_attention_heads": c.num_heads, "num_key_value_heads": c.num_kv_heads}
    taps = [tap - 1 for tap in c.taps]
    plain["dflash_config"] = {"mask_token_id": c.mask_token_id, "target_layer_ids": taps}
    (folder / "config.json").write_text(json.dumps(plain))
    return folder


def of_transformers(block: BlockHead, folder: Path) -> Any:
    """Return the same draft as transformers' own class."""
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    c = block.config
    config = MuseGlimmerAssistantConfig(
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.rms_norm_eps,
        max_position_embeddings=c.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        layer_types=["full_attention"] * c.num_layers,
        block_size=c.block_size,
        mask_token_id=c.mask_token_id,
        target_layer_ids=[tap - 1 for tap in c.taps],
        attn_implementation="eager",
    )
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    tensors["encoder.fc.weight"] = tensors.pop("fc.weight")
    tensors["encoder.output_norm_enc.weight"] = tensors.pop("hidden_norm.weight")
    model = MuseGlimmerAssistantModel(config)
    model.load_state_dict(tensors)
    return model.eval()


def test_proposals_are_those_of_transformers(tmp_path, monkeypatch):
    folder = make_checkpoint(tmp_path / "target", "qwen3", eos_token_id=None)
    target, reference = load_model(folder), load_reference(folder)
    block = small_block(target)
    block.config = replace(block.config, block_size=5)
    theirs = of_transformers(block, saved(block, tmp_path))
    import transformers

    proposer = transformers.generation.candidate_generator.DFlashTokenCandidateGenerator
    method, rounds = proposer.get_candidates, []

    def noting(self, input_ids, *args, **kwargs):
        ids, logits = method(self, input_ids, *args, **kwargs)
        rounds.append(ids[0, input_ids.shape[1] :].tolist())
        return ids, logits

    monkeypatch.setattr(proposer, "get_candidates", noting)
    prompt = random_prompts([23], vocab=SIZES["vocab_size"])[0]
    ids = torch.tensor([prompt])
    settings = {"max_new_tokens": 24, "do_sample": False, "assistant_model": theirs}
    settings |= {"speculation_type": "dflash", "attention_mask": torch.ones_like(ids)}
    written = reference.generate(ids, **settings)[0, len(prompt) :].tolist()
    rounds = [proposed for proposed in rounds if proposed]
    batch = open_batch(
        target,
        [prompt],
        draft_name="dflash",
        draft_model=block,
        **(KEYS | {"gamma": 4, "generate_len": 24}),
    )
    ours = proposals_of(batch)
    assert batch.decoder.generate(batch.draft).tokens == [written]
    assert len(rounds) > 4
    assert ours[: len(rounds) - 1] == rounds[:-1]  # the last one may be cut at the limit


@torch.inference_mode()
def test_a_draft_is_read_from_a_folder(tmp_path, capsys):
    block = small_block(TARGET)
    folder = saved(block, tmp_path)
    config = read_config(folder)
    assert config == block.config
    assert "warning" not in capsys.readouterr().err
    read = BlockHead(config, SdpaAttention())
    read.load_state_dict(load(folder, config, torch.float32, "cpu"))
    for name, weight in block.named_parameters():
        assert torch.equal(read.get_parameter(name), weight), name
    assert config.num_parameters == sum(weight.numel() for weight in block.parameters())


@pytest.mark.parametrize("policy", ["streaming", "snapkv", "topk"])
def test_a_batch_of_ragged_rows_equals_its_rows_one_by_one(policy):
    passed, _, together = both_ways(opened([37, 9, 1, 50], policy=policy, gamma=5))
    assert passed
    for row, prompt in enumerate(random_prompts([37, 9, 1, 50])):
        batch = open_batch(
            TARGET,
            [prompt],
            draft_name="dflash",
            draft_model=small_block(TARGET),
            **(KEYS | {"policy": policy, "gamma": 5}),
        )
        alone = batch.decoder.generate(batch.draft)
        assert alone.tokens == [together.tokens[row]]
        rounds = len(alone.accepted_RB)
        assert torch.equal(alone.accepted_RB[:, 0], together.accepted_RB[:rounds, row])


def test_served_requests_are_answered_as_without_a_draft():
    prompts = random_prompts([30, 1, 52, 17, 41])
    alone = [open_batch(TARGET, [prompt], generate_len=12) for prompt in prompts]
    expected = [batch.decoder.generate().tokens[0] for batch in alone]
    engine = new_engine(
        TARGET, "dflash", draft_model=small_block(TARGET), **(KEYS | {"policy": "streaming"})
    )
    scheduler = Scheduler(Slots(engine, 2, 64))
    requests = [Request(prompt, Params(12, Sampling(ignore_eos=True))) for prompt in prompts]
    for request in requests:
        scheduler.submit(request)
        scheduler.step()
    while not scheduler.idle:
        scheduler.step()
    assert [request.tokens for request in requests] == expected


STEPS = 8  # of the grid of random numbers: all thresholds below are multiples of 1 / STEPS


def test_independent_places_keep_the_targets_distribution_exactly(monkeypatch):
    """Every proposal of two places over two tokens, and every random number on a grid: what is
    written has the target's distribution, whose second place depends on the first token while the
    proposal's does not.
    """
    first, second = [0.25, 0.75], {0: [0.5, 0.5], 1: [0.75, 0.25]}  # of the target
    q = [[0.5, 0.5], [0.5, 0.5]]  # of the draft, place by place
    third = [0.5, 0.5]  # behind both
    grid = torch.arange(STEPS, dtype=torch.float64) / STEPS + 0.5 / STEPS
    written: dict[tuple[int, ...], float] = {}
    for proposed in itertools.product((0, 1), repeat=2):
        chance = q[0][proposed[0]] * q[1][proposed[1]]
        p_3V = torch.tensor([first, second[proposed[0]], third], dtype=torch.float64)
        u_NU = torch.cartesian_prod(grid, grid, grid)  # to accept each place, and to decide
        draws = {0: u_NU[:, [0, 1, 1]], 1: u_NU[:, 2:].expand(-1, 3)}
        monkeypatch.setattr(accept, "uniform_BT", lambda s, at, use, draws=draws: draws[use])
        count = len(u_NU)
        verdict = accept.accept_sampled(
            torch.tensor([proposed]).expand(count, -1),
            torch.tensor([q], dtype=torch.float64).expand(count, -1, -1),
            p_3V.log().expand(count, -1, -1),
            torch.zeros(count, 3, dtype=torch.int64),
            Sampling(1.0, seed=0),
            accept=0,  # type: ignore[arg-type]
            decide=1,  # type: ignore[arg-type]
        )
        for accepted, tokens in zip(
            verdict.num_accepted_B.tolist(), verdict.tokens_BT.tolist(), strict=True
        ):
            key = tuple(tokens[: min(accepted + 1, 2)])
            written[key] = written.get(key, 0.0) + chance / count
    for token in (0, 1):
        of_first = sum(share for key, share in written.items() if key[0] == token)
        assert of_first == pytest.approx(first[token], abs=1e-6)
        # Where the round has gone on behind it, the next one follows the target, too.
        behind = {key[1]: share for key, share in written.items() if key[0] == token and key[1:]}
        for other, share in behind.items():
            expected = second[token][other]
            assert share / sum(behind.values()) == pytest.approx(expected, abs=1e-6)


def test_gamma_beyond_the_block_is_refused():
    config = small_block(TARGET).config
    draft = Dflash(gamma=12, model=ModelChoice("d", architecture=config))
    words = "blocks of 12 tokens, the last committed one among them; choose 11 or less"
    with pytest.raises(UserError, match=f"^draft.gamma=12: .* {words}$"):
        draft.check(TARGET.config)
    replace(draft, gamma=11).check(TARGET.config)
    other = small_model(hidden_size=64)
    with pytest.raises(UserError, match="made for another target: a hidden size of 32"):
        replace(draft, gamma=3).check(other.config)


@pytest.mark.parametrize(
    ("block_size", "gamma", "gammas"),
    [
        (12, "auto", (1, 2, 3, 5, 8)),
        (9, "auto", (1, 2, 3, 5, 8)),
        (8, "auto", (1, 2, 3, 5)),
        (2, "auto", (1,)),
        (None, "auto", (1, 2, 3, 5, 8)),  # of a block that nothing is known about
        (8, 7, (7,)),
        (8, 20, (20,)),  # which is refused
    ],
)
def test_gammas_to_choose_among_fit_into_the_block(block_size, gamma, gammas):
    model = None
    if block_size:
        config = replace(small_block(TARGET).config, block_size=block_size)
        model = ModelChoice("d", architecture=config)
    draft = Dflash(gamma=gamma, model=model)
    assert draft.gammas(POLICIES["full"].facts()) == gammas
    if gamma != 20:
        draft.check(TARGET.config)


def test_a_mask_token_beyond_the_vocabulary_is_refused():
    """No embedding has it: the first proposal would fail."""
    config = replace(small_block(TARGET).config, mask_token_id=61)
    draft = Dflash(gamma=3, model=ModelChoice("d", architecture=config))
    with pytest.raises(UserError, match="mask token 61 beyond a vocabulary of 61"):
        draft.check(TARGET.config)


def test_a_proposal_costs_a_pass_whatever_gamma_is():
    target = architecture("llama-3.1-8b")
    draft = Dflash(gamma=3, model=ModelChoice("d", architecture=BlockConfig.like(target)))
    setup = Setup(target, hardware_named("h100"), 1, 32_000, draft=draft)
    proposals = [gamma * round_times(setup, gamma).draft.total for gamma in (1, 4, 8)]
    assert proposals[0] < proposals[2] < 1.1 * proposals[0]


@pytest.mark.parametrize("policy", ["quest", "topk"])
def test_the_time_of_a_selection_is_shown_whole(policy):
    """T_select is a mean over draft steps, of which a block counts as gamma."""
    target = architecture("llama-3.1-8b")
    draft = Dflash(gamma=4, model=ModelChoice("d", architecture=BlockConfig.like(target)))
    cache = POLICIES[policy].facts(budget=512)
    setup = Setup(target, hardware_named("h100"), 8, 32_000, draft=draft, cache=cache)
    shown = predict(setup, (4,), 0.7).metrics()["predicted/select_ms"]
    rounds = cache.rounds_per_selection
    assert shown == pytest.approx(1e3 * 4 * rounds * select_time(setup, 4).total)
    assert shown > 0
