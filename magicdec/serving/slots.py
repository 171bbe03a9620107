"""Slots: a fixed number of rows on one target and one draft, each held by one request at a time.

A new request allocates no slot: it is prefilled in a batch of its own with a single row, between
whose chunks the slots go on decoding, and that row is then copied into a free slot. So a round is
one captured step over static buffers. An independent draft over a policy that copies its entries
allocates a cache for the time of its prefill.

B slots, T tokens of a round.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from magicdec.config.registry import check_served
from magicdec.decoding.state import NEVER, State
from magicdec.engine.decoder import Decoder
from magicdec.engine.graphs import Step, phase_at
from magicdec.engine.native import NativeEngine
from magicdec.errors import UserError
from magicdec.models.row_copies import copy_row
from magicdec.serving.request import Params
from magicdec.verification.accept import Verdict
from magicdec.verification.sampling import RowSampling, Sampling


class Abandoned(Exception):
    """A prefill was stopped by its `progress` callback: the request was cancelled, or the callback
    has failed.
    """


class SlotState(State):
    """Rows that begin empty, each with its own gamma and end-of-sequence tokens."""

    per_row: ClassVar[dict[str, int]] = {
        **dict.fromkeys(("tokens_BS", "prompt_len_B", "limit_B", "num_tokens_B", "finished_B"), 0),
        "bad_WB": 1,
    }

    def __init__(
        self,
        num_slots: int,
        max_len: int,
        slack: int,
        gamma: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device | str,
    ):
        """Allocate empty rows; `slack` is that of State."""
        super().__init__([[0]] * num_slots, max_len - 1, slack, (), device)
        self.finished_B.fill_(True)
        # Only the last round's counters are kept.
        self.accepted_RB, self.committed_RB = (
            self.accepted_RB[:1].clone(),
            self.committed_RB[:1].clone(),
        )
        self.gamma_B = torch.full_like(self.num_tokens_B, gamma)
        self._eos = torch.tensor(eos_token_ids, dtype=torch.int64, device=device)
        self.eos = self._eos.repeat(num_slots, 1, 1)  # (B, 1, E)

    def seat(self, row: int, state: State, gamma: int, ignore_eos: bool) -> None:
        """Copy the only row of another state into this row."""
        copy_row(self, state, row)
        # A slice is filled; a single element would wait for a copy from the host.
        self.gamma_B[row : row + 1] = gamma
        self.eos[row] = -1 if ignore_eos else self._eos

    @override
    def commit(self, verdict: Verdict) -> Tensor:
        """Commit a round; at most the row's gamma proposals count.

        The next proposal replaces the bonus token: it is the same when greedy, and has its
        distribution when sampling.
        """
        num_accepted_B = torch.minimum(verdict.num_accepted_B, self.gamma_B)
        count_B = super().commit(Verdict(num_accepted_B, verdict.tokens_BT))
        self.round_1.zero_()
        return count_B


class Slots:
    """The decoder as the scheduler uses it: prefill, seat, step, release."""

    # With other processes, which would wait forever after a failure here.
    is_shared: ClassVar[bool] = False

    def __init__(self, engine: NativeEngine, num_slots: int, max_len: int):
        """Allocate slots for `max_len` tokens each, prompt and continuation. Raise UserError for a
        draft that cannot be served.
        """
        check_served(engine.draft)
        self.engine, self.gamma = engine, engine.gamma
        self.num_slots, self.max_len = num_slots, max_len
        self.gammas = self._gammas()
        self.eos_token_ids = engine.target.config.eos_token_ids
        self.device = engine.target.embed.weight.device
        sizes = (max_len, engine.slack, self.gamma, self.eos_token_ids, self.device)
        self.state = SlotState(num_slots, *sizes)
        single = SlotState(1, *sizes)
        self.sampling = RowSampling(num_slots, self.device)
        self.batch, self.single = (
            engine.open_on(self.state, self.sampling),
            engine.open_on(single, Sampling()),
        )
        self._sampled: set[int] = set()  # slots whose request is not greedy
        self._prefilled: tuple[State, Params, bool] | None = None  # until it has a slot
        # What `single` holds behind its valid entries may not be finite: a request has failed.
        self._is_spoiled = False
        self._phases = self.batch.draft.phases if self.batch.draft else (1,)
        self._number = 0  # of a round within a cycle
        self._steps = self._captured()

    def _gammas(self) -> tuple[int, ...]:
        """Return the gammas of rounds: one, or all that draft.gamma=auto chooses among, with 0
        where a draft pauses.
        """
        draft = self.engine.draft
        if draft.name == "none":
            return ()
        gammas = draft.gammas(self.engine.cache)
        return (0, *gammas) if draft.gamma == "auto" and draft.pauses else gammas

    @torch.inference_mode()
    def _captured(self) -> dict[tuple[int | None, bool], list[Step]]:
        """Return a step for each kind of round: by gamma (None: autoregressive), greedy or not, by
        phase.

        Capturing rehearses rounds, which has no effect while there are no requests: empty rows
        commit nothing.
        """
        draft = self.batch.draft
        captures = self.batch.decoder.captures
        # Row by row: an empty one holds nothing, others are copied.
        self.batch.decoder.prefilled = draft
        before: dict[int | None, Callable[[], None]] = {
            gamma: partial(draft.prepare, self.state, gamma)
            for gamma in self.gammas
            if gamma and draft
        }
        return {
            (gamma, greedy): [
                Step(
                    partial(self._round, gamma, greedy, phase),
                    captures,
                    before=before.get(gamma),
                )
                for phase in range(1 if gamma is None else len(self._phases))
            ]
            for gamma in (None, *self.gammas)
            for greedy in (True, False)
        }

    def _round(self, gamma: int | None, greedy: bool, phase: int) -> None:
        self.sampling.greedy = greedy
        if gamma is None:
            self.batch.decoder.decode_token()
        else:
            assert self.batch.draft is not None
            self.batch.decoder.round(self.batch.draft, gamma, phase)

    def close(self) -> None:
        """Free the caches at once, even if other objects still refer to these slots."""
        self.batch.close()
        self.single.close()
        self._steps.clear()  # they hold captured graphs

    def check(self, prompt: Sequence[int], params: Params) -> None:
        """Raise UserError for a request that cannot be served."""
        vocab_size = self.engine.target.config.vocab_size
        if not prompt:
            raise UserError("the prompt is empty")
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise UserError(f"the prompt holds a token outside of the vocabulary of {vocab_size:,}")
        if len(prompt) + params.max_tokens > self.max_len:
            wanted = f"{len(prompt):,} prompt token{'s' if len(prompt) > 1 else ''}"
            raise UserError(
                f"{wanted} and {params.limit_name}={params.max_tokens} exceed the limit of"
                f" {self.max_len:,} tokens"
            )
        if params.gamma is not None and params.gamma > self.gamma:
            raise UserError(
                f"gamma={params.gamma}: must be at most {self.gamma}, which the engine was made for"
            )

    @torch.inference_mode()
    def prefill(
        self, prompt: list[int], params: Params, speculative: bool, progress: Callable[[int], None]
    ) -> tuple[int, bool]:
        """Prefill a request outside of the slots. `progress` is called after each chunk, and may
        run a `step` or raise Abandoned.

        Return the first token, and whether it is also the last. If it is not, `seat` comes next.
        """
        if self._is_spoiled:
            self._clear_single()
        try:
            return self._prefill(prompt, params, speculative, progress)
        except BaseException:
            self._is_spoiled = True
            raise

    def _clear_single(self) -> None:
        """Set to 0 what earlier requests have left where prompts are prefilled."""
        self.single.decoder.cache.clear_entries()
        if self.single.draft is not None:
            self.single.draft.clear_entries()
        self._is_spoiled = False

    def _prefill(
        self, prompt: list[int], params: Params, speculative: bool, progress: Callable[[int], None]
    ) -> tuple[int, bool]:
        decoder = self.single.decoder
        padding = self.state.tokens_BS.shape[1] - len(prompt) - params.max_tokens
        eos = () if params.sampling.ignore_eos else self.eos_token_ids
        state = State([prompt], params.max_tokens, padding, eos, self.device)
        request = Decoder(decoder.target, decoder.cache, state, params.sampling)
        request.listener = decoder.listener if speculative else None
        request.prefill(self.engine.prefill_chunk, progress)
        state.check_finite("in the prefill")
        request.restart()
        finished = bool(state.finished_B)
        if speculative and not finished:
            assert self.single.draft is not None
            self.single.draft.prefill(state, progress)
        self._prefilled = state, params, speculative
        return int(request.first_tokens_B), finished

    @torch.inference_mode()
    def seat(self, slot: int) -> None:
        """Copy the request that was prefilled last into a slot; it takes part from the next round
        on.
        """
        assert self._prefilled is not None
        state, params, speculative = self._prefilled
        self.batch.decoder.cache.copy_row(slot, self.single.decoder.cache)
        if speculative:
            assert self.batch.draft is not None
            assert self.single.draft is not None
            self.batch.draft.copy_row(slot, self.single.draft)
        self.sampling.set_row(slot, params.sampling)
        self.state.seat(
            slot,
            state,
            self.gamma if params.gamma is None else params.gamma,
            params.sampling.ignore_eos,
        )
        if not params.sampling.greedy:
            self._sampled.add(slot)

    @torch.inference_mode()
    def release(self, slot: int, failed: bool = False) -> None:
        """Empty a slot, whether or not its request has ended. An empty row attends to almost
        nothing. Where the request has failed, its prefill may have left numbers that are not
        finite, too; `seat` overwrites those of the slot.
        """
        self._is_spoiled |= failed
        self.state.finished_B[slot : slot + 1] = True
        self.batch.decoder.cache.clear_row(slot)
        if self.batch.draft is not None:
            self.batch.draft.clear_row(slot)
        self._sampled.discard(slot)

    @torch.inference_mode()
    def step(self, gamma: int | None) -> Tensor:
        """Take a round of all slots that proposes `gamma` tokens; None: an autoregressive step, of
        which the draft learns nothing. Return (B, 4 + T), still on the device: accepted proposals,
        committed tokens, whether the row has finished, whether its logits were finite, and its last
        T tokens, of which the committed ones are new.
        """
        phase = 0 if gamma is None else phase_at(self._number, self._phases)
        self._steps[gamma, not self._sampled][phase]()
        self._number = (self._number + 1) % sum(self._phases)
        state = self.state
        flags_B2 = torch.stack((state.finished_B, (state.bad_WB == NEVER).all(0)), dim=1).int()
        counters_B4 = torch.cat((state.accepted_RB.T, state.committed_RB.T, flags_B2), dim=1)
        return torch.cat((counters_B4, state.recent_BT((gamma or 0) + 1)), dim=1)
