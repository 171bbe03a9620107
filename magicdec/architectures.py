"""The architecture of a decoder-only transformer as one dataclass, read from a Hugging Face `config.json`.

One set of fields covers the Llama, Mistral, Qwen2, Qwen3 and Yi families. A new family that fits them needs no code
beyond its name in `FAMILIES`.
"""

from dataclasses import dataclass, replace
from typing import Any

from magicdec.errors import UserError
from magicdec.rules import FLAG, TEXT, check, check_json, either, has_rule, list_of, number, or_null, rules_of, whole

# What a family's code implies and its config.json leaves out.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
}
# Families whose code reads `attention_bias`; the others ignore the key.
FAMILIES_WITH_OPTIONAL_BIAS = ("llama", "qwen3")
QWEN3_HEAD_DIM = 128  # the default of a Qwen3 config.json: not hidden_size / num_heads
# Defaults of a config.json; the Llama family has no sliding windows, even if its files name one.
DEFAULT_SLIDING_WINDOW, DEFAULT_MAX_WINDOW_LAYERS = 4096, 28

LONGEST = (1 << 31) - 1  # tokens: positions and lengths are int32
TOKEN_ID = whole(0, LONGEST)
# Kinds of rope scaling, and the fields that each needs in addition to its factor.
ROPE_KINDS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("original_max_position_embeddings",),
}


