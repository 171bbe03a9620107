"""The architecture of a draft head in the manner of EAGLE-3 (Li et al. 2025, arXiv 2503.01840),
from its config.json.

A head is one decoder layer over the target's own hidden states. Two layouts are read: that of
EAGLE's authors, and that of the speculators library. Torch-free.
"""

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic.dataclasses import dataclass
from typing_extensions import override

from magicdec.architectures.hugging_face import WITHOUT_EFFECT, from_hugging_face, unread_keys
from magicdec.architectures.model_config import Layer, ModelConfig, Vocabulary, Width, mismatches
from magicdec.errors import UserError
from magicdec.inputs.rules import JSON, STRICT, must, parse

NUM_TAPS = 3  # hidden states of the target that a head reads by default
USUAL_VOCABULARY = 32_000  # of published heads
FAMILIES = ("llama", "qwen3")  # whose layers heads are made of
PREFIXES = ("layers.0.", "midlayer.")  # speculators', and that of EAGLE's authors
Norms = Literal["none", "joint", "each"]


@dataclass(frozen=True, config=STRICT)
class HeadConfig(ModelConfig):
    """The sizes and switches of one head. `vocab_size` is the target's; a head proposes
    `draft_vocab_size` of these.
    """

    is_head = True
    draft_vocab_size: Vocabulary = 1
    target_hidden_size: Width = 1
    # The target's layers in front of which its hidden states are read, 0 to num_layers; empty: see
    # `taps_of`.
    taps: tuple[Layer, ...] = ()
    norm_before_residual: bool = False
    input_norms: Norms = "none"  # of the target's hidden states: one over all of them, one for each
    norm_output: bool = False  # the next step reads the normalised output
    own_embedding: bool = False  # otherwise the target's
    own_head: bool = True  # otherwise the target's
    maps_vocabulary: bool = True  # draft tokens have ids of their own
    layer_prefix: str = PREFIXES[0]  # of the layer's tensors in the checkpoint

    @property
    def num_taps(self) -> int:
        """Return how many hidden states of the target the head reads."""
        return len(self.taps) or NUM_TAPS

    @override
    def taps_of(self, target: ModelConfig) -> tuple[int, ...]:
        """Return the target's layers that are read: by default an early, the middle and a late one,
        as EAGLE-3 has.
        """
        last = target.num_layers
        return self.taps or (min(2, last), last // 2, max(0, last - 3))

    @property
    @override
    def qkv_inputs(self) -> int:
        """Return the features that queries, keys and values are made of: an embedding and a hidden
        state.
        """
        return 2 * self.hidden_size

    @property
    @override
    def num_logits(self) -> int:
        """Return the number of tokens that can be proposed."""
        return self.draft_vocab_size

    @property
    @override
    def fused_parameters(self) -> int:
        """Return the weights that make one hidden state of those of the target."""
        return self.num_taps * self.target_hidden_size * self.hidden_size

    @property
    @override
    def num_parameters(self) -> int:
        """Return the head's own weights."""
        q = self.num_heads * self.head_dim
        kv = self.num_kv_heads * self.head_dim
        attention = self.qkv_inputs * (q + 2 * kv) + q * self.hidden_size
        biases = self.qkv_bias * (q + 2 * kv) + self.output_bias * self.hidden_size
        input_norms = self.input_norms != "none" and self.num_taps * self.target_hidden_size
        norms = 4 * self.hidden_size + self.qk_norm * 2 * self.head_dim + input_norms
        vocabulary = self.own_embedding * self.vocab_size + self.own_head * self.draft_vocab_size
        mlp = 3 * self.hidden_size * self.intermediate_size
        return (
            attention + biases + norms + mlp + self.fused_parameters + vocabulary * self.hidden_size
        )

    @classmethod
    def like(cls, target: ModelConfig) -> "HeadConfig":
        """Return the usual head of a target: a layer of its sizes."""
        plain = target.sizes
        plain |= {
            "num_layers": 1,
            "sliding_layers": (),
            "sliding_window": None,
            "qk_norm": False,
            "qkv_bias": False,
        }
        vocabulary = min(USUAL_VOCABULARY, target.vocab_size)
        return cls(**plain, draft_vocab_size=vocabulary, target_hidden_size=target.hidden_size)

    def check(self, target: ModelConfig) -> None:
        """Raise UserError for a head that was made for another target."""
        sizes = {
            "hidden size": (self.target_hidden_size, target.hidden_size),
            "vocabulary": (self.vocab_size, target.vocab_size),
        }
        wrong = list(mismatches(sizes))
        if max(self.taps, default=0) > target.num_layers:
            wrong.append(f"layer {max(self.taps)} of {target.num_layers}")
        if self.hidden_size != target.hidden_size and not self.own_embedding:
            wrong.append(f"a width of {self.hidden_size:,} without an embedding of its own")
        if wrong:
            raise UserError(
                f"draft.model: the head was made for another target: {wrong[0]}; set"
                " draft.model.path to one for this target, or to null in predictions"
            )


LAYER = "transformer_layer_config"  # speculators' key of what else is next to the head's own keys
# Keys of speculators that name the target, the training and the code that wrote the file.
BOOKKEEPING = (
    "speculators_model_type",
    "speculators_version",
    "speculators_config",
    "auto_map",
    "embed_requires_grad",
)

Layers = Annotated[list[Layer] | None, must("must be a list of layers")]


@dataclass(frozen=True, kw_only=True, config=JSON)
class EagleConfig:
    """The keys of EAGLE-3's `eagle_config`, of SGLang's and vLLM's heads, that are read."""

    eagle_aux_hidden_state_layer_ids: Layers = None
    use_aux_hidden_state: bool | None = None


@dataclass(frozen=True, kw_only=True, config=JSON)
class HeadFile:
    """The keys of a head's config.json that are read, besides those of its layer."""

    transformer_layer_config: dict[str, Any] | None = None  # null: as if it were missing
    draft_vocab_size: Vocabulary | None = None
    target_hidden_size: Width | None = None
    eagle_aux_hidden_state_layer_ids: Layers = None
    eagle_config: EagleConfig | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


def layer_of(plain: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of a head's layer: an object of their own, or next to the head's."""
    layer: Mapping[str, Any] | None = plain.get(LAYER)
    return plain if layer is None else layer


def head_from(
    plain: Mapping[str, Any], tensors: Mapping[str, Any] | None, name: str = "config.json"
) -> HeadConfig:
    """Return the head that a config.json describes; `name` is what errors call the file.

    `tensors` are those of the checkpoint: they say which weights are the target's. None: they are
    not known.
    """
    kind = plain.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise UserError(
            f"{name}: speculators_model_type={kind!r} is not supported; supported: eagle3, mtp"
        )
    file = parse(HeadFile, plain, where=name)
    layer = layer_of(plain)
    model = from_hugging_face(dict(layer) | {"tie_word_embeddings": False}, name)
    if layer.get("model_type") not in FAMILIES or model.num_layers != 1:
        raise UserError(
            f"{name}: a head of {model.num_layers} layers of {layer.get('model_type')} is not"
            " supported"
        )
    nested = file.eagle_config or EagleConfig()
    if nested.use_aux_hidden_state is False:
        raise UserError(
            f"{name}: use_aux_hidden_state=false is not supported: EAGLE-3 reads hidden states of"
            " layers"
        )
    taps = file.eagle_aux_hidden_state_layer_ids or nested.eagle_aux_hidden_state_layer_ids
    has = tensors if tensors is not None else {"lm_head.weight": None, "d2t": None}

    vocabulary = file.draft_vocab_size or model.vocab_size
    if vocabulary < model.vocab_size and (missing := {"d2t", "lm_head.weight"} - {*has}):
        raise UserError(
            f"{name}: draft_vocab_size={vocabulary} of {model.vocab_size} needs d2t and"
            f" lm_head.weight, and {min(missing)} is missing; download the head again"
        )

    def begins(prefix: str) -> bool:
        return any(name.startswith(prefix) for name in has)

    return HeadConfig(
        **model.sizes,
        draft_vocab_size=vocabulary,
        target_hidden_size=file.target_hidden_size or model.hidden_size,
        taps=tuple(taps or ()),
        norm_before_residual=file.norm_before_residual,
        input_norms=_input_norms(file),
        norm_output=file.norm_output,
        own_embedding="embed_tokens.weight" in has,
        own_head="lm_head.weight" in has,
        maps_vocabulary="d2t" in has,
        layer_prefix=next(filter(begins, PREFIXES), PREFIXES[0]),
    )


def _input_norms(file: HeadFile) -> Literal["none", "joint", "each"]:
    if file.norm_before_fc:
        return "joint"
    return "each" if file.fc_norm else "none"


def unread_keys_around(plain: Mapping[str, Any], read: Collection[str]) -> dict[str, Any]:
    """Return the keys of a layer, and of the object around it where it has one of its own, that
    nobody reads. `read` are those that are read of either.
    """
    layer = layer_of(plain)
    unread = unread_keys(layer, expected=read)
    if layer is not plain:
        usual = {*read, *WITHOUT_EFFECT, "model_type", "tie_word_embeddings"}
        unread |= {
            key: value for key, value in plain.items() if key not in usual and value is not None
        }
    return unread


def unread_keys_of_head(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a head's config.json that `head_from` does not read, with their values."""
    nested = plain.get("eagle_config") or {}
    unread = unread_keys_around(plain, {entry.name for entry in fields(HeadFile)} | {*BOOKKEEPING})
    read_nested = {entry.name for entry in fields(EagleConfig)}
    return unread | {
        f"eagle_config.{key}": value for key, value in nested.items() if key not in read_nested
    }
