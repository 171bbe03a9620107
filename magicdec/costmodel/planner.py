"""The search: which draft, policy, budget and gamma to run for a target on a machine, under a
latency bound.

Only configurations with a known acceptance can be ranked; the others are listed with the alpha from
which they would pay, because a guess would decide the ranking.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

from magicdec.config.choices import CacheConfig, DraftConfig
from magicdec.config.registry import DRAFTS, POLICIES
from magicdec.costmodel.acceptance import AlphaEstimate, Curves, is_same
from magicdec.costmodel.memory_estimate import Memory, memory
from magicdec.costmodel.prediction import GAMMAS, Prediction, halfway, predict_generation
from magicdec.costmodel.round import Setup, prefill_s
from magicdec.errors import UserError

BUDGETS = (256, 512, 1024, 2048)  # tried in addition to those with a known acceptance


@dataclass(frozen=True)
class Candidate:
    """A configuration that could be run: speculative, or autoregressive where `prediction` is
    None.
    """

    setup: Setup
    prediction: Prediction | None
    time_per_token_s: float  # of a row, after its first token
    held: Memory  # at the end of the generation

    @property
    def tokens_per_second(self) -> float:
        """Return the throughput of the whole batch."""
        return self.setup.batch / self.time_per_token_s

    @property
    def gamma(self) -> int:
        """Return the tokens proposed per round; 0 without a draft."""
        return self.prediction.best.gamma if self.prediction else 0

    @property
    def speedup(self) -> float:
        """Return the speedup over autoregressive decoding of the same batch."""
        return self.setup.target_time.total / self.time_per_token_s

    @property
    def speedup_wall(self) -> float | None:
        """Return the speedup of a batch that waits for its slowest row; None if the number of
        tokens is unknown.
        """
        return self.prediction.speedup_wall(self.prediction.best) if self.prediction else 1.0


@dataclass(frozen=True)
class Ranking:
    """The outcome of a search."""

    ranked: tuple[Candidate, ...]  # within memory and latency, the highest throughput first
    unknown: tuple[Prediction, ...]  # no acceptance is known; the lowest break-even alpha first
    too_slow: int  # predicted beyond the latency bound
    too_large: tuple[Setup, ...]  # predicted beyond the GPU's memory, each at the batch tried

    @property
    def autoregressive(self) -> Candidate:
        """Return the best plan without speculation: at its own batch where it is within the bounds,
        otherwise at that of the best plan.
        """
        for candidate in self.ranked:
            if candidate.prediction is None:
                return candidate
        best = self.ranked[0]
        return replace(best, prediction=None, time_per_token_s=best.setup.target_time.total)


@dataclass(frozen=True)
class _Tried:
    """A configuration at a batch: as a prediction has it, or autoregressive where that is None."""

    setup: Setup  # in the middle of the generation
    prediction: Prediction | None
    held: Memory  # at the end of the generation

    @property
    def fits(self) -> bool:
        """Return whether it is within the machine's memory."""
        return self.held.total <= self.setup.hardware.device.memory

    @property
    def candidate(self) -> Candidate | None:
        """Return what can be ranked; None without a known acceptance."""
        if self.prediction is None:
            return Candidate(self.setup, None, self.setup.target_time.total, self.held)
        if self.prediction.estimate is None:
            return None
        time_s = self.prediction.best.time_per_token_s
        return Candidate(self.setup, self.prediction, time_s, self.held)


@dataclass(frozen=True)
class _Conditions:
    """Conditions that all configurations of a search are predicted and judged by."""

    curves: Curves
    gammas: Sequence[int]
    alpha: float | AlphaEstimate | None
    generate_len: int
    latency_s: float

    def tried(self, prompts: Setup, speculates: bool) -> _Tried:
        """Return the prediction of a setup of prompts, or of its autoregressive decoding."""
        new = self.generate_len
        if not speculates:
            return _Tried(halfway(prompts, new), None, memory(prompts, 1, new))
        prediction = predict_generation(prompts, self.gammas, self.alpha, self.curves, new)
        return _Tried(prediction.setup, prediction, prediction.memory)

    def largest_batch(self, prompts: Setup, speculates: bool) -> int:
        """Return the most rows, up to those of `prompts`, within the memory and the latency bound;
        1 where no batch is.
        """
        fitting, excessive = 1, prompts.batch + 1
        while excessive - fitting > 1:
            batch = (fitting + excessive) // 2
            tried = self.tried(prompts.at(batch=batch), speculates)
            candidate = tried.candidate
            is_fast = candidate is None or candidate.time_per_token_s <= self.latency_s
            if tried.fits and is_fast:
                fitting = batch
            else:
                excessive = batch
        return fitting


