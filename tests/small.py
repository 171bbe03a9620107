"""Small random models, and a batch opened on them, for tests of decoding."""

from dataclasses import fields

import torch

from magicdec.architectures import ModelConfig
from magicdec.attention.sdpa import SdpaAttention
from magicdec.drafting import DraftConfig
from magicdec.engine.native import Batch, NativeEngine
from magicdec.models.transformer import Transformer
from magicdec.policies import CacheConfig, Full
from magicdec.registry import DRAFTS, POLICIES, Registry
from magicdec.verification.sampling import Sampling

VOCAB = 61


def small_model(seed: int = 0, spread: float = 0.25, **overrides) -> Transformer:
    """A two-layer model in fp32 whose random weights give varied, well separated logits."""
    sizes = {
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
    """The same model with disturbed weights: a draft that agrees often, but not always."""
    generator = torch.Generator().manual_seed(seed)
    copy = Transformer(model.config, model.attention).eval()
    copy.load_state_dict(model.state_dict())
    for parameter in copy.parameters():
        if parameter.dim() > 1:
            parameter.data += torch.randn(parameter.shape, generator=generator) * noise * parameter.std()
    return copy.requires_grad_(False)


def random_prompts(lengths: list[int], seed: int = 0, vocab: int = VOCAB) -> list[list[int]]:
    """Random token ids of the given lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in lengths]


def cache_config(policy: str, **keys) -> CacheConfig:
    """The settings of a policy: those of `keys` that it has."""
    facts = POLICIES[policy].facts
    return facts(**{entry.name: keys[entry.name] for entry in fields(facts) if entry.name in keys})


def new_engine(
    target: Transformer, draft_name: str = "none", inner: CacheConfig | None = None, **options
) -> NativeEngine:
    """An engine, greedy by default. Keys of `draft` and `cache` go to them; `inner` is `draft.cache`."""
    defaults = {"policy": "full", "num_layers": 1, "max_ngram": 4, "inner_gamma": 2}
    options = defaults | {"sampling": Sampling(), "generate_len": 24, "prefill_chunk": 16} | options

    def taken(registry: Registry) -> dict:
        keys = registry.own_fields().keys() - {f.name for f in fields(NativeEngine)}
        return {key: options.pop(key) for key in list(options) if key in keys}

    cache = cache_config(options.pop("policy"), **taken(POLICIES))
    keys = taken(DRAFTS) | {"cache": inner or Full()}
    facts = DraftConfig if draft_name == "none" else DRAFTS[draft_name].facts
    draft = facts(draft_name, **{f.name: keys[f.name] for f in fields(facts) if f.name in keys})
    return NativeEngine(target, draft=draft, cache=cache, **options)


def open_batch(target: Transformer, prompts: list[list[int]], **options) -> Batch:
    """Open and prefill a batch on a new engine."""
    engine = new_engine(target, **options)
    batch = engine.open(prompts)
    batch.decoder.prefill(engine.prefill_chunk)
    return batch
