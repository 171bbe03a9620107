"""The architecture of a model that runs as transformers' own modules (magicdec/models/adapter).

Its facts are read from the modules themselves, on PyTorch's meta device. Torch-free.
"""

from dataclasses import fields, replace
from functools import cached_property
from typing import cast

from pydantic.dataclasses import dataclass
from typing_extensions import override

from magicdec.architectures.layer_facts import (
    Matrices,
    Number,
    Recurrence,
    TokenMemory,
    within,
)
from magicdec.architectures.model_config import Implementation, Layer, ModelConfig, Tokens
from magicdec.errors import UserError
from magicdec.inputs.rules import STRICT, Count

# What attention may have beyond softmax(q k / sqrt(D)) v: a logit per head that takes weight and
# adds nothing, and a bound that scores approach.
SINKS, SOFTCAP = "attention sinks", "a soft cap of scores"


@dataclass(frozen=True, config=STRICT)
class MtpFacts:
    """The modules of a checkpoint that predict further tokens: how many, and their weights."""

    modules: Count
    parameters: Number
    expert_parameters: Number = 0
    sliding_layers: tuple[Layer, ...] = ()
    matrices: tuple[Matrices, ...] = ()  # of one module
    memories: tuple[TokenMemory, ...] = ()  # of one module


@dataclass(frozen=True, config=STRICT)
class ModulesConfig(ModelConfig):
    """The sizes of one such model. `num_kv_heads` and `head_dim` are those of its cache's entries.

    `config_json` is its config.json, from which transformers makes the modules.
    """

    model_type: str = ""
    config_json: str = ""
    parameters: Number = 0  # tied ones counted once
    # Of `parameters`: those of routed experts. A token reads `experts_per_token` of `num_experts`.
    expert_parameters: Number = 0
    num_experts: Number = 0
    experts_per_token: Number = 0
    weightings: tuple[str, ...] = ()  # of SINKS and SOFTCAP
    recurrence: Recurrence | None = None
    # With a recurrence: those that have entries. In the sizes of a cache, these are all layers.
    entry_layers: tuple[Layer, ...] = ()
    mtp: MtpFacts | None = None  # not counted in `parameters`
    # Rotary frequencies that depend on the length: above it the long table is taken, see docs.
    long_rope_from: Tokens | None = None
    remarks: tuple[str, ...] = ()  # sentences that a run says about its model
    counted_matrices: tuple[Matrices, ...] = ()
    counted_memories: tuple[TokenMemory, ...] = ()
    refusal: str = ""  # why it cannot run here, though it can be predicted
    compact: bool = False  # entries as the model defines them, without what our caches add

    @property
    @override
    def implementation(self) -> Implementation:
        return "transformers"

    @override
    def of_entries(self) -> "ModulesConfig":
        if self.recurrence is None or len(self.entry_layers) == self.num_layers:
            return self
        sliding = tuple(self.entry_place(layer) for layer in self.sliding_layers)
        return replace(self, num_layers=len(self.entry_layers), sliding_layers=sliding)

    @override
    def has_entries(self, layer: int) -> bool:
        return self.recurrence is None or layer in self.entry_layers

    @override
    def entry_place(self, layer: int) -> int:
        return layer if self.recurrence is None else self.entry_layers.index(layer)

    @override
    def layers(self, start: int, end: int) -> ModelConfig:
        part = replace(
            cast(ModulesConfig, super().layers(start, end)),
            counted_matrices=within(self.counted_matrices, start, end),
            counted_memories=within(self.counted_memories, start, end),
        )
        if self.recurrence is None:
            return part
        if len(self.entry_layers) == self.num_layers:  # in a cache
            return replace(part, recurrence=None, entry_layers=())
        entries = tuple(layer - start for layer in self.entry_layers if start <= layer < end)
        states = tuple(layer - start for layer in self.recurrence.layers if start <= layer < end)
        recurrence = replace(self.recurrence, layers=states) if states else None
        return replace(part, recurrence=recurrence, entry_layers=entries if recurrence else ())

    @property
    @override
    def attention_needs(self) -> tuple[str, ...]:
        return self.weightings

    @property
    @override
    def num_parameters(self) -> int:
        """Return the weights of the whole model."""
        return self.parameters

    @override
    def remarks_on(self, longest: int) -> list[str]:
        lines = list(self.remarks)
        if self.long_rope_from is not None:
            is_long = longest > self.long_rope_from
            lines.append(
                f"its rotary embedding has two tables; all tokens take the"
                f" {'long' if is_long else 'short'} one, because a sequence may have"
                f" {'more' if is_long else 'no more'} than {self.long_rope_from:,}"
            )
        return lines

    @cached_property
    @override
    def matrices(self) -> tuple[Matrices, ...]:
        return self.counted_matrices

    @cached_property
    @override
    def memories(self) -> tuple[TokenMemory, ...]:
        return self.counted_memories

    @property
    @override
    def gated_features(self) -> int:
        # The second matrix of each MLP reads them.
        second = (m for m in self.matrices if m.in_mlp and m.outputs == self.hidden_size)
        return sum(
            matrix.number * matrix.inputs * max(1, matrix.experts_per_token) for matrix in second
        )

    @property
    @override
    def kv_elements_per_token(self) -> int:
        """Return the elements that a token adds over all layers that grow; in caches of ours, all
        layers are padded to the widest.
        """
        if not self.compact:
            layers = self.of_entries().num_layers
            return 2 * layers * self.num_kv_heads * self.head_dim
        grown = (memory for memory in self.memories if memory.entry)
        return sum(memory.layers * (memory.entry + memory.index_entry) for memory in grown)

    @override
    def kept_bytes(self, num_tokens: int, element_bytes: float) -> float:
        """Return the bytes that all layers keep of a sequence; caches of ours hold every token, and
        recurrent states a second time, as they were behind the prompt.
        """
        if not self.compact:
            states = self.recurrence.state_bytes(element_bytes) if self.recurrence else 0.0
            return super().kept_bytes(num_tokens, element_bytes) + 2 * states
        return sum(memory.stored_bytes(num_tokens, element_bytes) for memory in self.memories)

    @override
    def stored_weight_bytes(self, element_bytes: float) -> float:
        stored = [matrix for matrix in self.matrices if matrix.stored_bytes is not None]
        exact = self.num_parameters - sum(matrix.elements for matrix in stored)
        of_stored = sum(matrix.elements * (matrix.stored_bytes or 0.0) for matrix in stored)
        return exact * element_bytes + of_stored

    @override
    def as_predicted(self) -> "ModulesConfig":
        heads = max((memory.heads for memory in self.memories), default=1)
        return replace(self, compact=True, num_kv_heads=heads or 1)

    @override
    def shared_by(self, ranks: int) -> "ModulesConfig":
        shared = super().shared_by(ranks)
        return replace(
            cast(ModulesConfig, shared),
            counted_matrices=tuple(matrix.shared_by(ranks) for matrix in self.matrices),
            counted_memories=tuple(memory.shared_by(ranks) for memory in self.memories),
        )

    def parameters_read(self, num_tokens: int) -> float:
        """Return the weights that a pass over `num_tokens` tokens reads, where every token chooses
        its experts independently of the others and uniformly.
        """
        if not self.num_experts:
            return self.parameters
        unread = (1 - self.experts_per_token / self.num_experts) ** num_tokens
        return self.parameters - unread * self.expert_parameters


