"""The architecture of a decoder-only transformer as one dataclass, read from a Hugging Face `config.json`.

One set of fields covers the Llama, Mistral, Qwen2, Qwen3 and Yi families. A new family that fits them needs no code
beyond its name in `FAMILIES`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Annotated, Any

from pydantic import ValidationError
from pydantic.dataclasses import dataclass

from magicdec.errors import UserError
from magicdec.rules import JSON, STRICT, must, number, parse, refusal, whole

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

LONGEST = (1 << 31) - 1  # positions and lengths are int32
# The upper bounds are far beyond any model's: they refuse a broken file before it takes memory or time.
Tokens = Annotated[int, whole(1, LONGEST)]
TokenId = Annotated[int, whole(0, LONGEST)]
Vocabulary = Annotated[int, whole(1, 1 << 24)]
Width = Annotated[int, whole(1, 1 << 20)]
Features = Annotated[int, whole(1, 1 << 22)]
Heads = Annotated[int, whole(1, 1 << 14)]
Layers = Annotated[int, whole(1, 2000)]
Layer = Annotated[int, whole(0, 2000)]
Factor = Annotated[float, number(0, 1e6)]
Theta = Annotated[float, number(1, 1e15)]
Epsilon = Annotated[float, number(0, 1)]
# Kinds of rope scaling, and the fields that each needs in addition to its factor.
ROPE_KINDS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("original_max_position_embeddings",),
}


@dataclass(frozen=True, config=STRICT)
class RopeScaling:
    """The scaling of rotary frequencies beyond the pretraining context.

    `linear` divides positions by `factor` (Chen et al. 2023); `llama3` and `yarn` (Peng et al. 2023) blend scaled and
    unscaled frequencies by wavelength. Fields that a kind does not use stay None.
    """

    kind: str  # a key of ROPE_KINDS
    factor: Factor
    original_max_position_embeddings: Tokens | None = None
    low_freq_factor: Factor | None = None  # llama3
    high_freq_factor: Factor | None = None  # llama3
    beta_fast: Factor = 32.0  # yarn
    beta_slow: Factor = 1.0  # yarn
    attention_factor: Factor | None = None  # yarn; None: 0.1 ln(factor) + 1
    truncate: bool = True  # yarn

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise UserError(f"rope scaling {self.kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
        for name in ROPE_KINDS[self.kind]:
            if getattr(self, name) is None:
                raise UserError(f"rope scaling {self.kind} needs {name}")
        if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor:  # type: ignore[operator]
            low = f"low_freq_factor={self.low_freq_factor}"
            raise UserError(f"rope scaling llama3: {low} must be below high_freq_factor")


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """The sizes and switches of one transformer. Defaults are Llama's."""

    is_head = False  # a draft head: see magicdec/heads.py
    vocab_size: Vocabulary
    hidden_size: Width
    intermediate_size: Features
    num_layers: Layers
    num_heads: Heads
    num_kv_heads: Heads
    head_dim: Heads
    max_position_embeddings: Tokens
    rope_theta: Theta = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: Epsilon = 1e-5
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    # Layers with a sliding window see only the last `sliding_window` tokens, their own included.
    sliding_window: Tokens | None = None
    sliding_layers: tuple[Layer, ...] = ()
    eos_token_ids: tuple[TokenId, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise UserError(f"head_dim={self.head_dim} must be even: rotary embeddings turn pairs of features")
        if max(self.sliding_layers, default=0) >= self.num_layers:
            raise UserError(f"sliding layer {max(self.sliding_layers)}: there are {self.num_layers} layers, from 0")

    @property
    def group_size(self) -> int:
        """Return the query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def qkv_inputs(self) -> int:
        """Return the features that queries, keys and values are made of."""
        return self.hidden_size

    @property
    def num_logits(self) -> int:
        """Return the number of tokens that can be proposed or decided."""
        return self.vocab_size

    @property
    def fused_parameters(self) -> int:
        """Return the weights that join hidden states of another model: none."""
        return 0

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
        """Return whether the layers can be divided evenly over `ranks` ranks."""
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
    for config, own, key in ((target, ranks, "hardware"), (draft, draft_ranks, "draft")):
        if config is None:
            return
        if ranks % own:
            raise UserError(f"{key}.tensor_parallel={own}: must divide the target's hardware.tensor_parallel={ranks}")
        if not config.divides(own):
            valid = ", ".join(str(n) for n in range(1, config.num_heads + 1) if config.divides(n))
            raise UserError(
                f"{key}.tensor_parallel={own}: {config.num_heads} query heads, {config.num_kv_heads} KV heads and "
                f"{config.intermediate_size} MLP features cannot be divided so; valid: {valid}"
            )


EosIds = Annotated[TokenId | list[TokenId] | None, must(f"must be a whole number, 0 to {LONGEST:,}, or a list of them")]


@dataclass(frozen=True, config=JSON)
class GenerationConfig:
    """The keys of a `generation_config.json` that are read."""

    eos_token_id: EosIds = None


@dataclass(frozen=True, config=JSON)
class Rope:
    """The keys of transformers 5's `rope_parameters`, or of the older `rope_scaling`, that are read."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Theta | None = None
    partial_rotary_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    factor: Factor | None = None
    original_max_position_embeddings: Tokens | None = None
    low_freq_factor: Factor | None = None
    high_freq_factor: Factor | None = None
    beta_fast: Factor | None = None
    beta_slow: Factor | None = None
    attention_factor: Factor | None = None
    truncate: bool | None = None


@dataclass(frozen=True, kw_only=True, config=JSON)
class HuggingFace(GenerationConfig):
    """The keys of a `config.json` that are read. Null means missing; as a sliding window it means none."""

    vocab_size: Vocabulary
    hidden_size: Width
    intermediate_size: Features
    num_hidden_layers: Layers
    num_attention_heads: Heads
    max_position_embeddings: Tokens
    num_key_value_heads: Heads | None = None
    head_dim: Heads | None = None
    model_type: str | None = None
    hidden_act: str = "silu"
    rms_norm_eps: Epsilon = 1e-6
    rope_theta: Theta | None = None
    rope_parameters: Rope | None = None
    rope_scaling: Rope | None = None
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: Tokens | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    use_sliding_window: bool | None = None
    sliding_window: Tokens | None = DEFAULT_SLIDING_WINDOW
    max_window_layers: Layer | None = None
    layer_types: Annotated[list[str], must("must be a list of texts")] | None = None


def from_hugging_face(plain: Mapping[str, Any], name: str = "config.json") -> ModelConfig:
    """Return the architecture that a `config.json` describes; `name` is what errors call the file.

    Raise UserError for an unsupported family or rope scaling, for missing keys, and for wrong types or sizes.
    """
    config = parse(HuggingFace, plain, where=name)
    try:
        return _model_config(config)
    except ValidationError as error:
        raise refusal(error, where=name) from None
    except UserError as error:
        raise UserError(f"{name}: {error}") from None


def eos_ids(config: GenerationConfig) -> tuple[int, ...]:
    """Return a checkpoint's end-of-sequence tokens as a tuple, empty if it names none."""
    value = config.eos_token_id
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)


