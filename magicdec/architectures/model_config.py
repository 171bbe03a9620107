"""The architecture of a decoder-only transformer as one dataclass.

One set of fields covers the Llama, Mistral, Qwen2, Qwen3 and Yi families.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic.dataclasses import dataclass
from typing_extensions import override

from magicdec.architectures.layer_facts import Matrices, Recurrence, TokenMemory
from magicdec.errors import Unsupported, UserError
from magicdec.inputs.rules import LARGEST, STRICT, number, whole

Implementation = Literal["native", "transformers"]  # of a model's forward pass
LONGEST = LARGEST
# The upper bounds are far beyond any model's: they refuse a broken file before it takes memory or
# time.
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

    `linear` divides positions by `factor` (Chen et al. 2023); `llama3` and `yarn` (Peng et al.
    2023) blend scaled and unscaled frequencies by wavelength. Fields that a kind does not use stay
    None.
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
            raise Unsupported(
                f"rope scaling {self.kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}"
            )
        for name in ROPE_KINDS[self.kind]:
            if getattr(self, name) is None:
                raise UserError(f"rope scaling {self.kind} needs {name}")
        if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor:  # type: ignore[operator]
            low = f"low_freq_factor={self.low_freq_factor}"
            raise UserError(f"rope scaling llama3: {low} must be below high_freq_factor")


@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """The sizes and switches of one transformer. Defaults are Llama's."""

    is_head = False  # a draft head: see magicdec/architectures/head_config.py
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
            raise UserError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise UserError(
                f"head_dim={self.head_dim} must be even: rotary embeddings turn pairs of features"
            )
        if max(self.sliding_layers, default=0) >= self.num_layers:
            raise UserError(
                f"sliding layer {max(self.sliding_layers)}: there are {self.num_layers} layers,"
                " from 0"
            )

    @property
    def implementation(self) -> Implementation:
        """Return who runs the model: see modules_config.py for others than ours."""
        return "native"

    @property
    def recurrence(self) -> Recurrence | None:
        """Return the layers that keep states instead of entries; None: there are none."""
        return None

    def of_entries(self) -> "ModelConfig":
        """Return the layers that have entries alone, as a cache has them."""
        return self

    def has_entries(self, layer: int) -> bool:
        """Return whether a layer has entries."""
        return True

    def entry_place(self, layer: int) -> int:
        """Return the place of a layer among those that have entries."""
        return layer

    @property
    def attention_needs(self) -> tuple[str, ...]:
        """Return what attention has beyond softmax(q k / sqrt(D)) v, in words."""
        return ()

    def remarks_on(self, longest: int) -> list[str]:
        """Return sentences that a run of up to `longest` tokens says about its model."""
        return []

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
    def joined_inputs(self) -> int:
        """Return the features that become the input of each layer in a step, besides the residual
        stream: none.
        """
        return 0

    @property
    def fused_parameters(self) -> int:
        """Return the weights that join hidden states of another model: none."""
        return 0

    @property
    def num_fusions(self) -> int:
        """Return how often hidden states are joined: once for all layers."""
        return 1

    @property
    def num_parameters(self) -> int:
        """Return the weights of the whole model, tied embeddings counted once."""
        q = self.num_heads * self.head_dim
        kv = self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * q + 2 * kv)
        biases = self.qkv_bias * (q + 2 * kv) + self.output_bias * self.hidden_size
        norms = 2 * self.hidden_size + self.qk_norm * 2 * self.head_dim
        layer = attention + biases + norms + 3 * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * layer + embeddings + self.hidden_size

    @cached_property
    def matrices(self) -> tuple[Matrices, ...]:
        """Return the weights that a pass through the layers multiplies by."""
        q = self.num_heads * self.head_dim
        kv = self.num_kv_heads * self.head_dim
        layers = self.num_layers
        hidden = self.hidden_size
        ffn = self.intermediate_size
        joins = (Matrices("join", layers, self.joined_inputs, hidden),)
        return (
            *(joins if self.joined_inputs else ()),
            Matrices("qkv", layers, self.qkv_inputs, q + 2 * kv),
            Matrices("output", layers, q, hidden),
            Matrices("gate_up", layers, hidden, 2 * ffn),
            Matrices("down", layers, ffn, hidden),
        )

    @cached_property
    def memories(self) -> tuple[TokenMemory, ...]:
        """Return what the layers keep of earlier tokens, by kind."""
        features = 2 * self.head_dim  # of a key and a value
        return tuple(
            TokenMemory(
                layers,
                self.num_heads,
                self.num_kv_heads,
                entry=self.num_kv_heads * features,
                scores=self.num_heads * features,
                window=window,
            )
            for window, layers in Counter(map(self.window_of, range(self.num_layers))).items()
        )

    @property
    def gated_features(self) -> int:
        """Return the features of all layers that an activation function passes on."""
        return self.num_layers * self.intermediate_size

    def stored_weight_bytes(self, element_bytes: float) -> float:
        """Return the bytes of all weights, which have `element_bytes` each where the checkpoint
        does not say otherwise.
        """
        return self.num_parameters * element_bytes

    def as_predicted(self) -> "ModelConfig":
        """Return the model as serving engines run it, which is what predictions describe."""
        return self if self.is_head else ServedConfig(**self.sizes)

    @property
    def kv_elements_per_token(self) -> int:
        """Return the keys and values that one token of one sequence adds over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def taps_of(self, target: "ModelConfig") -> tuple[int, ...]:
        """Return the hidden states of a target that the model reads, as in models/taps.py: none."""
        return ()

    def kept_bytes(self, num_tokens: int, element_bytes: float) -> float:
        """Return the bytes that all layers keep of a sequence; caches of ours hold every token."""
        return self.kv_elements_per_token * num_tokens * element_bytes

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

    @property
    def sizes(self) -> dict[str, Any]:
        """Return the values of an architecture's own fields, without those that a subclass adds."""
        return {entry.name: getattr(self, entry.name) for entry in fields(ModelConfig)}

    def layers(self, start: int, end: int) -> "ModelConfig":
        """Return the architecture of layers [start, end) alone."""
        sliding = tuple(i - start for i in self.sliding_layers if start <= i < end)
        return replace(self, num_layers=end - start, sliding_layers=sliding)

    def window_of(self, layer: int) -> int | None:
        """Return the sliding window of a layer in tokens, None if it attends to everything."""
        return self.sliding_window if layer in self.sliding_layers else None


