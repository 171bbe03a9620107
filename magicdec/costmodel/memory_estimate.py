"""The memory of a run or a prediction: weights and caches from their sizes, without allocating or
loading anything.

The rest, mostly activations, is found by a dry run of the model (magicdec/measure/footprint.py).
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from magicdec.architectures.model_config import ModelConfig
from magicdec.config.choices import CacheSpec
from magicdec.config.registry import POLICIES
from magicdec.costmodel.roofline import layer_weights
from magicdec.costmodel.round import Setup


@dataclass(frozen=True)
class Memory:
    """Bytes that the fullest device holds.

    `transient` is the most that is held in addition to weights and caches at any time. A prediction
    counts in it only the cache through which an independent draft prefills.
    """

    target_weights: float
    target_kv: float
    draft_weights: float
    draft_kv: float
    transient: float
    # What rounds hold of `transient`: once they are captured, a graph keeps that memory.
    captured: float = 0.0

    @property
    def weights(self) -> float:
        """Return the bytes of all weights."""
        return self.target_weights + self.draft_weights

    @property
    def total(self) -> float:
        """Return the peak."""
        return self.weights + self.target_kv + self.draft_kv + self.transient

    @property
    def needed(self) -> float:
        """Return the memory that must be free."""
        return self.total + self.captured


def memory(setup: Setup, gamma: int, generate_len: int = 0, gammas: Collection[int] = ()) -> Memory:
    """Return the memory while `generate_len` tokens are generated with at most `gamma` proposals a
    round. `gammas` are those whose recurrent states are held at the same time; empty: `gamma`
    alone.
    """
    draft, rows = setup.draft, setup.batch
    size = setup.element_bytes
    target = setup.target.shared_by(setup.ranks)
    length = setup.context + generate_len
    draft_weights = draft_kv = transient = 0.0
    if draft.needs_model or draft.quantization != "none":
        in_layers = layer_weights(setup.draft_model)
        draft_weights = in_layers * setup.draft_weight_bytes
        if draft.needs_model:  # otherwise the rest is the target's own
            draft_weights += (setup.draft_model.num_parameters - in_layers) * setup.weight_bytes
    draft_kv += rows * _copied_states(setup, gammas or (gamma,))
    for spec, model, shares_target in _draft_caches(setup, gamma, length):
        model = model.shared_by(setup.draft_ranks)
        draft_kv += rows * spec.stored_bytes(model, size, shares_target)
        if spec.cache is setup.cache:
            draft_kv += rows * draft.heard_bytes(spec, model, gamma, size)
        if not shares_target:
            transient += rows * _prefill_bytes(spec, model, size, setup.prefill_chunk)
    return Memory(
        target_weights=setup.target.stored_weight_bytes(setup.weight_bytes) / setup.ranks,
        target_kv=rows * target.kept_bytes(length + gamma + draft.extra_tokens + 1, size),
        draft_weights=draft_weights / setup.draft_ranks,
        draft_kv=draft_kv,
        transient=transient,
    )


def _copied_states(setup: Setup, gammas: Collection[int]) -> float:
    """Return the bytes of recurrent states that speculation keeps of a row in addition to the
    target's: one after each token of a verification of every gamma, because any of them may be the
    last accepted, and one of the draft's own.
    """

    def states(model: ModelConfig, ranks: int) -> float:
        memories = model.shared_by(ranks).memories
        return sum(memory.layers * memory.state_bytes for memory in memories)

    own = states(setup.draft_model, setup.draft_ranks) if setup.draft.is_model else 0.0
    return sum(gamma + 1 for gamma in gammas) * states(setup.target, setup.ranks) + own


def _draft_caches(
    setup: Setup, gamma: int, max_len: int
) -> Iterator[tuple[CacheSpec, ModelConfig, bool]]:
    """Yield the draft's caches, each with its model and whether its entries are chosen from the
    target's own.
    """
    draft = setup.draft
    for key, cache in draft.caches(setup.cache).items():
        is_own = draft.needs_model and key == draft.own_cache_key
        model = setup.target if draft.needs_model and not is_own else setup.draft_model
        slots = draft.round_slots(gamma) if is_own else gamma + draft.extra_tokens + 1
        if draft.keeps_entries:
            yield CacheSpec(POLICIES["full"].facts(), slots - 1, max_len), model, False
        is_longer = max_len > model.max_position_embeddings
        shares = draft.keeps_entries or not is_own
        yield CacheSpec(cache, slots - 1, max_len, is_longer), model, shares


def _prefill_bytes(spec: CacheSpec, model: ModelConfig, element_bytes: float, chunk: int) -> float:
    """Return the bytes that an independent draft holds during prefill in addition to its cache.

    A policy that bounds positions prefills through another cache of its own kind, with room for a
    chunk in the place of proposals, the other compact ones through one of every entry.
    """
    if not spec.cache.compact:
        return 0.0
    if spec.cache.bounds_positions:
        if spec.in_cache_positions:
            chunk = min(chunk, model.max_position_embeddings - spec.cache.budget)
        with_chunk = replace(spec, gamma=chunk - 1)
        return with_chunk.stored_bytes(model, element_bytes, shares_target=False)
    return model.kv_elements_per_token * spec.capacity * element_bytes