def _model_config(config: HuggingFace) -> ModelConfig:
    """Implement `from_hugging_face`, with errors that do not name the file yet."""
    family = config.model_type
    if family is None:
        raise UserError(f"no model_type is given; supported: {', '.join(FAMILIES)}")
    if family not in FAMILIES:
        raise UserError(f"model_type={family!r} is not supported; supported: {', '.join(FAMILIES)}")
    if config.hidden_act != "silu":
        raise UserError(f"hidden_act={config.hidden_act!r} is not supported; supported: silu")
    if config.mlp_bias:
        raise UserError("mlp_bias=true is not supported")
    num_heads = config.num_attention_heads
    bias = family in FAMILIES_WITH_OPTIONAL_BIAS and bool(config.attention_bias)
    theta, scaling = _rope(config)
    window, sliding_layers = _sliding(config, family)
    return ModelConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=config.num_key_value_heads or num_heads,
        head_dim=config.head_dim or (QWEN3_HEAD_DIM if family == "qwen3" else config.hidden_size // num_heads),
        max_position_embeddings=_longest(config, scaling),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=bool(config.tie_word_embeddings),
        output_bias=bias,
        sliding_window=window,
        sliding_layers=sliding_layers,
        eos_token_ids=eos_ids(config),
        **({"qkv_bias": bias} | FAMILIES[family]),
    )


def _sliding(config: HuggingFace, family: str) -> tuple[int | None, tuple[int, ...]]:
    """Return the sliding window and its layers, by the switches that may name a window without using it."""
    layers: Iterable[int] = ()
    if family == "mistral":
        layers = range(config.num_hidden_layers)
    elif family != "llama" and config.use_sliding_window:
        if config.layer_types:
            layers = (i for i, kind in enumerate(config.layer_types) if kind == "sliding_attention")
        else:  # the first max_window_layers attend to everything
            first = DEFAULT_MAX_WINDOW_LAYERS if config.max_window_layers is None else config.max_window_layers
            layers = range(first, config.num_hidden_layers)
    window, found = config.sliding_window, tuple(layers)
    return (window, found) if found and window is not None else (None, ())


def _longest(config: HuggingFace, scaling: RopeScaling | None) -> int:
    """Return the longest sequence that the model is made for: `max_position_embeddings`, or what YaRN's factor gives.

    YaRN checkpoints may keep that key at the original length. Llama 3.2's factor would exceed its trained length.
    """
    longest = config.max_position_embeddings
    if scaling is None or scaling.kind != "yarn":
        return longest
    assert scaling.original_max_position_embeddings is not None, "RopeScaling has checked"
    return max(longest, int(scaling.factor * scaling.original_max_position_embeddings))


def _rope(config: HuggingFace) -> tuple[float, RopeScaling | None]:
    """Return the rotary base and scaling, from transformers 5's `rope_parameters` or the older two keys."""
    rope = config.rope_parameters or config.rope_scaling or Rope()
    theta = rope.rope_theta or config.rope_theta or 10000.0
    if (config.partial_rotary_factor or rope.partial_rotary_factor or 1.0) != 1.0:
        raise UserError("partial_rotary_factor is not supported")
    kind = rope.rope_type or rope.type or "default"
    if kind == "default":
        return theta, None
    if rope.mscale and rope.mscale_all_dim:
        raise UserError("YaRN with mscale is not supported")
    names = [entry.name for entry in fields(RopeScaling)]
    known: dict[str, Any] = {name: value for name in names if (value := getattr(rope, name, None)) is not None}
    if kind in ("llama3", "yarn"):
        original = config.original_max_position_embeddings or rope.original_max_position_embeddings
        known["original_max_position_embeddings"] = original or config.max_position_embeddings
    if kind == "yarn" and "factor" not in known:
        known["factor"] = config.max_position_embeddings / known["original_max_position_embeddings"]
    if "factor" not in known and kind in ROPE_KINDS:
        raise UserError(f"rope scaling {kind} needs factor")
    return theta, RopeScaling(kind=kind, **({"factor": 1.0} | known))
