"""Small random models and engines on them, which decode in milliseconds: policies and drafts are
checked on these.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from magicdec.architectures.block_config import BlockConfig
from magicdec.architectures.head_config import HeadConfig
from magicdec.architectures.model_config import ModelConfig
from magicdec.architectures.mtp_config import MtpConfig
from magicdec.attention.sdpa import SdpaAttention
from magicdec.cache.full import Full
from magicdec.config.choices import CacheConfig, DraftConfig
from magicdec.config.groups import BatchConfig, HardwareConfig, SamplingConfig
from magicdec.config.registry import DRAFTS, POLICIES
from magicdec.engine.native import Batch, NativeEngine
from magicdec.models.block import BlockHead
from magicdec.models.head import Head
from magicdec.models.mtp_head import MtpHead
from magicdec.models.transformer import Transformer

VOCAB = 61


def small_model(seed: int = 0, spread: float = 0.25, **overrides: Any) -> Transformer:
    """Return a two-layer model in fp32 whose random weights give varied, well separated logits."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
    }
    generator = torch.Generator().manual_seed(seed)
    model = Transformer(ModelConfig(**(sizes | overrides)), SdpaAttention()).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, spread, generator=generator)
    return model.requires_grad_(False)


def noisy_copy(model: Transformer, noise: float, seed: int = 1) -> Transformer:
    """Return the same model with disturbed weights: a draft that agrees often, but not always."""
    generator = torch.Generator().manual_seed(seed)
    copy = Transformer(model.config, model.attention).eval()
    copy.load_state_dict(model.state_dict())
    for parameter in copy.parameters():
        if parameter.dim() > 1:
            parameter.data += (
                torch.randn(parameter.shape, generator=generator) * noise * parameter.std()
            )
    return copy.requires_grad_(False)


def small_head(target: Transformer) -> Head:
    """Return a head that proposes what a target without layers would say of a token, in most of its
    vocabulary.

    Each token attends to itself, and its embedding is passed on; hidden states are left out.
    """
    whole = target.config
    plain = {name: getattr(whole, name) for name in ModelConfig.__dataclass_fields__}
    plain |= {
        "num_layers": 1,
        "num_kv_heads": whole.num_heads,
        "sliding_window": None,
        "sliding_layers": (),
    }
    plain |= {
        "qkv_bias": False,
        "output_bias": False,
        "qk_norm": True,
        "norm_before_residual": True,
    }
    vocabulary = 4 * whole.vocab_size // 5
    config = HeadConfig(
        **plain, draft_vocab_size=vocabulary, target_hidden_size=whole.hidden_size, taps=(0, 1, 1)
    )
    head = Head(config, target.attention).eval()
    E = whole.hidden_size
    for parameter in head.parameters():
        parameter.data.fill_(float(parameter.dim() == 1))
    head.layer.attention_norm.weight.data.zero_()
    head.layer.q_norm.weight.data.fill_(100.0)
    inner = whole.num_heads * whole.head_dim
    q_or_k = torch.randn(inner, E, generator=torch.Generator().manual_seed(0))
    head.layer.qkv.weight.data[:, :E] = torch.cat((q_or_k, q_or_k, torch.eye(inner, E)))
    head.layer.output.weight.data.copy_(torch.eye(E, inner))
    head.target_ids_V = torch.arange(whole.vocab_size)[-vocabulary:]
    output = target.embed if target.head is None else target.head
    head.head.weight.data.copy_(output.weight[head.target_ids_V].float())
    return head.requires_grad_(False)


def small_modules(target: Transformer, count: int = 2) -> MtpHead:
    """Return modules that predict further tokens with layers like the target's last one. Each
    passes on its embedding, from which the layer then makes what it makes of such a token.
    """
    whole = target.config
    plain = {name: getattr(whole, name) for name in ModelConfig.__dataclass_fields__}
    plain |= {"num_layers": count, "sliding_window": None, "sliding_layers": ()}
    modules = MtpHead(MtpConfig(**plain), target.attention).eval()
    generator = torch.Generator().manual_seed(0)
    E = whole.hidden_size
    for parameter in modules.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.1, generator=generator)
    for number in range(count):
        modules.module(number).joined.weight.data[:, :E] += torch.eye(E)
    return modules.requires_grad_(False)