def search(
    setup: Setup,
    curves: Curves,
    batches: Sequence[int] | None = None,
    drafts: Iterable[DraftConfig] = (),
    caches: Sequence[CacheConfig] = (),
    gammas: Sequence[int] = GAMMAS,
    latency_ms: float | None = None,
    generate_len: int = 0,
    alpha: float | AlphaEstimate | None = None,
    fills: bool = False,
) -> Ranking:
    """Rank configurations of `setup`'s target, machine and context, which is that of the prompts.
    Times are those of the middle of a generation, of the tokens that `generate_len` gives.

    `drafts` and `caches`, at any budget, are those to search; empty: those of `setup`. A given
    `alpha` is that of the setup's own draft, cache and budget, and no others are searched.
    `latency_ms` bounds the time per output token. If it `fills` the memory, each configuration has
    as many rows as are within memory and latency, up to those of `setup`, instead of `batches`.
    Raise UserError if even autoregressive decoding of the smallest batch exceeds the memory or the
    bound.
    """
    latency_s = inf if latency_ms is None else latency_ms / 1e3
    conditions = _Conditions(curves, gammas, alpha, generate_len, latency_s)
    kinds = [(setup.at(draft=DRAFTS["ngram"].facts()), False)]  # needs no memory of its own
    if alpha is not None:
        kinds.append((setup, True))
    else:
        drafts, caches = tuple(drafts) or (setup.draft,), tuple(caches) or (setup.cache,)
        kinds += [(kind, True) for kind in _setups(setup, drafts, caches, curves)]
    candidates: list[Candidate] = []
    unknown: list[Prediction] = []
    too_large: list[Setup] = []
    for kind, speculates in kinds:
        own = (conditions.largest_batch(kind, speculates),) if fills else batches
        for batch in own or (setup.batch,):
            tried = conditions.tried(kind.at(batch=batch), speculates)
            candidate = tried.candidate
            if not tried.fits:
                too_large += [tried.setup] if speculates else []
            elif candidate is not None:
                candidates.append(candidate)
            elif tried.prediction is not None:
                unknown.append(tried.prediction)
    fast = [candidate for candidate in candidates if candidate.time_per_token_s <= latency_s]
    if not fast:
        smallest = 1 if fills else min(batches or (setup.batch,))
        raise UserError(_nothing(setup, smallest, candidates, latency_ms))
    ranked = sorted(fast, key=lambda candidate: candidate.tokens_per_second, reverse=True)
    unknown.sort(key=lambda p: 2.0 if p.best.break_even_alpha is None else p.best.break_even_alpha)
    return Ranking(tuple(ranked), tuple(unknown), len(candidates) - len(fast), tuple(too_large))


def _setups(
    setup: Setup, drafts: Sequence[DraftConfig], caches: Sequence[CacheConfig], curves: Curves
) -> Iterable[Setup]:
    for draft in drafts:
        for cache in caches if draft.is_model else (POLICIES["full"].facts(),):
            if cache.needs_target and not draft.shares_target:
                continue
            candidate = setup.at(draft=draft, cache=cache)
            budgets = curves.budgets(candidate)
            others = [
                budget for budget in BUDGETS if not any(is_same(budget, other) for other in budgets)
            ]
            for budget in (setup.context,) if not cache.has_budget else sorted(budgets + others):
                if budget <= setup.context:
                    yield candidate.at(budget=budget)


def _nothing(
    setup: Setup, smallest: int, candidates: Sequence[Candidate], latency_ms: float | None
) -> str:
    if not candidates:
        return (
            f"a batch of {smallest} at a context of {setup.context} tokens does not fit into the"
            f" memory of hardware={setup.hardware.name}; take a smaller batch, a shorter context or"
            " more GPUs"
        )
    fastest = min(1e3 * candidate.time_per_token_s for candidate in candidates)
    return f"scenario.latency_ms={latency_ms}: the fastest plan takes {fastest:.1f} ms per token"


@dataclass(frozen=True)
class Workload:
    """Requests of several prompt and output lengths, all equally frequent."""

    lengths: Sequence[Sequence[int]]  # pairs of prompt and output tokens

    @property
    def context_len(self) -> int:
        """Return the mean context of a decoding step, which is linear in the context."""
        tokens = sum(output for _, output in self.lengths)
        # Down, as `halfway` goes: `prompt_len` is then the prompt of a single pair.
        return int(sum(output * (prompt + output / 2) for prompt, output in self.lengths) / tokens)

    @property
    def prompt_len(self) -> int:
        """Return the prompt whose generation of the mean output has its middle at `context_len`."""
        return max(1, self.context_len - self.generate_len // 2)

    @property
    def generate_len(self) -> int:
        """Return the mean output."""
        return round(sum(output for _, output in self.lengths) / len(self.lengths))

    def requests_per_second(self, setup: Setup, time_per_token_s: float, drafts: bool) -> float:
        """Return the throughput at `setup.batch` requests at a time, their prefills included.

        `drafts`: an independent draft prefills, too.
        """
        batch, number = setup.batch, len(self.lengths)
        outputs_s = sum(output - 1 for _, output in self.lengths) * time_per_token_s / number
        models = [(setup.target, setup.ranks)]
        if drafts and setup.draft.own_model is not None:
            models.append((setup.draft_model, setup.draft_ranks))
        prompts_s = sum(
            prefill_s(setup, model, ranks, prompt)
            for model, ranks in models
            for prompt, _ in self.lengths
        )
        return batch / (outputs_s + batch * prompts_s / number)
