"""Tensor parallelism: two ranks write what one writes, no rank loads what is not its own, and what
cannot be divided is refused.
"""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch

import magicdec
from magicdec.architectures.head_config import HeadConfig
from magicdec.architectures.model_config import ModelConfig, check_ranks
from magicdec.attention.sdpa import SdpaAttention
from magicdec.config.registry import POLICIES
from magicdec.errors import UserError
from magicdec.kernels.library import compiler
from magicdec.models import parallel, symmetric
from magicdec.models.checkpoint import load
from magicdec.models.description import read_config
from magicdec.models.head import Head
from magicdec.models.kv_cache import KVCache
from magicdec.models.parallel import Share, share
from magicdec.models.symmetric import SymmetricSums
from magicdec.models.transformer import Transformer
from magicdec.scenarios.ranks import on_ranks
from magicdec.verification.sampling import Sampling
from tests.small import open_batch, random_prompts

VOCAB = 97  # odd: the last rank has fewer
BUNDLED, SMALL = Path(magicdec.__file__).parent / "models/tiny", Path(__file__).parent / "heads"
FOLDERS = {"bundled": BUNDLED / "target", "bundled head": BUNDLED / "eagle3"}
FOLDERS |= {"qwen3": SMALL / "target-qwen3", "qwen3 head": SMALL / "qwen3-speculators"}
FOLDERS |= {"llama": SMALL / "target-llama", "llama head": SMALL / "llama-eagle"}
# Checkpoint, draft, ranks of the draft, policy, sampling. A head is that of its target.
CASES = [("bundled", "eagle3", ranks, "streaming", Sampling()) for ranks in (1, 2)]
CASES += [("bundled", "eagle3", 2, policy, Sampling()) for policy in ("full", "snapkv", "quest")]
CASES += [("bundled", "eagle3", 1, "snapkv", Sampling(temperature=0.8, seed=3))]
TRAINED = len(CASES)
CASES += [("qwen3", "eagle3", ranks, "streaming", Sampling()) for ranks in (1, 2)]
CASES += [("llama", "eagle3", 2, "snapkv", Sampling())]
CASES += [("bias", "self", 2, policy, Sampling()) for policy in POLICIES]
CASES += [("mqa", "self", 2, "streaming", Sampling()), ("mqa", "layer_skip", 2, "full", Sampling())]
CASES += [("bias", "model", ranks, "streaming", Sampling()) for ranks in (1, 2)]
CASES += [("bias", "model", 1, "snapkv", Sampling(temperature=0.8, seed=3))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    # Here: the ranks import this module and need no transformers.
    from tests.checkpoints import make_checkpoint

    folder = tmp_path_factory.mktemp("checkpoints")
    return FOLDERS | {
        "bias": make_checkpoint(folder / "bias", "llama-bias", vocab_size=VOCAB),
        "mqa": make_checkpoint(
            folder / "mqa", "llama-mqa", vocab_size=VOCAB, tie_word_embeddings=True
        ),
        "wide": make_checkpoint(
            folder / "wide", "llama-bias", vocab_size=VOCAB, num_attention_heads=8, head_dim=8
        ),
    }


def model(folder: Path, part: Share) -> Transformer:
    whole = read_config(folder)
    kind = Head if isinstance(whole, HeadConfig) else Transformer
    with torch.device("meta"):
        transformer = kind(part.config(whole), SdpaAttention(), part)
    transformer.load_state_dict(load(folder, whole, torch.float32, "cpu", share=part), assign=True)
    return transformer.eval().requires_grad_(False)


def decoded(
    rank: int, folders: dict[str, Path], ranks: int, cases: list = CASES, compiled: bool = False
) -> list:
    """Both ways, for all cases: tokens, acceptance, and how many entries a head keeps on all
    ranks.
    """
    found = []
    for name, draft, draft_ranks, policy, sampling in cases:
        target = model(folders[name], share(ranks))
        drafter = None
        part = share(min(draft_ranks, ranks))
        if compiled:
            target.compile_layers()
        if draft in ("model", "eagle3"):
            drafter = model(folders["mqa" if draft == "model" else f"{name} head"], part)
        settings = {"gamma": 3, "budget": 16, "num_sink": 2, "page_size": 4, "sampling": sampling}
        settings |= {"generate_len": 12 if draft == "eagle3" else 8, "prefill_chunk": 32}
        prompts = random_prompts([40, 45, 51], vocab=target.config.vocab_size)
        batch = open_batch(
            target, prompts, draft_name=draft, draft_model=drafter, policy=policy, **settings
        )
        plain, fast = batch.decoder.generate(), batch.decoder.generate(batch.draft)
        entries = part.size * batch.draft.entries.k_LBKSD.shape[2] if draft == "eagle3" else 0
        found.append((plain.tokens, fast.tokens, fast.accepted_RB.tolist(), entries))
    return found


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.slow
def test_two_ranks_write_what_one_writes(folders):
    """Each has a whole head or half of its attention heads, and the target's embedding or the
    head's own.
    """
    one, two = decoded(0, folders, 1), on_ranks(2, "cpu", decoded, folders, 2)
    for case, alone, both in zip(CASES, one, two, strict=True):
        assert alone == both, case
        assert alone[0] == alone[1] or case[-1].temperature > 0
    accepted = [sum(count > 0 for row in found[2] for count in row) for found in one[:TRAINED]]
    assert min(accepted) > 3, "proposals for a text like those that the head was trained on"


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.slow
def test_four_ranks_share_two_kv_heads(folders):
    """Two ranks hold the same KV head, and each the cache of it; a draft of its own is divided by
    two.
    """
    cases = [("wide", "self", 4, "streaming", Sampling()), ("wide", "model", 2, "full", Sampling())]
    assert on_ranks(4, "cpu", decoded, folders, 4, cases) == decoded(0, folders, 1, cases)


def decoded_in_a_buffer(rank: int, folders: dict[str, Path], ranks: int, cases: list) -> list:
    """Decode with all sums in one buffer, as in symmetric memory; gloo adds them up."""
    memory = SimpleNamespace(
        empty=torch.empty, rendezvous=lambda *_: SimpleNamespace(multicast_ptr=0)
    )
    with (
        patch.object(symmetric, "_memory", lambda: memory),
        patch.object(symmetric, "sums", lambda _, group, device: SymmetricSums(group, device)),
        patch.object(SymmetricSums, "_summed", lambda _, x: parallel._sum(x)),
    ):
        return decoded(rank, folders, ranks, cases)


@pytest.mark.usefixtures("forked_ranks")
def test_one_buffer_does_for_all_sums(folders):
    """Each sum is read before the next one is written, and a layer's bias is added once."""
    cases = [
        ("bias", "self", 2, "streaming", Sampling()),
        ("mqa", "layer_skip", 2, "full", Sampling()),
    ]
    assert on_ranks(2, "cpu", decoded_in_a_buffer, folders, 2, cases) == decoded(
        0, folders, 1, cases
    )


@pytest.mark.soak  # two ranks compile
@pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")
def test_compiled_ranks_write_what_one_writes(folders):
    cases = [("bias", "self", 2, "streaming", Sampling())]
    assert on_ranks(2, "cpu", decoded, folders, 2, cases, True) == decoded(0, folders, 1, cases)


@pytest.mark.parametrize(
    ("name", "ranks"), [("bias", 2), ("bias", 4), ("mqa", 2), ("mqa", 4), ("wide", 8)]
)
def test_ranks_hold_parts_that_make_up_the_whole(folders, name, ranks):
    config, D = read_config(folders[name]), read_config(folders[name]).head_dim
    H, K = config.num_heads, config.num_kv_heads
    whole = load(folders[name], config, torch.float32, "cpu")
    parts = [Share(rank, ranks, rank, ranks) for rank in range(ranks)]
    states = [load(folders[name], config, torch.float32, "cpu", share=part) for part in parts]
    for part, state in zip(parts, states, strict=True):
        local = part.config(config)
        with torch.device("meta"):
            expected = Transformer(local, SdpaAttention(), part).state_dict()
        assert {n: x.shape for n, x in state.items()} == {n: x.shape for n, x in expected.items()}
        # Its queries' own KV head.
        assert part.rank * local.num_heads // config.group_size == part.kv_heads(K).start
        q, k, v = (
            x.unflatten(0, (-1, D))
            for x in whole["layers.0.qkv.weight"].split([D * H, D * K, D * K])
        )
        own = q[part.part(H)], k[part.kv_heads(K)], v[part.kv_heads(K)]
        assert torch.equal(state["layers.0.qkv.weight"], torch.cat(own).flatten(0, 1))
    for matrix in ("layers.1.output.weight", "layers.1.down.weight"):
        assert torch.equal(torch.cat([state[matrix] for state in states], dim=1), whole[matrix])
    assert torch.equal(
        torch.cat([state["embed.weight"] for state in states])[:VOCAB], whole["embed.weight"]
    )
    if config.output_bias:
        assert torch.equal(
            sum(state["layers.0.output.bias"] for state in states), whole["layers.0.output.bias"]
        )


def test_without_symmetric_memory_the_other_sums_with_a_reason(monkeypatch, capsys):
    """On a CPU, and where a rank reports an obstacle: one line and NCCL, or an error if it was
    asked for.
    """
    group, cpu, cuda = object(), torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(symmetric, "_obstacle", lambda *_: "is missing from PyTorch 9")
    monkeypatch.setattr(symmetric, "_all_agree", lambda mine, *_: mine)
    monkeypatch.setattr(symmetric.dist, "get_rank", lambda: 0)
    assert symmetric.sums("auto", group, cpu) is symmetric.sums("nccl", group, cuda) is None
    assert capsys.readouterr().err == ""
    assert symmetric.sums("auto", group, cuda) is None
    (line,) = capsys.readouterr().err.splitlines()
    assert "NCCL sums over the ranks, because symmetric memory is missing from PyTorch 9" in line
    with pytest.raises(UserError, match=r"hardware.all_reduce=symmetric: .* set it to nccl"):
        symmetric.sums("symmetric", group, cuda)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"rendezvous": RuntimeError("no peers\nand more")}, "cannot be set up: no peers"),
        ({"rendezvous": TypeError()}, "cannot be set up: TypeError"),
        ({"sum": lambda x, *_: x}, "cannot be set up: its sums are wrong"),
        ({"sum": lambda *_: 1 / 0}, "cannot be set up: division by zero"),
        *(({"other_rank": at}, "does not work on another rank") for at in range(3)),
        ({}, None),
    ],
)
def test_symmetric_memory_that_fails_leaves_the_sums_to_the_other(
    monkeypatch, capsys, broken, reason
):
    """On this rank or, at one of three agreements, on another: all ranks make the same calls, and
    none uses it.
    """
    agreements = []

    def all_agree(mine, *_):
        agreements.append(mine)
        return mine and broken.get("other_rank") != len(agreements) - 1

    rendezvous = Mock(
        return_value=SimpleNamespace(multicast_ptr=0), side_effect=broken.get("rendezvous")
    )
    memory = SimpleNamespace(
        empty=lambda size, dtype, device: torch.empty(size, dtype=dtype), rendezvous=rendezvous
    )
    operators = SimpleNamespace(two_shot_all_reduce_=broken.get("sum", lambda x, *_: x.mul_(2)))
    monkeypatch.setattr(symmetric, "_memory", lambda: memory)
    monkeypatch.setattr(symmetric, "_obstacle", lambda *_: None)
    monkeypatch.setattr(symmetric, "_all_agree", all_agree)
    monkeypatch.setattr(symmetric.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(symmetric.torch.ops, "symm_mem", operators, raising=False)
    group = SimpleNamespace(group_name="all", size=lambda: 2)
    made = symmetric.sums.__wrapped__("auto", group, torch.device("cuda"))
    assert len(agreements) == 3
    assert (made is None) == (reason is not None)
    assert (reason or "") in capsys.readouterr().err
    if made:
        assert torch.equal(made.sum(torch.ones(2, 8)), torch.full((2, 8), 2.0))


def test_what_cannot_be_divided_is_refused_with_what_can():
    config = ModelConfig(
        64, 96, 96, 2, num_heads=12, num_kv_heads=4, head_dim=8, max_position_embeddings=64
    )
    check_ranks(config, 12, config, 4)
    with pytest.raises(
        UserError, match=r"hardware.tensor_parallel=3: .*4 KV heads.*valid: 1, 2, 4, 12"
    ):
        check_ranks(config, 3)
    with pytest.raises(UserError, match=r"draft.tensor_parallel=3: must divide .*=4"):
        check_ranks(config, 4, config, 3)
    with pytest.raises(UserError, match=r"draft.tensor_parallel=6: 12 query heads"):
        check_ranks(config, 12, config, 6)


def test_a_pass_has_two_sums_a_layer_and_one_of_the_embedding(monkeypatch, folders):
    """Each is a wait for all ranks, and predictions count them. Choosing tokens takes one gathering
    of logits.
    """
    summed, gathered = [], []
    monkeypatch.setattr(parallel.dist, "all_reduce", lambda x, group=None: summed.append(x.shape))
    monkeypatch.setattr(parallel, "all_gather_single", lambda out, x: gathered.append(x.shape))
    target = model(folders["bias"], Share(0, 2, 0, 2))
    cache = KVCache(target.config, 3, 8, torch.float32, "cpu")
    with torch.inference_mode():
        hidden = target(torch.zeros(3, 2, dtype=torch.int64), cache)
        assert target.logits(hidden).shape == (3, 2, VOCAB)
    assert summed == [hidden.shape] * (2 * target.config.num_layers + 1)
    assert len(gathered) == 1