@dataclass(frozen=True)
class RopeScaling:
    """The scaling of rotary frequencies beyond the pretraining context.

    `linear` divides positions by `factor` (Chen et al. 2023); `llama3` and `yarn` (Peng et al. 2023) blend scaled and
    unscaled frequencies by wavelength. Fields that a kind does not use stay None.
    """

    kind: str  # a key of ROPE_KINDS
    factor: float = has_rule(number(0, 1e6))
    original_max_position_embeddings: int | None = has_rule(whole(1, LONGEST), default=None)
    low_freq_factor: float | None = has_rule(number(0, 1e6), default=None)  # llama3
    high_freq_factor: float | None = has_rule(number(0, 1e6), default=None)  # llama3
    beta_fast: float = has_rule(number(0, 1e6), default=32.0)  # yarn
    beta_slow: float = has_rule(number(0, 1e6), default=1.0)  # yarn
    attention_factor: float | None = has_rule(number(0, 1e6), default=None)  # yarn; None: 0.1 ln(factor) + 1
    truncate: bool = has_rule(FLAG, default=True)  # yarn

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise UserError(f"rope scaling {self.kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
        for name in ("factor", *ROPE_KINDS[self.kind]):
            if getattr(self, name) is None:
                raise UserError(f"rope scaling {self.kind} needs {name}")
        check(self, "rope scaling: ")
        if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor:  # type: ignore[operator]
            low = f"low_freq_factor={self.low_freq_factor}"
            raise UserError(f"rope scaling llama3: {low} must be below high_freq_factor")


@dataclass(frozen=True)
class ModelConfig:
    """The sizes and switches of one transformer. Defaults are Llama's.

    The upper bounds are far beyond any model's: they refuse a broken file before it takes memory or time.
    """

    vocab_size: int = has_rule(whole(1, 1 << 24))
    hidden_size: int = has_rule(whole(1, 1 << 20))
    intermediate_size: int = has_rule(whole(1, 1 << 22))
    num_layers: int = has_rule(whole(1, 2000))
    num_heads: int = has_rule(whole(1, 1 << 14))
    num_kv_heads: int = has_rule(whole(1, 1 << 14))
    head_dim: int = has_rule(whole(1, 1 << 14))
    max_position_embeddings: int = has_rule(whole(1, LONGEST))
    rope_theta: float = has_rule(number(1, 1e15), default=10000.0)
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = has_rule(number(0, 1), default=1e-5)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    # Layers with a sliding window see only the last `sliding_window` tokens, their own included.
    sliding_window: int | None = has_rule(whole(1, LONGEST), default=None)
    sliding_layers: tuple[int, ...] = has_rule(list_of(whole(0, 2000)), default=())
    eos_token_ids: tuple[int, ...] = has_rule(list_of(TOKEN_ID), default=())

    def __post_init__(self) -> None:
        check(self)
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise UserError(f"head_dim={self.head_dim} must be even: rotary embeddings turn pairs of features")
        if max(self.sliding_layers, default=0) >= self.num_layers:
            raise UserError(f"sliding layer {max(self.sliding_layers)}: there are {self.num_layers} layers, from 0")
        for name in ("sliding_layers", "eos_token_ids"):  # lists from YAML become tuples, so that configs are hashable
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def group_size(self) -> int:
        """Return the query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_parameters(self) -> int:
        """Return the weights of the whole model, tied embeddings counted once."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * q + 2 * kv)
        biases = self.qkv_bias * (q + 2 * kv) + self.output_bias * self.hidden_size
        norms = 2 * self.hidden_size + self.qk_norm * 2 * self.head_dim
        layer = attention + biases + norms + 3 * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size

    @property
    def kv_elements_per_token(self) -> int:
        """Return the keys and values that one token of one sequence adds over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def shared_by(self, ranks: int) -> "ModelConfig":
        """Return the sizes of one rank's share of the layers; the vocabulary stays whole."""
        return replace(
            self,
            num_heads=self.num_heads // ranks,
            num_kv_heads=max(1, self.num_kv_heads // ranks),
            intermediate_size=self.intermediate_size // ranks,
        )

    def divides(self, ranks: int) -> bool:
        """Return whether the layers can be divided evenly over so many ranks."""
        kv_fits = self.num_kv_heads % ranks == 0 or ranks % self.num_kv_heads == 0
        return kv_fits and self.num_heads % ranks == 0 and self.intermediate_size % ranks == 0

    def layers(self, start: int, end: int) -> "ModelConfig":
        """Return the architecture of layers [start, end) alone."""
        sliding = tuple(i - start for i in self.sliding_layers if start <= i < end)
        return replace(self, num_layers=end - start, sliding_layers=sliding)

    def window_of(self, layer: int) -> int | None:
        """Return the sliding window of a layer in tokens, None if it attends to everything."""
        return self.sliding_window if layer in self.sliding_layers else None


def check_ranks(target: ModelConfig, ranks: int, draft: ModelConfig | None = None, draft_ranks: int = 1) -> None:
    """Raise UserError, with the valid numbers, if target or draft cannot be divided over their ranks."""
    _check_divides(target, ranks, "hardware.tensor_parallel")
    if draft is None:
        return
    if ranks % draft_ranks:
        raise UserError(
            f"draft.tensor_parallel={draft_ranks}: must divide the target's hardware.tensor_parallel={ranks}"
        )
    _check_divides(draft, draft_ranks, "draft.tensor_parallel")


def _check_divides(config: ModelConfig, ranks: int, key: str) -> None:
    if not config.divides(ranks):
        valid = ", ".join(str(n) for n in range(1, config.num_heads + 1) if config.divides(n))
        raise UserError(
            f"{key}={ranks}: {config.num_heads} query heads, {config.num_kv_heads} KV heads and "
            f"{config.intermediate_size} MLP features cannot be divided so; valid: {valid}"
        )


_SIZES, _FLAG, _NUMBER = rules_of(ModelConfig), or_null(FLAG), or_null(number(0, 1e15))
EOS = {"eos_token_id": or_null(either(TOKEN_ID, list_of(TOKEN_ID)))}
ROPE: dict[str, Any] = {
    **dict.fromkeys(("rope_type", "type"), or_null(TEXT)),
    **dict.fromkeys(("rope_theta", "partial_rotary_factor", "mscale", "mscale_all_dim"), _NUMBER),
    **{name: or_null(rule) for name, rule in rules_of(RopeScaling).items()},
}
# The keys of a `config.json` that are read.
SCHEMA: dict[str, Any] = {
    **dict.fromkeys(("model_type", "hidden_act"), TEXT),
    **{name: _SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")},
    "num_hidden_layers": _SIZES["num_layers"],
    "num_attention_heads": _SIZES["num_heads"],
    "num_key_value_heads": or_null(_SIZES["num_kv_heads"]),
    "head_dim": or_null(_SIZES["head_dim"]),
    "rms_norm_eps": _SIZES["rms_norm_eps"],
    **dict.fromkeys(("rope_theta", "partial_rotary_factor"), _NUMBER),
    "original_max_position_embeddings": or_null(_SIZES["max_position_embeddings"]),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"), _FLAG),
    "sliding_window": or_null(_SIZES["sliding_window"]),
    "max_window_layers": or_null(whole(0, 2000)),
    "layer_types": or_null(list_of(TEXT)),
} | EOS


def from_hugging_face(config: dict[str, Any], name: str = "config.json") -> ModelConfig:
    """Return the architecture that a `config.json` describes; `name` is what errors call the file.

    Raise UserError for an unsupported family or rope scaling, for missing keys, and for wrong types or sizes.
    """
    check_json(config, SCHEMA, name)
    for key in ("rope_parameters", "rope_scaling"):
        if config.get(key) is not None:
            check_json(config[key], ROPE, name, key)
    # Null means missing, except for a sliding window: there null means none, and a missing key the default.
    config = {key: value for key, value in config.items() if value is not None or key == "sliding_window"}
    try:
        return _from_hugging_face(config)
    except KeyError as missing:
        raise UserError(f"{name}: the key {missing} is missing") from None
    except UserError as error:
        raise UserError(f"{name}: {error}") from None


def eos_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Return a checkpoint's end-of-sequence tokens as a tuple, empty if it names none."""
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


def _from_hugging_face(config: dict[str, Any]) -> ModelConfig:
    """Implement `from_hugging_face`, with errors that do not name the file yet."""
    family = config.get("model_type")
    if family is None:
        raise UserError(f"no model_type is given; supported: {', '.join(FAMILIES)}")
    if family not in FAMILIES:
        raise UserError(f"model_type={family!r} is not supported; supported: {', '.join(FAMILIES)}")
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"hidden_act={config['hidden_act']!r} is not supported; supported: silu")
    if config.get("mlp_bias"):
        raise UserError("mlp_bias=true is not supported")
    num_layers, num_heads = config["num_hidden_layers"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or (QWEN3_HEAD_DIM if family == "qwen3" else config["hidden_size"] // num_heads)
    bias = family in FAMILIES_WITH_OPTIONAL_BIAS and bool(config.get("attention_bias"))
    theta, scaling = _rope(config)
    window, sliding_layers = _sliding(config, family, num_layers)
    return ModelConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        max_position_embeddings=_longest(config, scaling),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        output_bias=bias,
        sliding_window=window,
        sliding_layers=sliding_layers,
        eos_token_ids=eos_ids(config.get("eos_token_id")),
        **({"qkv_bias": bias} | FAMILIES[family]),
    )


def _sliding(config: dict[str, Any], family: str, num_layers: int) -> tuple[int | None, tuple[int, ...]]:
    """Return the sliding window and its layers, by the switches that may name a window without using it."""
    window = config.get("sliding_window", DEFAULT_SLIDING_WINDOW)
    layers: tuple[int, ...] = ()
    if family == "mistral":
        layers = tuple(range(num_layers))
    elif family != "llama" and config.get("use_sliding_window"):
        kinds = config.get("layer_types")
        if kinds:
            layers = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
        else:  # the first max_window_layers attend to everything
            layers = tuple(range(config.get("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS), num_layers))
    return (window, layers) if layers and window is not None else (None, ())


def _longest(config: dict[str, Any], scaling: RopeScaling | None) -> int:
    """Return the longest sequence that the model is made for: `max_position_embeddings`, or what YaRN's factor gives.

    YaRN checkpoints may keep that key at the original length. Llama 3.2's factor would exceed its trained length.
    """
    longest = config["max_position_embeddings"]
    if scaling is None or scaling.kind != "yarn":
        return longest
    assert scaling.original_max_position_embeddings is not None, "RopeScaling has checked"
    return max(longest, int(scaling.factor * scaling.original_max_position_embeddings))


def _rope(config: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Return the rotary base and scaling, from transformers 5's `rope_parameters` or the older two keys."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if (config.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UserError("partial_rotary_factor is not supported")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        raise UserError("YaRN with mscale is not supported")
    known = {name: rope[name] for name in rules_of(RopeScaling) if rope.get(name) is not None}
    if kind in ("llama3", "yarn"):
        original = config.get("original_max_position_embeddings") or known.get("original_max_position_embeddings")
        known["original_max_position_embeddings"] = original or config["max_position_embeddings"]
    if kind == "yarn" and "factor" not in known:
        known["factor"] = config["max_position_embeddings"] / known["original_max_position_embeddings"]
    return theta, RopeScaling(kind=kind, factor=known.pop("factor", None), **known)
