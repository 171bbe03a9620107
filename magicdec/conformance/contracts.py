"""The contracts of policies and drafts, checked while a batch is decoded: `magicdec check-plugin`
watches them.

The round clamps and masks instead, because a check in it would take time. A slot that does not
exist, or that a row reads twice, then costs acceptance, and nothing else shows it.

L layers, B rows, A active rows, T new tokens, H query heads, K KV heads, S slots, N selected slots,
F fixed slots, D head dim, G = gamma, V vocabulary.
"""

from collections.abc import Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from magicdec.attention.base import Attention
from magicdec.attention.sdpa import SdpaPlan
from magicdec.cache.compact import CompactCache
from magicdec.cache.draft_cache import DraftCache
from magicdec.decoding.state import State
from magicdec.drafts.base import Draft, Proposal
from magicdec.models.kv_cache import KVCache

SHOWN = 4  # values that a message names
NEAR_ONE = 1e-3  # by how much the sum of a distribution may differ
# Kolmogorov's statistic of numbers that are drawn as promised exceeds it once in 10^7 times.
UNLIKELY = 3.0


class Broken(Exception):
    """A policy or a draft does what it must not: the call, and the values."""


class WatchedDraft:
    """A draft whose calls are checked, and those of its caches. They raise Broken.

    With `junk`, the tokens behind the end of every row are overwritten before each proposal.
    """

    def __init__(self, draft: Draft, gamma: int, vocab_size: int):
        """Watch a new draft of at most `gamma` proposals a round, and its caches."""
        self.junk = False
        # Of proposals within their distributions, by row and place.
        self.ranks: dict[tuple[int, int], float] = {}
        self._vocab_size = vocab_size
        self._generator = torch.Generator().manual_seed(0)
        if draft.gamma != gamma:
            raise Broken(f"gamma: it proposes up to {draft.gamma} tokens")
        self._propose, draft.propose = draft.propose, self._proposal  # type: ignore[method-assign]
        for cache in caches_of(draft):
            watch_cache(cache)

    def _proposal(self, state: State, gamma: int) -> Proposal:
        """Return the draft's proposals, once they are checked."""
        if self.junk:
            place_S = torch.arange(state.tokens_BS.shape[1])
            junk_BS = torch.randint(
                self._vocab_size, state.tokens_BS.shape, generator=self._generator
            )
            state.tokens_BS.copy_(
                torch.where(place_S < state.num_tokens_B[:, None], state.tokens_BS, junk_BS)
            )
        proposal = self._propose(state, gamma)
        tokens_BG = proposal.tokens_BG
        size = (len(state.tokens_BS), gamma)
        if tuple(tokens_BG.shape) != size:
            raise Broken(
                f"propose: returns {shown_shape(tokens_BG)} tokens: must be {size[0]} x {gamma}"
            )
        outside_BG = (tokens_BG < 0) | (tokens_BG >= self._vocab_size)
        if outside_BG.any():
            wrong = listed(tokens_BG[outside_BG])
            raise Broken(
                f"propose: returns tokens {wrong}: must be from 0 to {self._vocab_size - 1}"
            )
        if proposal.q_BGV is not None:
            self._check_distributions(proposal.q_BGV, tokens_BG, state)
        return proposal

    def _check_distributions(self, q_BGV: Tensor, tokens_BG: Tensor, state: State) -> None:
        """Check that the distributions are such, and note where in its own each token lies."""
        size = (*tokens_BG.shape, self._vocab_size)
        if tuple(q_BGV.shape) != size:
            raise Broken(
                f"q_BGV: has {shown_shape(q_BGV)} numbers: must be {' x '.join(map(str, size))}"
            )
        rows_A = (~state.finished_B).nonzero()[:, 0]
        q_AGV = q_BGV[rows_A].double()
        tokens_AG = tokens_BG[rows_A]
        sum_AG = q_AGV.sum(-1)
        wrong_AG = (q_AGV < 0).any(-1) | ~((sum_AG - 1).abs() <= NEAR_ONE)
        if wrong_AG.any():
            sums = listed(sum_AG[wrong_AG])
            raise Broken(
                f"q_BGV: holds negative numbers, or sums of {sums}: must be a distribution for each"
                " token"
            )
        q_AG1 = q_AGV.gather(-1, tokens_AG[..., None])
        never_AG = q_AG1[..., 0] == 0
        if never_AG.any():
            raise Broken(
                f"q_BGV: gives no chance to tokens {listed(tokens_AG[never_AG])}, which are"
                " proposed"
            )
        # Where the token lies if likelier ones come first: even in [0, 1) if it was drawn from the
        # distribution.
        likelier_AG = q_AGV.where(q_AGV > q_AG1, 0.0).sum(-1)
        as_likely_AG = q_AGV.where(q_AGV == q_AG1, 0.0).sum(-1)
        rank_AG = likelier_AG + as_likely_AG * torch.rand(
            tokens_AG.shape, generator=self._generator
        )
        places_AG = state.next_positions_BT(tokens_BG.shape[1])[rows_A]
        for row, ranks, places in zip(
            rows_A.tolist(), rank_AG.tolist(), places_AG.tolist(), strict=True
        ):
            for rank, place in zip(ranks, places, strict=True):
                # A draft may draw a place with the same random number in every round.
                self.ranks.setdefault((row, place), rank)


