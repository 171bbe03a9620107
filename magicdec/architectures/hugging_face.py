"""Read a Hugging Face `config.json` as transformers does, as an architecture, and list the keys
that are not read.

A new family that fits `ModelConfig` needs no code beyond its entry in `FAMILIES`. Torch-free.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass as plain_dataclass
from dataclasses import field, fields
from typing import Annotated, Any

from pydantic import ValidationError
from pydantic.dataclasses import dataclass

from magicdec.architectures.generation_config import GenerationConfig, eos_ids
from magicdec.architectures.model_config import (
    ROPE_KINDS,
    Epsilon,
    Factor,
    Features,
    Heads,
    Layer,
    Layers,
    ModelConfig,
    RopeScaling,
    Theta,
    Tokens,
    Vocabulary,
    Width,
)
from magicdec.architectures.quantized_checkpoints import refusal_of_quantized
from magicdec.errors import Unsupported, UserError
from magicdec.inputs.rules import JSON, SHORT, BadValue, must, parse, refusal


@plain_dataclass(frozen=True)
class Family:
    """The peculiarities of transformers' code of a family."""

    # Of ModelConfig, which no key of the file names.
    switches: Mapping[str, bool] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that the file leaves out
    ignored: tuple[str, ...] = ()  # keys that mean something in other families


WINDOW_SWITCHES = ("use_sliding_window", "max_window_layers", "layer_types")
QWEN_DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
FAMILIES = {
    "llama": Family(ignored=("sliding_window", *WINDOW_SWITCHES)),
    "mistral": Family(
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        ignored=("attention_bias", "mlp_bias", *WINDOW_SWITCHES),
    ),
    "qwen2": Family({"qkv_bias": True}, QWEN_DEFAULTS, ("attention_bias", "mlp_bias")),
    "qwen3": Family({"qk_norm": True}, QWEN_DEFAULTS | {"head_dim": 128}, ("mlp_bias",)),
}
# Keys of which one value alone means what our code does.
SUPPORTED = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "is_causal": True,
    "use_bidirectional_attention": False,
    "use_mrope": False,
    "rope_interleaved": False,
    "partial_rotary_factor": 1.0,
    "per_layer_config": {},
}
# Keys that change no token: of training, of how a file was written, and special tokens that nothing
# here adds.
NEUTRAL = """architectures transformers_version dtype torch_dtype _name_or_path name_or_path _commit_hash
_attn_implementation _attn_implementation_autoset attn_implementation is_llama_config transformers.js_config
attention_dropout hidden_dropout initializer_range gradient_checkpointing use_cache pretraining_tp torchscript
return_dict output_attentions output_hidden_states chunk_size_feed_forward is_encoder_decoder is_decoder
bos_token_id pad_token_id unk_token_id sep_token_id tokenizer_class id2label label2id problem_type"""  # noqa: E501
WITHOUT_EFFECT = frozenset(NEUTRAL.split())
# The keys of `rope_parameters` by its type; each type also takes its name and rope_theta.
ROPE_NAMES = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
YARN_SWITCHES = (
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "truncate",
    "mscale",
    "mscale_all_dim",
)
ROPE_KEYS = {kind: ("factor", *needed) for kind, needed in ROPE_KINDS.items()} | {"default": ()}
ROPE_KEYS["yarn"] += YARN_SWITCHES
DEFAULT_THETA = 10000.0
FULL, SLIDING = "full_attention", "sliding_attention"  # of layer_types


@dataclass(frozen=True, config=JSON)
class Rope:
    """The keys of transformers 5's `rope_parameters`, or of the older `rope_scaling`, that are
    read.
    """

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

    @property
    def given_type(self) -> str:
        """Return the type under its new name, or else under its old one."""
        return self.rope_type or self.type or "default"


