"""The prompts' entries, computed again: what the cache holds must be what the target computes from
the tokens.

The target runs over prompt tokens once more, by PyTorch's operators and attention, without our
kernels. Every token attends to the entries that the cache holds of the tokens before it, and its
own keys and values must be those that the cache holds of it. So an entry that was lost, moved or
overwritten is found where it is, in whichever way the entries behind it were computed. Nothing is
written to the cache.

Two passes, which together take about a thirteenth of the time of a prefill:

- In the first layer entries depend on tokens and positions alone: all of them are compared.
- In all layers, one token of every `stride`. Rows are sampled at different places, so that as many
  rows as a stride has tokens cover every place.

A target with recurrent layers is checked in another way (recurrent_prompts.py).

B rows, T tokens that are computed again, S slots, L layers, K KV heads, H query heads, D head dim,
E hidden size, I strides.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from magicdec.attention.base import Attention
from magicdec.attention.sdpa import attend_by_turns, attend_explicitly
from magicdec.decoding.timers import Stopwatch
from magicdec.engine.decoder import Decoder
from magicdec.engine.entry_error import relative_error
from magicdec.engine.recurrent_prompts import errors_of_rows, rehearse_row
from magicdec.models.kv_cache import KVCache, Place
from magicdec.models.transformer import Transformer

SHARE = 32  # one of so many tokens is computed again in all layers,
FEWEST = 1024  # but at least so many of a batch, which costs little
FIRST_AT_ONCE = 2048  # tokens of a pass through the first layer's projections
AT_ONCE, OF_A_ROW = 512, 64  # tokens of a pass through all layers, and of a row in it
MASK = 1 << 24  # numbers of the mask of a pass; with long prompts a pass has fewer tokens

# The error of an entry as a share of its size, above which it is wrong. Another token's entry
# differs by about 1. What the order of sums changes is smaller: up to 0.00003 in float32 and 0.2 in
# bfloat16 with SmolLM2, whose layers write very large activations for a few tokens; 0.06 with other
# tokens and models.
MAX_ERROR = {torch.float32: 0.01, torch.float16: 0.2, torch.bfloat16: 0.5}


@dataclass(frozen=True)
class PromptCheck:
    """The distance of the prompts' entries from the target's. Those of several batches add up."""

    checked: int = 0  # tokens that were computed again in all layers
    # Tokens with an entry or a last hidden state that is wrong, or follows from wrong ones.
    wrong: int = 0
    max_error: float = 0.0  # largest error of an entry, as a share of its size
    seconds: float = 0.0

    def __add__(self, other: "PromptCheck") -> "PromptCheck":
        return PromptCheck(
            self.checked + other.checked,
            self.wrong + other.wrong,
            max(self.max_error, other.max_error),
            self.seconds + other.seconds,
        )


class PassPart(NamedTuple):
    """A pass over some tokens: their rows, their places (B, T), and a bound of these."""

    rows: slice
    place_BT: Tensor
    end: int


@torch.inference_mode()
def check_prompts(decoder: Decoder, seed: int = 0) -> PromptCheck:
    """Compute entries of the prefilled prompts again, and compare. The seed chooses the tokens."""
    with Stopwatch(decoder.device) as watch:
        compute = errors if decoder.cache.states is None else errors_of_rows
        error_BS, checked_BS = compute(decoder, seed)
        wrong = int((error_BS > MAX_ERROR[decoder.target.dtype]).sum())
        largest = float(error_BS.max())
    return PromptCheck(int(checked_BS.sum()), wrong, largest, watch.seconds)


def errors(decoder: Decoder, seed: int) -> tuple[Tensor, Tensor]:
    """Return the largest error (B, S) of each token, 0 of those that were not compared, and which
    were compared in all layers.
    """
    model = decoder.target.plain()
    tokens_BS = decoder.state.tokens_BS
    last_B1 = decoder.state.prompt_len_B.long()[:, None] - 1
    error_BS = torch.zeros_like(tokens_BS, dtype=torch.float32)
    checked_BS = torch.zeros_like(tokens_BS, dtype=torch.bool)
    for part in _every(last_B1, decoder.state.max_prompt_len):
        error_BS[part.rows].scatter_reduce_(
            1, part.place_BT, first_error_of(decoder, model, part), "amax"
        )
    for part in _sampled(last_B1, decoder.state.max_prompt_len, seed):
        error_BS[part.rows].scatter_reduce_(
            1, part.place_BT, error_of(decoder, model, part), "amax"
        )
        checked_BS[part.rows].scatter_(1, part.place_BT, True)
    return decoder.target.share.largest(error_BS), checked_BS


def first_error_of(decoder: Decoder, model: Transformer, part: PassPart) -> Tensor:
    """Return the error (B, T) of each token of a pass through the first layer's projections."""
    again = Recomputed(decoder.cache, *part)
    model.first_entries(decoder.state.tokens_BS[part.rows].gather(1, part.place_BT), again)
    again.compare(0)
    return again.error_BT