def listed(values: Tensor) -> str:
    """Return the first few different values of a tensor, as words."""
    different = values.unique().tolist()
    more = ["..."] if len(different) > SHOWN else []
    return ", ".join(
        [f"{value:g}" if isinstance(value, float) else str(value) for value in different[:SHOWN]]
        + more
    )


def shown_shape(tensor: Tensor) -> str:
    """Return a shape as in 3 x 2."""
    return " x ".join(map(str, tensor.shape))


def drawn_otherwise(ranks: Sequence[float]) -> bool:
    """Return whether numbers are not drawn evenly from [0, 1), as ranks within a distribution
    are.
    """
    if not ranks:
        return False
    rank_N = torch.tensor(sorted(ranks), dtype=torch.float64)
    even_N = torch.arange(len(rank_N) + 1) / len(rank_N)
    below_N = (rank_N - even_N[:-1]).abs()
    above_N = (even_N[1:] - rank_N).abs()
    furthest = torch.maximum(below_N, above_N).max()
    return float(furthest) * sqrt(len(rank_N)) > UNLIKELY


def caches_of(draft: Draft) -> list[DraftCache]:
    """Return the draft's caches, with those inside other caches and drafts."""
    visited: dict[int, Any] = {}

    def visit(part: Any) -> None:
        if isinstance(part, Draft | KVCache) and id(part) not in visited:
            visited[id(part)] = part
            visit([*vars(part).values()])
        elif isinstance(part, list | tuple):
            for inner in part:
                visit(inner)

    visit(draft)
    return [part for part in visited.values() if isinstance(part, DraftCache)]


def watch_cache(cache: DraftCache) -> None:
    """Check what a cache selects and reads from now on."""
    if cache.observes and cache.settings.selects == "never":
        raise Broken(
            f"selects: it observes {cache.observes} tokens, but its fact `selects` is never:"
            " nothing would be timed"
        )
    if cache.observes != (declared := cache.settings.observed(cache.spec)):
        raise Broken(
            f"observed: returns {declared} of {cache.observes} tokens that it observes: the memory"
            " of drafts that keep their hidden states would be wrong"
        )
    if isinstance(cache, CompactCache):
        _watch_selection(cache)
    attend = cache.attend

    def checked(layer: int, q_BTHD: Tensor, attention: Attention, plan: Any) -> Tensor:
        return attend(layer, q_BTHD, _Reader(attention, cache, layer), plan)  # type: ignore[arg-type]

    cache.attend = checked  # type: ignore[method-assign]


def _watch_selection(cache: CompactCache) -> None:
    """Check how many slots a compact policy selects, and which: `load` clamps both."""
    fixed = cache.fixed_slots(cache.budget)
    select = cache.select
    if not 0 <= fixed < cache.budget:
        most = (
            f"must be from 0 to {cache.budget - 1}, because at least one slot is for recent tokens"
        )
        raise Broken(f"fixed_slots: returns {fixed} of {cache.budget} slots: {most}")

    def checked(layer: int, source: KVCache, scores_LBKS: Tensor | None) -> Tensor:
        selected_BKF = select(layer, source, scores_LBKS)
        heads = cache.config.num_kv_heads
        if selected_BKF.shape not in [(cache.num_rows, k, cache.num_fixed) for k in (1, heads)]:
            sizes = f"{cache.num_rows} x {heads} (or 1) x {cache.num_fixed}"
            raise Broken(f"select: returns {shown_shape(selected_BKF)} slots: must be {sizes}")
        older_B = source.seqlens_B.long() - cache.window
        # Others keep all that they have.
        for row in (source.seqlens_B > cache.budget).nonzero()[:, 0].tolist():
            _check_slots(
                selected_BKF[row],
                int(older_B[row]),
                f"layer {layer} of row {row}",
                "what follows is kept anyway",
            )
        return selected_BKF

    cache.select = checked  # type: ignore[method-assign]