@dataclass(frozen=True, kw_only=True, config=JSON)
class HuggingFace(GenerationConfig):
    """The keys of a `config.json` that are read. Null means missing; as a sliding window it means
    none.
    """

    model_type: str
    vocab_size: Vocabulary
    hidden_size: Width
    intermediate_size: Features
    num_hidden_layers: Layers
    num_attention_heads: Heads
    max_position_embeddings: Tokens
    num_key_value_heads: Heads | None = None
    head_dim: Heads | None = None
    rms_norm_eps: Epsilon = 1e-6
    rope_theta: Theta | None = None
    rope_parameters: Rope | None = None
    rope_scaling: Rope | None = None
    original_max_position_embeddings: Tokens | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    use_sliding_window: bool | None = None
    sliding_window: Tokens | None = None
    max_window_layers: Layer = 0
    layer_types: Annotated[list[str], must("must be a list of texts")] | None = None


def from_hugging_face(plain: Mapping[str, Any], name: str = "config.json") -> ModelConfig:
    """Return the architecture that a `config.json` describes; `name` is what errors call the file.

    Raise UserError for an unsupported family, before anything else is read, for values that are not
    supported, for missing keys, and for wrong types or sizes.
    """
    try:
        family = _family(plain)
        if quantized := refusal_of_quantized(plain):
            raise UserError(quantized)
        _check_values(plain, family)
        unread = {*family.ignored, _rope_keys(plain)[1]}
        values = {key: value for key, value in plain.items() if key not in unread}
        config = parse(HuggingFace, {**family.defaults, **values}, where=name)
        return _model_config(config, family)
    except BadValue:  # which names the file
        raise
    except ValidationError as error:
        raise refusal(error, where=name) from None
    except UserError as error:
        raise type(error)(f"{name}: {error}") from None


def unread_keys(plain: Mapping[str, Any], expected: Collection[str] = ()) -> dict[str, Any]:
    """Return the keys of a `config.json` that `from_hugging_face` does not read, with their values.

    Those are left out that are null, that change no token, and that are `expected`. Keys of rotary
    embeddings are named as in rope_scaling.factor.
    """
    family = FAMILIES[plain["model_type"]]
    taken, other = _rope_keys(plain)
    read = {entry.name for entry in fields(HuggingFace)} | {*SUPPORTED, *WITHOUT_EFFECT, *expected}
    unread = {key: value for key, value in plain.items() if key not in read and value is not None}
    unread |= {key: plain[key] for key in family.ignored if plain.get(key)}
    rope = plain.get(taken) or {}
    kind = parse(Rope, rope).given_type
    usual = {*ROPE_NAMES, *ROPE_KEYS[kind]}
    unread |= {
        f"{taken}.{key}": rope[key] for key in rope if key not in usual and rope[key] is not None
    }
    if plain.get(other) and plain[other] != rope:
        unread[other] = plain[other]
    if (theta := plain.get("rope_theta")) is not None and rope.get("rope_theta", theta) != theta:
        unread["rope_theta"] = theta
    if "original_max_position_embeddings" not in ROPE_KEYS[kind]:
        original = plain.get("original_max_position_embeddings")
        unread |= {} if original is None else {"original_max_position_embeddings": original}
    return unread


def _family(plain: Mapping[str, Any]) -> Family:
    """Return the family that a file names; raise UserError for any other than those that are
    supported.
    """
    named = plain.get("model_type")
    supported = ", ".join(FAMILIES)
    if named is None:
        raise UserError(f"no model_type is given; supported: {supported}")
    if not isinstance(named, str):
        raise UserError(f"model_type={SHORT.repr(named)}: must be a text")
    if named not in FAMILIES:
        raise Unsupported(
            f"model_type={SHORT.repr(named)} is not supported; supported: {supported}"
        )
    return FAMILIES[named]


def _check_values(plain: Mapping[str, Any], family: Family) -> None:
    """Raise Unsupported for values that our code does not implement."""
    for key, supported in SUPPORTED.items():
        value = plain.get(key)
        if key not in family.ignored and value is not None and value != supported:
            raise Unsupported(f"{key}={SHORT.repr(value)} is not supported; supported: {supported}")