def error_of(decoder: Decoder, model: Transformer, part: PassPart) -> Tensor:
    """Return the largest error (B, T) of each token of a pass through all layers of the plain
    `model`, and where it is the last one, that of its hidden state.
    """
    rows, place_BT, end = part
    again = Recomputed(decoder.cache, rows, place_BT, end)
    hidden_BTE = model(decoder.state.tokens_BS[rows].gather(1, place_BT), again)
    error_BT = relative_error(hidden_BTE, decoder.last_BE[rows, None].expand_as(hidden_BTE))
    again.note(error_BT * (place_BT == decoder.state.prompt_len_B[rows, None] - 1))
    return again.error_BT


def rehearse(decoder: Decoder, longest: int) -> None:
    """Run passes that take as much memory as any over prompts of up to `longest` tokens, to
    estimate that.
    """
    if decoder.cache.states is not None:
        rehearse_row(decoder)
        return
    model = decoder.target.plain()
    last_B1 = decoder.state.prompt_len_B.long()[:, None]
    sizes = (
        (first_error_of, FIRST_AT_ONCE, FIRST_AT_ONCE),
        (error_of, _at_once(longest), OF_A_ROW),
    )
    for compute, at_once, of_a_row in sizes:
        place_BT = last_B1.expand(-1, min(longest, of_a_row))
        part = next(_passes(place_BT, last_B1, 1, at_once, of_a_row))
        compute(decoder, model, part._replace(end=longest))


def _every(last_B1: Tensor, longest: int) -> Iterator[PassPart]:
    """Yield passes over all tokens. Behind a row's end its last one is repeated."""
    every_BS = torch.arange(longest, device=last_B1.device).expand(len(last_B1), -1)
    yield from _passes(every_BS, last_B1, 1, FIRST_AT_ONCE, FIRST_AT_ONCE)