@dataclass(frozen=True, config=STRICT)
class ServedConfig(ModelConfig):
    """A transformer of ours as serving engines run it: they free what a window has passed."""

    @override
    def kept_bytes(self, num_tokens: int, element_bytes: float) -> float:
        return sum(memory.stored_bytes(num_tokens, element_bytes) for memory in self.memories)


def mismatches(pairs: dict[str, tuple[int, int]]) -> Iterator[str]:
    """Yield where a draft's sizes are not those of its target, by what they are sizes of."""
    for name, (ours, theirs) in pairs.items():
        if ours != theirs:
            yield f"a {name} of {ours:,} against the target's {theirs:,}"


def check_ranks(
    target: ModelConfig, ranks: int, draft: ModelConfig | None = None, draft_ranks: int = 1
) -> None:
    """Raise UserError, with the valid numbers, if target or draft cannot be divided over their
    ranks.
    """
    for config, divisor, key in ((target, ranks, "hardware"), (draft, draft_ranks, "draft")):
        if config is None:
            return
        if ranks % divisor:
            raise UserError(
                f"{key}.tensor_parallel={divisor}: must divide the target's"
                f" hardware.tensor_parallel={ranks}"
            )
        if not config.divides(divisor):
            valid = ", ".join(str(n) for n in range(1, config.num_heads + 1) if config.divides(n))
            raise UserError(
                f"{key}.tensor_parallel={divisor}: {config.num_heads} query heads,"
                f" {config.num_kv_heads} KV heads and {config.intermediate_size} MLP features"
                f" cannot be divided so; valid: {valid}"
            )