def _rope_keys(plain: Mapping[str, Any]) -> tuple[str, str]:
    """Return the key that describes rotary embeddings, and the one that is not read, as
    transformers 5 chooses.
    """
    old, new = "rope_scaling", "rope_parameters"
    return (old, new) if plain.get(old) else (new, old)


def _model_config(config: HuggingFace, family: Family) -> ModelConfig:
    """Implement `from_hugging_face`, with errors that do not name the file yet."""
    num_heads = config.num_attention_heads
    theta, scaling = _rope(config)
    window, sliding_layers = _sliding(config)
    switches = {"qkv_bias": bool(config.attention_bias)} | dict(family.switches)
    return ModelConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=config.num_key_value_heads or num_heads,
        head_dim=config.head_dim or config.hidden_size // num_heads,
        max_position_embeddings=_longest(config, scaling),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=bool(config.tie_word_embeddings),
        output_bias=bool(config.attention_bias),
        sliding_window=window,
        sliding_layers=sliding_layers,
        eos_token_ids=eos_ids(config),
        **switches,
    )


def _sliding(config: HuggingFace) -> tuple[int | None, tuple[int, ...]]:
    """Return the sliding window and its layers, by the switches that may name a window without
    using it.
    """
    window, kinds = config.sliding_window, config.layer_types
    count = config.num_hidden_layers
    is_used = window is not None and (
        config.model_type == "mistral" or bool(config.use_sliding_window)
    )
    if kinds is None:  # the first max_window_layers attend to everything
        layers = tuple(range(config.max_window_layers, count)) if is_used else ()
        return (window, layers) if layers else (None, ())
    if len(kinds) != count:
        raise UserError(f"layer_types names {len(kinds)} layers, num_hidden_layers={count}")
    if unknown := sorted({*kinds} - {FULL, SLIDING}):
        raise Unsupported(
            f"layer_types={SHORT.repr(unknown[0])} is not supported; supported: {FULL}, {SLIDING}"
        )
    layers = tuple(place for place, kind in enumerate(kinds) if kind == SLIDING)
    if layers and not is_used:
        raise UserError(
            f"layer_types has {SLIDING}, which needs use_sliding_window=true and a sliding_window"
        )
    return (window, layers) if layers else (None, ())


def _longest(config: HuggingFace, scaling: RopeScaling | None) -> int:
    """Return the longest sequence that the model is made for: `max_position_embeddings`, or what
    YaRN's factor gives.

    YaRN checkpoints may keep that key at the original length. Llama 3.2's factor would exceed its
    trained length.
    """
    longest = config.max_position_embeddings
    if scaling is None or scaling.kind != "yarn":
        return longest
    assert scaling.original_max_position_embeddings is not None, "RopeScaling has checked"
    return max(longest, int(scaling.factor * scaling.original_max_position_embeddings))


def _rope(config: HuggingFace) -> tuple[float, RopeScaling | None]:
    """Return the rotary base and scaling, from the one of the two keys that was taken and the keys
    next to it.
    """
    rope = config.rope_parameters or config.rope_scaling or Rope()
    theta = rope.rope_theta or config.rope_theta or DEFAULT_THETA
    kind = rope.given_type
    if (rope.partial_rotary_factor or 1.0) != 1.0:
        raise Unsupported("partial_rotary_factor is not supported")
    if kind == "default":
        return theta, None
    if rope.mscale and rope.mscale_all_dim:
        raise Unsupported("YaRN with mscale is not supported")
    names = [entry.name for entry in fields(RopeScaling)]
    given = {name: getattr(rope, name, None) for name in names}
    values: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if kind in ("llama3", "yarn"):
        original = config.original_max_position_embeddings or rope.original_max_position_embeddings
        values["original_max_position_embeddings"] = original or config.max_position_embeddings
    if kind == "yarn" and "factor" not in values:
        values["factor"] = (
            config.max_position_embeddings / values["original_max_position_embeddings"]
        )
    if "factor" not in values and kind in ROPE_KINDS:
        raise UserError(f"rope scaling {kind} needs factor")
    return theta, RopeScaling(kind=kind, **({"factor": 1.0} | values))