def _sampled(last_B1: Tensor, longest: int, seed: int) -> Iterator[PassPart]:
    """Yield passes over one token of every stride, and over the last ones."""
    num_rows = len(last_B1)
    total = len(last_B1) * longest
    stride = -(-total // max(FEWEST, total // SHARE))
    start_I = torch.arange(0, longest, stride)
    offset_I = torch.randint(stride, start_I.shape, generator=torch.Generator().manual_seed(seed))
    place_BI = start_I + (torch.arange(num_rows)[:, None] + offset_I) % stride
    yield from _passes(place_BI.to(last_B1.device), last_B1, stride, _at_once(longest))
    yield from _passes(last_B1, last_B1, longest, _at_once(longest))


def _at_once(longest: int) -> int:
    return min(AT_ONCE, max(1, MASK // longest))


def _passes(
    place_BT: Tensor, last_B1: Tensor, stride: int, at_once: int, of_a_row: int = OF_A_ROW
) -> Iterator[PassPart]:
    """Yield passes of about `at_once` tokens: of a few rows, so that attention has many tokens of
    each, and in their order, so that it reads few slots.
    """
    place_BT = place_BT.minimum(last_B1)
    num_new = min(of_a_row, at_once, place_BT.shape[1])
    num_rows = at_once // num_new
    for start in range(0, place_BT.shape[1], num_new):
        for first in range(0, len(place_BT), num_rows):
            rows = slice(first, first + num_rows)
            yield PassPart(
                rows, place_BT[rows, start : start + num_new], (start + num_new) * stride
            )


class Recomputed(KVCache):
    """A view of some rows of a cache, for prompt tokens that run again: they attend to its entries,
    and new ones of a layer are kept apart until they are compared.
    """

    def __init__(self, source: KVCache, rows: slice, place_BT: Tensor, end: int):
        """Take the places of the tokens in these rows, all before `end`."""
        num_rows, num_new = place_BT.shape
        super().__init__(
            source.config.layers(0, 1), num_rows, num_new, source.k_LBKSD.dtype, place_BT.device
        )
        self._whole, self._place_BT = source.config, place_BT
        self._k_LBKSD, self._v_LBKSD = (
            source.k_LBKSD[:, rows, :, :end],
            source.v_LBKSD[:, rows, :, :end],
        )
        self.error_BT = torch.zeros(place_BT.shape, device=place_BT.device)

    @override
    def positions_BT(self, num_new: int) -> Tensor:
        return self._place_BT

    @override
    def place(self, layer: int, slots_BT: Tensor) -> Place | None:
        return super().place(0, slots_BT)

    @override
    def plan(self, attention: Attention, num_new: int, dtype: torch.dtype) -> list[Any]:
        """Return the mask (B, 1, T, S) of each layer, which is added: a token sees itself and the
        tokens before it.
        """
        windows = [self._whole.window_of(layer) for layer in range(self._whole.num_layers)]
        masks = {window: self._mask(window).to(dtype) for window in set(windows)}
        return [masks[window] for window in windows]

    def _mask(self, window: int | None) -> Tensor:
        slot_S = torch.arange(self._k_LBKSD.shape[3], device=self._place_BT.device)
        place_B1T1 = self._place_BT[:, None, :, None]
        hidden_B1TS = slot_S > place_B1T1
        if window is not None:
            hidden_B1TS |= slot_S <= place_B1T1 - window
        return torch.zeros(hidden_B1TS.shape, device=slot_S.device).masked_fill_(
            hidden_B1TS, float("-inf")
        )

    @override
    def attend(self, layer: int, q_BTHD: Tensor, attention: Attention, plan: Any) -> Tensor:
        self.compare(layer)
        k_BKSD = self._k_LBKSD[layer]
        v_BKSD = self._v_LBKSD[layer]
        if attention.weighting.is_plain:
            return attend_by_turns(q_BTHD, k_BKSD, v_BKSD, plan)
        mask_B11TS = plan[:, :, None]
        return attend_explicitly(q_BTHD, k_BKSD, v_BKSD, attention.weighting, mask_B11TS)

    def compare(self, layer: int) -> None:
        """Note the error of each token's entries in a layer, given those just computed."""
        index_B1T1 = self._place_BT[:, None, :, None]
        for new_BKTD, stored_BKSD in (
            (self.k_LBKSD[0], self._k_LBKSD[layer]),
            (self.v_LBKSD[0], self._v_LBKSD[layer]),
        ):
            _, K, _, D = stored_BKSD.shape
            stored_BKTD = stored_BKSD.gather(2, index_B1T1.expand(-1, K, -1, D))
            self.note(
                relative_error(*(x.transpose(1, 2).flatten(2) for x in (new_BKTD, stored_BKTD)))
            )

    def note(self, error_BT: Tensor) -> None:
        """Keep the larger error of each token."""
        self.error_BT = self.error_BT.maximum(error_BT)
