"""Prefill, the round, and generation: autoregressive without a draft, speculative with one.

B rows, G = gamma, T = G + 1 tokens of a verification, R rounds, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from magicdec.decoding.prefill import Advance, prefill, simulate
from magicdec.decoding.state import TARGET, State
from magicdec.decoding.timers import Clock, Stopwatch
from magicdec.drafts.base import Draft, Proposal
from magicdec.engine.graphs import Captures, Cycle, Step
from magicdec.models.computed_rows import active_rows, among
from magicdec.models.kv_cache import KVCache, resting
from magicdec.models.taps import Taps
from magicdec.models.transformer import Transformer, compile_parts
from magicdec.verification.accept import Verdict, accept_greedy, accept_sampled, accept_synthetic
from magicdec.verification.sampling import RowSampling, Sampling, Use, choose


@dataclass
class Generation:
    """The tokens of one pass over a batch, its counters and its times."""

    tokens: list[list[int]]  # new tokens per row, the prefill's first one included
    accepted_RB: Tensor  # accepted proposals, INACTIVE where the row had finished
    committed_RB: Tensor  # tokens committed, cut at ends of sequence and at limits
    round_seconds: list[float]  # end of each round since the start of decoding
    # Before the first round: the draft's prefill, and timing its gammas if it has several.
    setup_seconds: float = 0.0
    gammas: list[int] = field(default_factory=list)  # of each round; 0 where nothing was proposed
    generate_len: int = 0  # the limit of every row

    @property
    def accepted(self) -> list[list[bool]]:
        """Return which tokens of each row are accepted proposals: neither the first one nor a bonus
        token.
        """
        rows = zip(self.accepted_RB.T.tolist(), self.committed_RB.T.tolist(), strict=True)
        return [
            [
                False,
                *(place < taken for taken, kept in zip(*row, strict=True) for place in range(kept)),
            ]
            for row in rows
        ]


class Decoder:
    """One batch on one target: its cache, its state, and the ways to continue it."""

    def __init__(
        self,
        target: Transformer,
        cache: KVCache,
        state: State,
        sampling: Sampling | RowSampling,
        graphs: bool = False,
        drawn: tuple[float, ...] | None = None,
        gammas: tuple[int, ...] = (),
    ):
        """Set up. `drawn` has the probabilities by position to accept with, instead of comparing
        tokens. `gammas` are those to choose among while decoding; without any, every round
        proposes draft.gamma.
        """
        self.target, self.cache = target, cache
        self.state, self.sampling = state, sampling
        self.gammas = gammas
        # A draft that is given the target's hidden states in the prefill.
        self.listener: Draft | None = None
        # The draft that goes with the state: only its rounds may run.
        self.prefilled: Draft | None = None
        self.is_simulated = False
        self.device = cache.seqlens_B.device
        # On the device from the beginning, so that rounds can be captured.
        self.drawn_G = None if drawn is None else torch.tensor(drawn, device=self.device)
        self.captures = Captures(self.device) if graphs and self.device.type == "cuda" else None
        if target.is_compiled:  # tens of small operators each
            compile_parts(state, "inspect", "commit")
        self._cycles: dict[tuple[Draft | None, int | None], Cycle] = {}

    @torch.inference_mode()
    def prefill(self, chunk: int, progress: Advance | None = None) -> float:
        """Fill the target's cache and decide each row's first token. Return the seconds that it
        took, without those of a draft that listens.
        """
        state, listener = self.state, self.listener
        if state.has_failed:
            self._clear_entries()
        with Stopwatch(self.device) as watch:
            self.cache.empty()
            self.last_BE = prefill(
                self.target,
                self.cache,
                state.tokens_BS,
                state.prompt_len_B,
                state.max_prompt_len,
                chunk,
                progress,
                listener.taps if listener else None,
                partial(listener.hear, state=state) if listener else None,
            )
            self._decide_first_tokens()
        self.is_simulated = False
        return watch.seconds - (listener.heard_seconds if listener else 0.0)

    def _clear_entries(self) -> None:
        """Set to 0 what a pass has left whose logits were not finite."""
        self.cache.clear_entries()
        if self.prefilled is not None:
            self.prefilled.clear_entries()

    @torch.inference_mode()
    def resume(self, last_BE: Tensor) -> None:
        """Continue behind prompts that the cache holds already; `last_BE` are their last hidden
        states. No earlier decoder of this cache may run another round.
        """
        self.cache.forget_passes()
        self.cache.rollback(self.state.prompt_len_B)
        self.last_BE = last_BE
        self._decide_first_tokens()

    def _decide_first_tokens(self) -> None:
        logits_B1V = self.target.logits(self.last_BE[:, None])
        self.state.begin()
        self.state.inspect(logits_B1V, TARGET)
        positions_B1 = self.state.prompt_len_B.long()[:, None]
        self.first_tokens_B = choose(logits_B1V, positions_B1, Use.DECIDE, self.sampling)[0][:, 0]

    @torch.inference_mode()
    def rehearse_prefill(self, chunk: int) -> None:
        """Run a pass of each width that `prefill` will run: first calls compile kernels and load
        libraries, untimed.
        """
        longest = self.state.max_prompt_len
        for width in {min(chunk, longest), longest % chunk} - {0}:
            self.cache.empty()
            self.target(self.state.tokens_BS[:, :width], self.cache)

    @torch.inference_mode()
    def simulate_prefill(self) -> None:
        """Put the batch where `prefill` would leave it, over random entries: for timing only."""
        self.is_simulated = True
        simulate(self.target, self.cache, self.state.prompt_len_B)
        self.first_tokens_B = torch.zeros_like(self.state.prompt_len_B, dtype=torch.int64)

    @torch.inference_mode()
    def restart(self, draft: Draft | None = None) -> None:
        """Go back to the end of the prefill, which several passes share, and prefill the draft
        whose rounds follow.
        """
        self.cache.rollback(self.state.prompt_len_B)
        self.state.start(self.first_tokens_B)
        for cycle in self._cycles.values():
            cycle.restart()
        self.prefilled = draft
        if draft is not None and self.is_simulated:
            draft.simulate_prefill(self.state)
        elif draft is not None:
            draft.prefill(self.state)

    def require(self, draft: Draft) -> None:
        """Raise RuntimeError unless this draft was prefilled since the last restart.

        Before that its cache does not know where the prompts end. Where it shares the target's
        entries, its proposals would overwrite the prompts'.
        """
        if draft is not self.prefilled:
            raise RuntimeError(
                "a round of a draft that is not prefilled; call Decoder.restart(draft) first"
            )

    def round(self, draft: Draft, gamma: int, phase: int) -> None:
        """Propose, verify, accept, commit: no host synchronisation, static shapes, no attention for
        finished rows.
        """
        self.require(draft)
        with resting(self.state.finished_B, self.cache, *draft.caches):
            proposal = draft.propose(self.state, gamma) if gamma else draft.pause(self.state)
            logits_BTV = self.verify(proposal, draft.watch(self.cache, phase), draft.taps)
        verdict = self.accept(proposal, logits_BTV)
        count_B = self.state.commit(verdict)
        self.cache.commit(gamma + 1, count_B)
        draft.commit(count_B, gamma)

    def verify(self, proposal: Proposal, cache: KVCache, taps: Taps | None = None) -> Tensor:
        """Run the target over the last committed token and the proposals. Return T next-token
        logits a row.
        """
        tokens_BT = torch.cat((self.state.recent_BT(1), proposal.tokens_BG), dim=1)
        with cache.tentative():
            hidden_BTE = self.target(tokens_BT, cache, taps)
        return self._logits(hidden_BTE)

    def _logits(self, hidden_BTE: Tensor) -> Tensor:
        """Return the target's logits (B, T, V); on a CPU 0 for rows that rest."""
        rows = active_rows(self.cache.resting_B)
        return among(
            rows,
            self.target.logits(hidden_BTE if rows is None else hidden_BTE[rows]),
            len(hidden_BTE),
        )

    def accept(self, proposal: Proposal, logits_BTV: Tensor) -> Verdict:
        """Decide what is accepted, and inspect the logits up to there: those behind a rejected
        proposal may be of a token that the target would never write.
        """
        verdict = self._verdict(proposal, logits_BTV)
        self.state.inspect(logits_BTV, TARGET, verdict.num_accepted_B)
        return verdict

    def _verdict(self, proposal: Proposal, logits_BTV: Tensor) -> Verdict:
        """Decide by the rule that keeps this sampling lossless, or draw a synthetic outcome."""
        if self.sampling.greedy and self.drawn_G is None:
            return accept_greedy(proposal.tokens_BG, logits_BTV)
        positions_BT = self.state.next_positions_BT(logits_BTV.shape[1])
        if self.drawn_G is not None:
            drawn_G = self.drawn_G[: proposal.tokens_BG.shape[1]]
            return accept_synthetic(
                proposal.tokens_BG, logits_BTV, positions_BT, drawn_G, self.sampling
            )
        return accept_sampled(
            proposal.tokens_BG, proposal.q_BGV, logits_BTV, positions_BT, self.sampling
        )

    def decode_token(self) -> None:
        """Run one autoregressive step: a round without proposals."""
        with resting(self.state.finished_B, self.cache):
            logits_B1V = self._logits(self.target(self.state.recent_BT(1), self.cache))
        self.state.inspect(logits_B1V, TARGET)
        token_B1, _ = choose(logits_B1V, self.state.next_positions_BT(1), Use.DECIDE, self.sampling)
        count_B = self.state.commit(Verdict(torch.zeros_like(self.state.num_tokens_B), token_B1))
        self.cache.commit(1, count_B)

    @torch.inference_mode()
    def generate(
        self, draft: Draft | None = None, progress: Advance | None = None, gamma: int | None = None
    ) -> Generation:
        """Continue the prefilled prompts to their ends, with rounds as in `cycle_for`; call
        `progress` after each.
        """
        cycle = self.cycle_for(draft, gamma)
        with Stopwatch(self.device) as watch:
            self.restart(draft)
        setup_seconds = draft.heard_seconds + watch.seconds + cycle.timing_seconds if draft else 0.0
        clock = Clock(self.device)
        stop = _StopFlag(self.state.finished_B)
        clock.mark()
        while not stop.raised():
            cycle()
            clock.mark()
            stop.post()
            if progress is not None:
                progress(1)
        seconds = clock.seconds()
        self.state.check_finite(
            "in speculative decoding" if draft else "in autoregressive decoding"
        )
        return self._collect(seconds, setup_seconds, cycle.gammas)

    def cycle_for(self, draft: Draft | None, gamma: int | None = None) -> Cycle:
        """Return the rounds of a draft that propose `gamma` tokens: by default those of the best of
        `gammas`, or of the draft's own gamma.

        The first call restarts the batch, and disturbs the state by capturing or timing: call
        `restart` after it.
        """
        if draft is None:
            return self.cycle(None, 0)
        if gamma or not self.gammas:
            return self.cycle(draft, gamma or draft.gamma)
        if (draft, None) not in self._cycles:
            from magicdec.engine.adaptive import AdaptiveCycle  # for draft.gamma=auto alone

            self.restart(draft)
            cycles = {gamma: self.cycle(draft, gamma) for gamma in self.gammas}
            self._cycles[draft, None] = AdaptiveCycle({0: self.cycle(None, 0)} | cycles, self.state)
        return self._cycles[draft, None]

    def cycle(self, draft: Draft | None, gamma: int) -> Cycle:
        """Return the captured (or plain) rounds of a draft that proposes `gamma` tokens. Raise
        ValueError if the draft has no room for so many.
        """
        if draft is not None and gamma > draft.gamma:
            raise ValueError(
                f"gamma={gamma}: must be at most {draft.gamma}, which the draft was opened for"
            )
        if (draft, gamma) not in self._cycles:
            bodies: list[Callable[[], None]] = [self.decode_token]
            before: Callable[[], None] | None = None
            if draft is not None:
                if draft is not self.prefilled:
                    self.restart(draft)  # capturing and timing run rounds
                bodies = [
                    partial(self.round, draft, gamma, phase) for phase in range(len(draft.phases))
                ]
                before = partial(self._prepare, draft, gamma)
            # Rehearsed rounds stop at each row's limit, but the round counter does not: reset it.
            undo = self.state.forget_rounds
            self._cycles[draft, gamma] = Cycle(
                [Step(body, self.captures, undo, before) for body in bodies],
                gamma,
                draft.phases if draft else (1,),
            )
        return self._cycles[draft, gamma]

    def _prepare(self, draft: Draft, gamma: int) -> None:
        """Do what the host does before a round, which may be the replay of a capture."""
        self.require(draft)
        draft.prepare(self.state, gamma)

    def forget_cycles(self) -> None:
        """Release captures, and what they hold."""
        self._cycles.clear()

    def _collect(
        self, round_seconds: list[float], setup_seconds: float, gammas: list[int]
    ) -> Generation:
        """Read the counters back, once."""
        state, rounds = self.state, len(round_seconds)
        tokens = state.tokens_BS.tolist()
        starts = state.prompt_len_B.tolist()
        ends = state.num_tokens_B.tolist()
        return Generation(
            tokens=[row[start:end] for row, start, end in zip(tokens, starts, ends, strict=True)],
            # The next pass counts into the same buffers.
            accepted_RB=state.accepted_RB[:rounds].to("cpu", copy=True),
            committed_RB=state.committed_RB[:rounds].to("cpu", copy=True),
            round_seconds=round_seconds,
            setup_seconds=setup_seconds,
            gammas=gammas,
            generate_len=state.max_len - state.max_prompt_len,
        )


class _StopFlag:
    """A flag that all rows have finished, read without stalling the device.

    On a GPU the host reads round i-1's flag while round i runs, so that at most one surplus round
    is decoded.
    """

    def __init__(self, finished_B: Tensor):
        self._finished_B = finished_B
        self._posted = self._read = 0
        if finished_B.is_cuda:  # two of each: of the round that runs, and of the one before
            self._flags = torch.zeros(2, dtype=torch.bool, pin_memory=True)
            self._events = [torch.cuda.Event() for _ in range(2)]

    def post(self) -> None:
        """Request the flag as it is after the work queued so far."""
        if self._finished_B.is_cuda:
            slot = self._posted % 2
            self._flags[slot].copy_(self._finished_B.all(), non_blocking=True)
            self._events[slot].record()
            self._posted += 1

    def raised(self) -> bool:
        """Return the flag: on a CPU the current one, on a GPU that of the round before the last one
        queued.
        """
        if not self._finished_B.is_cuda:
            return bool(self._finished_B.all())
        if self._posted - self._read < 2:
            return False
        slot = self._read % 2
        self._events[slot].synchronize()
        self._read += 1
        return bool(self._flags[slot])