@dataclass(frozen=True, config=STRICT)
class MtpModulesConfig(ModulesConfig):
    """The sizes of the modules of a checkpoint that predict further tokens; `num_layers` counts
    them.
    """

    is_head = True

    @classmethod
    def of(cls, target: ModulesConfig) -> "MtpModulesConfig":
        """Return those of a target's checkpoint. Raise UserError if it names none."""
        if target.mtp is None:
            raise UserError(
                "draft=mtp: the target's config.json names no modules that predict further tokens"
                " (num_nextn_predict_layers); choose another target or draft"
            )
        plain = {entry.name: getattr(target, entry.name) for entry in fields(ModulesConfig)}
        plain |= {
            "num_layers": target.mtp.modules,
            "parameters": target.mtp.parameters,
            "expert_parameters": target.mtp.expert_parameters,
            "sliding_layers": target.mtp.sliding_layers,
            "remarks": (),
            "recurrence": None,
            "entry_layers": (),
            "counted_matrices": target.mtp.matrices,
            "counted_memories": target.mtp.memories,
        }
        return cls(**plain)

    @cached_property
    @override
    def matrices(self) -> tuple[Matrices, ...]:
        number = self.num_layers
        return tuple(replace(each, number=number * each.number) for each in self.counted_matrices)

    @cached_property
    @override
    def memories(self) -> tuple[TokenMemory, ...]:
        return tuple(replace(each, layers=self.num_layers) for each in self.counted_memories)

    @override
    def taps_of(self, target: ModelConfig) -> tuple[int, ...]:
        """Return which hidden states of the target are read: what it returns, normalised."""
        return (target.num_layers + 1,)
