"""The KV cache: preallocated, ragged, lengths on the device.

L layers, B rows, K KV heads, S slots, D head dim, T new tokens. Slots [0, seqlens) of a row are
valid; a forward pass appends behind them, a rollback lowers seqlens, and nothing moves. Shapes and
addresses are static, so that a round over a cache can be captured as a graph.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from magicdec.architectures.model_config import ModelConfig
from magicdec.attention.base import Attention, Shape
from magicdec.attention.codes import Coded
from magicdec.models.last_queries import MOST_KEPT, LastQueries
from magicdec.models.recurrent_states import States, new_states
from magicdec.models.row_copies import copy_row, copy_valid


class Place(NamedTuple):
    """The slots of one layer, as plain tensors, because compiled code takes no caches."""

    k_BKSD: Tensor
    v_BKSD: Tensor
    rows_B1: Tensor
    slots_BT: Tensor

    def write(self, k_BTKD: Tensor, v_BTKD: Tensor) -> None:
        """Write T new keys and values of every row."""
        self.k_BKSD[self.rows_B1, :, self.slots_BT] = k_BTKD
        self.v_BKSD[self.rows_B1, :, self.slots_BT] = v_BTKD


class Reads(NamedTuple):
    """The entries that attention over one layer reads, and where it writes the attention that it
    observes.
    """

    # The slots to read, as Attention.attend takes them; None: all.
    indices_BKN: Tensor | None = None
    # Gets the attention that each slot receives, in fp32; None: nobody wants it.
    scores_BKS: Tensor | None = None
    counted_BT: Tensor | None = None  # the new tokens whose attention that is (bool); None: all


class KVCache:
    """Keys and values of every token so far: the target's cache, and the base of every draft's."""

    # Tensors with an entry for every row, and the axis of the rows; a policy adds its own.
    per_row: ClassVar[dict[str, int]] = {"k_LBKSD": 1, "v_LBKSD": 1, "seqlens_B": 0}

    def __init__(
        self,
        config: ModelConfig,
        num_rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str,
        states: States | None = None,
    ):
        """Allocate `capacity` slots for each of `num_rows` rows, in the layers that have entries.

        `states` are those of recurrent layers: by default new ones where the model has such layers.
        """
        self.config = config = config.of_entries()
        shape = (config.num_layers, num_rows, config.num_kv_heads, capacity, config.head_dim)
        self.k_LBKSD = torch.zeros(shape, dtype=dtype, device=device)
        self.v_LBKSD = torch.zeros(shape, dtype=dtype, device=device)
        self.seqlens_B = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.resting_B: Tensor | None = None  # rows whose output nobody reads: see `resting`
        # How many of a pass's new tokens each row has, the others being padding; None: all.
        self.count_B: Tensor | None = None
        # How many of each row's last tokens a prefill keeps the queries of, and those that the
        # latest prefill kept.
        self.num_queries = 0
        self.last_queries: LastQueries | None = None
        self._rows_B1 = torch.arange(num_rows, device=device)[:, None]
        if states is None and config.recurrence is not None:
            states = new_states(config.recurrence, num_rows, dtype, device)
        self.states = states

    def view(self, start: int, end: int) -> "KVCache":
        """Return a cache of layers [start, end), of those with entries, that shares their entries,
        the lengths and all recurrent states.
        """
        part = KVCache(
            self.config.layers(start, end),
            self.num_rows,
            0,
            self.k_LBKSD.dtype,
            self.k_LBKSD.device,
            self.states,
        )
        part.k_LBKSD = self.k_LBKSD[start:end]
        part.v_LBKSD = self.v_LBKSD[start:end]
        part.seqlens_B, part.resting_B = self.seqlens_B, self.resting_B
        return part

    def keep_queries(self, num_tokens: int) -> None:
        """Let a prefill keep the queries of each row's last `num_tokens` tokens, unless these are
        too many.
        """
        if num_tokens <= MOST_KEPT:
            self.num_queries = max(self.num_queries, num_tokens)

    def queries_for(self, attention: Attention, lengths_B: Tensor) -> LastQueries | None:
        """Return where a prefill of so many tokens a row keeps queries; None if nobody asked."""
        if not self.num_queries:
            return None
        if self.lacks_queries:
            self.last_queries = LastQueries(
                self.k_LBKSD, self.config.num_heads, self.num_queries, attention
            )
        assert self.last_queries is not None
        self.last_queries.begin(lengths_B)
        return self.last_queries

    @property
    def keeps_queries(self) -> bool:
        """Return whether this is a pass of a prefill that keeps queries."""
        return self.last_queries is not None and self.last_queries.is_open

    @property
    def lacks_queries(self) -> bool:
        """Return whether the last prefill has kept fewer queries than were asked for since."""
        kept = 0 if self.last_queries is None else self.last_queries.num_tokens
        return kept < self.num_queries

    def resized(self, capacity: int) -> "KVCache":
        """Return a copy with `capacity` slots a row, which may be fewer: valid ones must not be
        left out. Recurrent states are shared, not copied.
        """
        other = KVCache(
            self.config,
            self.num_rows,
            capacity,
            self.k_LBKSD.dtype,
            self.k_LBKSD.device,
            self.states,
        )
        kept = min(capacity, self.capacity)
        other.k_LBKSD[..., :kept, :] = self.k_LBKSD[..., :kept, :]
        other.v_LBKSD[..., :kept, :] = self.v_LBKSD[..., :kept, :]
        other.seqlens_B.copy_(self.seqlens_B)
        other.num_queries, other.last_queries = self.num_queries, self.last_queries
        return other

    def copy_row(self, row: int, source: "KVCache") -> None:
        """Copy the only row of another such cache to a row, as for a request that was prefilled by
        itself.
        """
        copy_row(self, source, row, apart=("k_LBKSD", "v_LBKSD"))
        copy_valid(self.k_LBKSD, source.k_LBKSD, row, source.seqlens_B)
        copy_valid(self.v_LBKSD, source.v_LBKSD, row, source.seqlens_B)
        if self.states is not None:
            copy_row(self.states, source.states, row)

    def clear_row(self, row: int) -> None:
        """Empty a row, so that it reads next to nothing."""
        self.seqlens_B[row : row + 1] = 0

    def clear_entries(self) -> None:
        """Set the entries of all slots to 0: some of them may not be finite, and attention
        multiplies what it does not see by 0.
        """
        self.k_LBKSD.zero_()
        self.v_LBKSD.zero_()

    @property
    def capacity(self) -> int:
        """The number of slots of a row."""
        return self.k_LBKSD.shape[3]

    @property
    def num_rows(self) -> int:
        """The number of rows of the batch."""
        return self.k_LBKSD.shape[1]

    @property
    def num_bytes(self) -> int:
        """The bytes of keys, values, recurrent states and all else in `per_row` but lengths."""
        tensors = (getattr(self, name) for name in self.per_row)
        of_states = 0 if self.states is None else self.states.num_bytes
        return of_states + sum(x.nbytes for x in tensors if x is not None and x.dim() > 1)

    def slots_BT(self, num_new: int) -> Tensor:
        """Return the slots that the next `num_new` tokens go to (int64)."""
        return self.seqlens_B[:, None] + torch.arange(num_new, device=self.seqlens_B.device)

    def positions_BT(self, num_new: int) -> Tensor:
        """Return the positions in the sequence of the next `num_new` tokens (int64)."""
        return self.slots_BT(num_new)

    def first_seen_B(self, layer: int, position_B: Tensor) -> Tensor:
        """Return the first position that a token at `position_B` sees in a layer; 0 or less: it
        sees all.
        """
        window = self.config.window_of(layer)
        return torch.zeros_like(position_B) if window is None else position_B + 1 - window

    def place(self, layer: int, slots_BT: Tensor) -> Place | None:
        """Return where to write one layer's new keys and values; None if they are there already.

        `advance` follows once all layers have written.
        """
        return Place(self.k_LBKSD[layer], self.v_LBKSD[layer], self._rows_B1, slots_BT)

    def read_B(self, num_new: int) -> Tensor:
        """Return how many slots of each row a pass of `num_new` tokens reads; of a resting row the
        fewest.
        """
        valid_B = self.seqlens_B + num_new
        return valid_B if self.resting_B is None else torch.where(self.resting_B, num_new, valid_B)

    def plan(self, attention: Attention, num_new: int, dtype: torch.dtype) -> list[Any]:
        """Return each layer's plan for a forward pass of `num_new` tokens."""
        shape = Shape(num_new, self.capacity, self.config.group_size, dtype)
        windows = [self.config.window_of(i) for i in range(self.config.num_layers)]
        plans = {
            window: attention.plan(self.read_B(num_new), shape, window) for window in set(windows)
        }
        return [plans[window] for window in windows]

    def coded(self, layer: int) -> Coded | None:
        """Return a layer's entries as codes, where the cache has them."""
        return None

    def reads(self, layer: int) -> Reads | None:
        """Return what `attend` reads of a layer, known before the pass: here all of it.

        A cache with an `attend` of its own says so here, too: None if that depends on the queries,
        or does more than read.
        """
        return Reads()

    def attend(self, layer: int, q_BTHD: Tensor, attention: Attention, plan: Any) -> Tensor:
        """Return attention of the T appended tokens over one layer; a policy that selects or
        observes does so here.
        """
        if self.last_queries is not None:
            self.last_queries.keep(layer, q_BTHD, attention)
        coded = self.coded(layer)
        if coded is not None:
            return attention.attend_coded(
                q_BTHD, self.k_LBKSD[layer], self.v_LBKSD[layer], plan, coded
            )
        return attention.attend(q_BTHD, self.k_LBKSD[layer], self.v_LBKSD[layer], plan)

    def advance(self, num_new: int) -> None:
        """Count `num_new` appended tokens of every row as valid."""
        self.seqlens_B += num_new
        if self.states is not None:
            self.states.end_pass()

    def empty(self) -> None:
        """Empty all rows."""
        self.seqlens_B.zero_()
        if self.states is not None:
            self.states.clear()

    def mark(self, lengths_B: Tensor) -> None:
        """Drop everything behind the prompts, of `lengths_B` tokens. `rollback` returns there."""
        self.seqlens_B.copy_(lengths_B)
        if self.states is not None:
            self.states.mark()

    def rollback(self, lengths_B: Tensor) -> None:
        """Drop everything behind the first `lengths_B` tokens of each row. Recurrent states return
        to where `mark` was called: `lengths_B` must be the lengths there. Raise RuntimeError for
        states that were never marked.
        """
        self.seqlens_B.copy_(lengths_B)
        if self.states is not None:
            self.states.return_to_mark()

    def forget_passes(self) -> None:
        """Free what recurrent states have noted for rounds that are over."""
        if self.states is not None:
            self.states.forget_passes()

    def commit(self, num_appended: int, count_B: Tensor) -> None:
        """Keep the first `count_B` of the last `num_appended` tokens appended to every row."""
        self.seqlens_B += count_B - num_appended
        if self.states is not None:
            self.states.commit(num_appended, count_B)

    def simulate(self) -> None:
        """Fill it with random entries and states, for timing only."""
        self.k_LBKSD.normal_()
        self.v_LBKSD.normal_()
        if self.states is not None:
            self.states.simulate()

    def follow(self, target: "KVCache") -> None:
        """Begin the next pass with the recurrent states of another cache, which stay as they
        are.
        """
        if self.states is not None:
            self.states.source = target.states

    def tentative(self) -> AbstractContextManager[None]:
        """Return a context for a pass of which a `commit` keeps a part."""
        return nullcontext() if self.states is None else self.states.tentative()


@contextmanager
def resting(rows_B: Tensor, *caches: KVCache) -> Iterator[None]:
    """Read next to nothing of these rows (bool), which have finished. Their entries stay as they
    are.
    """
    for cache in caches:
        cache.resting_B = rows_B
    try:
        yield
    finally:
        for cache in caches:
            cache.resting_B = None
