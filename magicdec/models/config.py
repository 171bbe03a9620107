"""The architecture of a decoder-only transformer: what a Hugging Face `config.json` says of it, as one dataclass.

One set of fields covers the Llama, Mistral, Qwen2, Qwen3 and Yi families. A new family that fits them needs no code
beyond its name in `FAMILIES`.
"""

from dataclasses import dataclass, field
from typing import Any

from magicdec.errors import UserError

# What a family's checkpoint leaves unsaid in its config.json because its own code implies it.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
}
# Families whose code heeds `attention_bias`; in the others' files the key means nothing.
FAMILIES_WITH_OPTIONAL_BIAS = ("llama", "qwen3")
QWEN3_HEAD_DIM = 128  # where a Qwen3 config.json names none: not hidden_size / num_heads
# Where a config.json leaves them out; the Llama family has no sliding windows, whatever its files say.
DEFAULT_SLIDING_WINDOW, DEFAULT_MAX_WINDOW_LAYERS = 4096, 28

# Kinds of rope scaling, and the fields that each cannot do without beside its factor.
ROPE_KINDS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("original_max_position_embeddings",),
}


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the pretraining context.

    `linear` divides positions by `factor` (Chen et al. 2023); `llama3` and `yarn` (Peng et al. 2023) blend scaled and
    unscaled frequencies by wavelength. Fields that a kind does not use stay None.
    """

    kind: str  # a key of ROPE_KINDS
    factor: float
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: 0.1 ln(factor) + 1
    truncate: bool = True  # yarn

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise UserError(f"rope scaling {self.kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
        if not self.factor or self.factor < 0:
            raise UserError(f"rope scaling {self.kind} needs a positive factor, not {self.factor}")
        for name in ROPE_KINDS[self.kind]:
            if getattr(self, name) is None:
                raise UserError(f"rope scaling {self.kind} needs {name}")


SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of one transformer. Defaults are Llama's."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    # Layers with a sliding window see only the last `sliding_window` tokens, their own included.
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = field(default=())
    eos_token_ids: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        for name in SIZES:
            size = getattr(self, name)
            if not isinstance(size, int) or size < 1:
                raise UserError(f"{name}={size!r} must be a whole number of at least 1")
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise UserError(f"head_dim={self.head_dim} must be even: rotary embeddings turn pairs of features")
        for name in ("sliding_layers", "eos_token_ids"):  # lists from YAML become tuples, so that configs are hashable
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model, tied embeddings counted once."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * q + 2 * kv)
        biases = self.qkv_bias * (q + 2 * kv) + self.output_bias * self.hidden_size
        norms = 2 * self.hidden_size + self.qk_norm * 2 * self.head_dim
        layer = attention + biases + norms + 3 * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size

    @property
    def kv_elements_per_token(self) -> int:
        """Keys and values that one token of one sequence adds over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def window_of(self, layer: int) -> int | None:
        """The sliding window of a layer in tokens, None where it attends to everything."""
        return self.sliding_window if layer in self.sliding_layers else None


def from_hugging_face(config: dict[str, Any], name: str = "config.json") -> ModelConfig:
    """Read the contents of a `config.json`; `name` is what errors call it.

    Raises UserError for an architecture or a rope scaling this transformer does not cover, and for missing keys.
    """
    try:
        return _from_hugging_face(config)
    except KeyError as missing:
        raise UserError(f"{name}: the key {missing} is missing") from None
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UserError(f"{name}: a value has the wrong type or size ({error})") from None


def eos_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """A checkpoint's end-of-sequence token or tokens as a tuple; empty where it names none."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _from_hugging_face(config: dict[str, Any]) -> ModelConfig:
    """`from_hugging_face` with errors that do not name the file yet."""
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
    """The sliding window and its layers, honouring the switches that name a window without using it."""
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
    """Return the longest sequence that the model is made for.

    A YaRN checkpoint may keep `max_position_embeddings` at the original length: its factor says how far it reaches.
    For the other kinds that key is the only one to say: a linear scaling names no original length, and Llama 3.2's
    factor would reach beyond the length that it was trained for.
    """
    longest = config["max_position_embeddings"]
    if scaling is None or scaling.kind != "yarn":
        return longest
    assert scaling.original_max_position_embeddings is not None, "RopeScaling has checked"
    return max(longest, int(scaling.factor * scaling.original_max_position_embeddings))


def _rope(config: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """Rotary base and scaling, from transformers 5's `rope_parameters` or the older two keys."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if config.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UserError("partial_rotary_factor is not supported")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        raise UserError("YaRN with mscale is not supported")
    known = {f: rope[f] for f in RopeScaling.__dataclass_fields__ if rope.get(f) is not None}
    if kind in ("llama3", "yarn"):
        original = config.get("original_max_position_embeddings") or known.get("original_max_position_embeddings")
        known["original_max_position_embeddings"] = original or config["max_position_embeddings"]
    if kind == "yarn" and "factor" not in known:
        known["factor"] = config["max_position_embeddings"] / known["original_max_position_embeddings"]
    return theta, RopeScaling(kind=kind, factor=known.pop("factor", None), **known)