def _check_slots(slot_KN: Tensor, end: int, where: str, why: str) -> None:
    """Check that slots are below `end`, for the reason `why`, and that no KV head has one twice."""
    if (outside_KN := (slot_KN < 0) | (slot_KN >= end)).any():
        slots = f"slots {listed(slot_KN[outside_KN])}"
        raise Broken(f"select: {where} selects {slots}: must be from 0 to {end - 1}: {why}")
    for slot_N in slot_KN:
        slots_N, count_N = slot_N.unique(return_counts=True)
        if (count_N > 1).any():
            raise Broken(
                f"select: {where} selects slots {listed(slots_N[count_N > 1])} more than once"
            )


class _Reader:
    """An attention backend that checks what one layer of a cache has it read."""

    def __init__(self, attention: Attention, cache: DraftCache, layer: int):
        self._attention = attention
        self._cache, self._layer = cache, layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attention, name)

    def attend(
        self,
        q_BTHD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        plan: SdpaPlan,
        indices_BKN: Tensor | None = None,
    ) -> Tensor:
        self._check(q_BTHD, k_BKSD, plan, indices_BKN)
        self._check_reads("selects what it reads", indices_BKN is not None, "indices_BKN")
        return self._attention.attend(q_BTHD, k_BKSD, v_BKSD, plan, indices_BKN)

    def attend_scored(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        self._check_reads("observes the attention", True, "scores_BKS")
        return self._attention.attend_scored(*arguments)

    def attend_coded(
        self, q_BTHD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, plan: SdpaPlan, coded: Any
    ) -> Tensor:
        self._check(q_BTHD, k_BKSD, plan, None)
        return self._attention.attend_coded(q_BTHD, k_BKSD, v_BKSD, plan, coded)

    def _check(
        self, q_BTHD: Tensor, k_BKSD: Tensor, plan: SdpaPlan, indices_BKN: Tensor | None
    ) -> None:
        """Check the entries of this very cache: a part of it may have its own reader."""
        cache, num_new = self._cache, q_BTHD.shape[1]
        if k_BKSD.data_ptr() != cache.k_LBKSD[self._layer].data_ptr():
            return
        read_B, written_B = plan.seqlens_B - num_new, cache.seqlens_B
        where = f"layer {self._layer}"
        if (wrong_B := (read_B < 0) | (read_B > written_B)).any():
            has = f"its rows have {listed(written_B[wrong_B])} valid ones"
            raise Broken(f"seqlens_B: {where} reads {listed(read_B[wrong_B])} slots: {has}")
        if indices_BKN is None:
            self._count(torch.minimum(cache.committed_slots_B, read_B), where)
        else:
            self._check_indices(indices_BKN, k_BKSD, where)

    def _check_reads(self, what: str, does: bool, field: str) -> None:
        """Check what attention does against what `reads` says: a pass in one call relies on it."""
        said = self._cache.reads(self._layer)
        if said is not None and does and getattr(said, field) is None:
            raise Broken(
                f"reads: layer {self._layer} {what}, which {field} does not say: must be None"
            )

    def _check_indices(self, indices_BKN: Tensor, k_BKSD: Tensor, where: str) -> None:
        """Check a dynamic selection, of which the backend ignores what a token may not see."""
        cache = self._cache
        size = k_BKSD.shape[:2]
        if tuple(indices_BKN.shape[:2]) != tuple(size):
            heads = f"must be {' x '.join(map(str, size))} x N, some for each KV head"
            raise Broken(f"select: {where} selects {shown_shape(indices_BKN)} slots: {heads}")
        end_B = cache.length_B + cache.spec.gamma + 1  # of the proposals
        for row, (slot_KN, end) in enumerate(zip(indices_BKN, end_B.tolist(), strict=True)):
            for slot_N in slot_KN:
                _check_slots(
                    slot_N[slot_N >= 0][None], end, f"{where} of row {row}", "nothing is behind"
                )
        committed_BKN = (indices_BKN >= 0) & (indices_BKN < cache.length_B[:, None, None])
        self._count(committed_BKN.sum(-1).amax(-1), where)

    def _count(self, committed_B: Tensor, where: str) -> None:
        """Check the committed entries that are read against those that the facts declare."""
        settings = self._cache.settings
        lengths = self._cache.length_B.tolist()
        for row, (committed, length) in enumerate(zip(committed_B.tolist(), lengths, strict=True)):
            if committed > (declared := settings.tokens_read(length)):
                told = f"its facts (tokens_read) declare {declared:g} of {length}"
                raise Broken(
                    f"budget: {where} of row {row} reads {committed} committed entries: {told}"
                )
