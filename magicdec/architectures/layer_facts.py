"""The bytes that a pass through a model's layers reads, by kind: matrices of weights, and entries
of earlier tokens. Torch-free.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Literal, TypeVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from magicdec.inputs.rules import STRICT

Number = Annotated[int, Field(ge=0)]
# Of the layers of a model: the first of each stretch of neighbours, and the one behind its last.
Stretches = tuple[tuple[Number, Number], ...]
Bytes = Annotated[float, Field(gt=0)]


def stretches(layers: Iterable[int]) -> Stretches:
    """Return the stretches of these layers, in order."""
    found: list[tuple[int, int]] = []
    for layer in sorted({*layers}):
        if found and found[-1][1] == layer:
            found[-1] = (found[-1][0], layer + 1)
        else:
            found.append((layer, layer + 1))
    return tuple(found)


def overlap(places: Stretches, start: int, end: int) -> Stretches:
    """Return the part of some stretches within [start, end), counted from `start`."""
    parts = ((max(first, start), min(behind, end)) for first, behind in places)
    return tuple((first - start, behind - start) for first, behind in parts if first < behind)


def count(places: Stretches) -> int:
    """Return how many layers some stretches have."""
    return sum(behind - first for first, behind in places)


@dataclass(frozen=True, config=STRICT)
class Matrices:
    """Equal matrices of weights: `number` of them, each of inputs x outputs.

    With `experts`, each of them is one of so many matrices, of which a token takes
    `experts_per_token`.
    """

    name: str
    number: Number
    inputs: Number
    outputs: Number
    experts: Number = 0
    experts_per_token: Number = 0
    # Of an element, scales included, as the checkpoint stores it; None: as all weights are.
    stored_bytes: Bytes | None = None
    places: Stretches = ()  # the layers that have as many of them each; (): not told apart
    in_mlp: bool = False  # of an MLP, not of attention or a state
    is_replicated: bool = False  # each rank has them whole

    @property
    def elements(self) -> int:
        """Return the weights of all of them, all experts included."""
        return self.number * max(1, self.experts) * self.inputs * self.outputs

    def within(self, start: int, end: int) -> "Matrices":
        """Return those of layers [start, end), which are told apart."""
        places = overlap(self.places, start, end)
        number = self.number * count(places) // max(1, count(self.places))
        return replace(self, number=number, places=places)

    def shared_by(self, ranks: int) -> "Matrices":
        """Return one rank's share: the longer side is divided, unless they are replicated."""
        if self.is_replicated:
            return self
        if self.outputs >= self.inputs:
            return replace(self, outputs=-(-self.outputs // ranks))
        return replace(self, inputs=-(-self.inputs // ranks))


@dataclass(frozen=True, config=STRICT)
class TokenMemory:
    """The memory that each of `layers` equal layers keeps of a sequence, and the cost of a read.

    Entries (keys and values, or the latents of both) grow with the sequence up to `window`; states
    have one size. Sparse attention reads `selected` entries, which it chooses by the keys of an
    index, and of those it reads all.
    """

    layers: Number
    query_heads: Number = 0
    heads: Number = 0  # that have entries of their own
    entry: Number = 0  # elements that a token adds
    scores: Number = 0  # multiplications and additions for a query token and an entry, in pairs
    window: Number | None = None
    state_bytes: Number = 0
    index_entry: Number = 0  # elements that a token adds to the index
    index_scores: Number = 0
    selected: Number | None = None
    places: Stretches = ()  # the layers; (): not told apart

    @property
    def grows(self) -> bool:
        """Return whether it grows with any context."""
        return bool(self.entry) and self.window is None

    def kept(self, tokens: float) -> float:
        """Return the entries that are kept of a sequence."""
        return tokens if self.window is None else min(tokens, self.window)

    def within(self, start: int, end: int) -> "TokenMemory":
        """Return that of layers [start, end), which are told apart."""
        places = overlap(self.places, start, end)
        return replace(self, layers=count(places), places=places)

    def read(self, tokens: float) -> float:
        """Return the entries that attention reads of a sequence."""
        kept = self.kept(tokens)
        return kept if self.selected is None else min(kept, self.selected)

    def read_bytes(self, tokens: float, element_bytes: float) -> float:
        """Return the bytes that a decode step reads of a sequence, in all layers."""
        entries = self.entry * self.read(tokens) + self.index_entry * self.kept(tokens)
        return self.layers * (entries * element_bytes + self.state_bytes)

    def stored_bytes(self, tokens: float, element_bytes: float) -> float:
        """Return the bytes that all layers keep of a sequence."""
        entries = (self.entry + self.index_entry) * self.kept(tokens) * element_bytes
        return self.layers * (entries + self.state_bytes)

    def shared_by(self, ranks: int) -> "TokenMemory":
        """Return one rank's share. Each has the whole of latents and of the index, which all heads
        share.
        """
        heads = max(1, self.heads // ranks) if self.heads else 0
        return replace(
            self,
            heads=heads,
            query_heads=self.query_heads // ranks,
            entry=self.entry * heads // max(1, self.heads),
            scores=self.scores // ranks,
            state_bytes=self.state_bytes // ranks,
        )


Facts = TypeVar("Facts", Matrices, TokenMemory)


def within(facts: Iterable[Facts], start: int, end: int) -> tuple[Facts, ...]:
    """Return the facts of layers [start, end), with those that are not told apart by layers as they
    are.
    """
    return tuple(
        each.within(start, end) if each.places else each
        for each in facts
        if not each.places or overlap(each.places, start, end)
    )


@dataclass(frozen=True, config=STRICT)
class Recurrence:
    """The layers with a gated delta rule, and the sizes of their states: the columns that a
    convolution of `conv_width` tokens reads of earlier ones, and a matrix per head.

    `rollback` says how a verification is taken back (magicdec/models/recurrent_states.py).
    """

    layers: tuple[Number, ...]
    conv_features: Number
    conv_width: Number
    heads: Number
    key_dim: Number
    value_dim: Number
    rollback: Literal["keep", "replay"] = "replay"

    def state_bytes(self, element_bytes: float) -> float:
        """Return the bytes of a sequence in all layers; matrices are in fp32."""
        columns = self.conv_features * (self.conv_width - 1) * element_bytes
        matrices = self.heads * self.key_dim * self.value_dim * 4
        return len(self.layers) * (columns + matrices)