def small_block(target: Transformer) -> BlockHead:
    """Return a draft of blocks of up to 12 tokens, with random weights, over two of a target's
    hidden states.
    """
    whole = target.config
    plain = {name: getattr(whole, name) for name in ModelConfig.__dataclass_fields__}
    plain |= {"num_layers": 2, "sliding_window": None, "sliding_layers": (), "qk_norm": True}
    mask, last = whole.vocab_size - 1, whole.num_layers
    config = BlockConfig(**plain, block_size=12, mask_token_id=mask, taps=(1, last))
    block = BlockHead(config, target.attention).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in block.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.25, generator=generator)
    return block.requires_grad_(False)


def small_drafter(draft: str, target: Transformer, noise: float) -> Transformer | None:
    """Return the model that a draft needs next to a target, as good as `noise` allows; None if it
    needs none.
    """
    if draft == DRAFTS.keyword or not DRAFTS[draft].facts.needs_model:
        return None
    if DRAFTS[draft].facts.ships_with_target:
        return small_modules(target)
    if DRAFTS[draft].facts.proposes_blocks:
        return small_block(target)
    return small_head(target) if DRAFTS[draft].facts.listens else noisy_copy(target, noise)


def random_prompts(lengths: Sequence[int], seed: int = 0, vocab: int = VOCAB) -> list[list[int]]:
    """Return random token ids of the given lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in lengths]


def cache_config(policy: str, **keys: Any) -> CacheConfig:
    """Return the settings of a policy: those of `keys` that it has."""
    facts = POLICIES[policy].facts
    return facts(**{entry.name: keys[entry.name] for entry in fields(facts) if entry.name in keys})


def new_engine(
    target: Transformer,
    draft_name: str = "none",
    inner: CacheConfig | None = None,
    draft_model: Transformer | None = None,
    sampling: SamplingConfig | None = None,
    graphs: bool = False,
    **keys: Any,
) -> NativeEngine:
    """Return an engine, greedy by default. `keys` are those of `batch`, `sampling`, `draft` and
    `cache`; `inner` is `draft.cache`.
    """
    defaults: dict[str, Any] = {"policy": "full", "num_layers": 1, "max_ngram": 4, "inner_gamma": 2}
    keys = defaults | {"generate_len": 24, "prefill_chunk": 16} | keys
    cache = cache_config(keys.pop("policy"), **keys)
    facts = DraftConfig if draft_name == "none" else DRAFTS[draft_name].facts
    given = keys | {"cache": inner or Full()}
    draft = facts(draft_name, **{f.name: given[f.name] for f in fields(facts) if f.name in given})
    batch = BatchConfig(1, 1, keys["generate_len"], 1, keys["prefill_chunk"])
    sampling = sampling or SamplingConfig()
    sampling = replace(sampling, ignore_eos=keys.get("ignore_eos", True))
    return NativeEngine(
        batch, sampling, draft, cache, machine("cuda" if graphs else "cpu"), target, draft_model
    )


def machine(device: str = "cpu", dtype: str = "float32", **changes: Any) -> HardwareConfig:
    """Return the group `hardware` of one device without any `auto`, whose rounds are captured on a
    GPU.
    """
    plain = HardwareConfig("own", device, dtype, 1, "auto", True, False)  # type: ignore[arg-type]
    return replace(plain, **changes)


def open_batch(target: Transformer, prompts: list[list[int]], **options: Any) -> Batch:
    """Open and prefill a batch on a new engine."""
    engine = new_engine(target, **options)
    batch = engine.open(prompts)
    batch.decoder.prefill(engine.prefill_chunk)
    return batch
