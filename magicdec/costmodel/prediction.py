"""The prediction for one configuration: times, speedup against gamma, the best gamma, memory, S*.

Without an alpha there is no speedup, only the alpha at which speculation breaks even.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from typing_extensions import override

from magicdec.config.omega import omega
from magicdec.costmodel.acceptance import AlphaEstimate, Curves
from magicdec.costmodel.confidence import Confidence, case_of, confidence
from magicdec.costmodel.growth import kv_share
from magicdec.costmodel.memory_estimate import Memory, memory
from magicdec.costmodel.roofline import arithmetic_intensity
from magicdec.costmodel.round import RoundTimes, Setup, round_times, steps_per_selection
from magicdec.costmodel.speedup import batch_speedup, break_even_alpha, round_tokens, row_rounds
from magicdec.errors import UserError
from magicdec.units import GIB, both_speedups

GAMMAS = range(1, 17)
BATCHES = (32, 256)  # over which S* asks whether speedup falls
CONTEXT_STEP = 0.01  # S* is found to this share of itself
SHORTEST = 64  # tokens: S* is not looked for below


@dataclass(frozen=True)
class AtGamma:
    """The prediction for one gamma."""

    times: RoundTimes
    alpha: float | None  # of the rounds that propose
    proposes: float = 1.0  # the share of rounds that do
    generate_len: int = 0  # new tokens of a row; 0: so many that the last round does not count

    @property
    def gamma(self) -> int:
        """Return the tokens proposed per round."""
        return self.times.gamma

    @cached_property
    def tokens_per_round(self) -> float | None:
        """Return the tokens that a row takes of a round, on average: of its last round only those
        that were missing. None without an alpha.
        """
        if self.alpha is None:
            return None
        if self.generate_len < 2:
            return round_tokens(self.gamma, self.alpha, self.proposes)
        tokens = self.generate_len - 1  # the prefill gives the first
        return tokens / row_rounds(self.gamma, self.alpha, tokens, self.proposes)

    @property
    def speedup(self) -> float | None:
        """Return T_T over T_SD; None without an alpha."""
        tokens = self.tokens_per_round
        return None if tokens is None else self.times.speedup(tokens)

    @property
    def time_per_token_s(self) -> float:
        """Return T_SD: seconds per token of a row. Raise UserError without an alpha."""
        tokens = self.tokens_per_round
        if tokens is None:
            raise UserError("a speculative time per token needs an alpha")
        return self.times.round_s / tokens

    @property
    def break_even_alpha(self) -> float | None:
        """Return the alpha from which speculation of long outputs pays; None where it never
        does.
        """
        steps = self.times.round_s / self.times.target.total
        return break_even_alpha(self.gamma, steps, self.proposes)


@dataclass(frozen=True)
class Prediction:
    """The prediction for a configuration."""

    setup: Setup
    estimate: AlphaEstimate | None
    by_gamma: tuple[AtGamma, ...]
    generate_len: int
    batches: tuple[int, int]
    known_budgets: tuple[int, ...] = ()  # where there is no estimate: the budgets that have one
    prompts: Setup | None = None  # where the generation begins; None: at `setup`

    @override
    def __repr__(self) -> str:
        setup, best = self.setup, self.best
        what = (
            f"{setup.target_label} on {setup.hardware.name}, {setup.batch} x {setup.context:,},"
            f" {setup.draft_title}"
        )
        return (
            f"<Prediction: {what}: {self.speedups(best) or 'of unknown acceptance'}, with gamma"
            f" {best.gamma}>"
        )

    @cached_property
    def best(self) -> AtGamma:
        """Return the gamma with the highest speedup; without an alpha, the one with the lowest
        break-even alpha.
        """
        if self.estimate is not None:
            return max(self.by_gamma, key=lambda at: at.speedup or 0.0)
        return min(
            self.by_gamma,
            key=lambda at: 2.0 if at.break_even_alpha is None else at.break_even_alpha,
        )

    @cached_property
    def best_per_batch(self) -> AtGamma | None:
        """Return the gamma with the highest speedup of the batch; None where it is unknown."""
        if self.speedup_wall(self.best) is None:
            return None
        return max(self.by_gamma, key=lambda at: self.speedup_wall(at) or 0.0)

    @property
    def configured(self) -> AtGamma | None:
        """Return the prediction for draft.gamma; None if it is not among `by_gamma`."""
        return next((at for at in self.by_gamma if at.gamma == self.setup.draft.gamma), None)

    def speedups(self, at: AtGamma) -> str:
        """Return both speedups at one of `by_gamma`, in words; "" without an alpha."""
        return "" if at.speedup is None else both_speedups(at.speedup, self.speedup_wall(at))

    @cached_property
    def confidence(self) -> Confidence | None:
        """Return how sure the speedup at the best gamma is; None without an alpha, or where no
        errors of such predictions are known.
        """
        speedup = self.best.speedup
        if speedup is None or self.setup.hardware.is_cpu:
            return None
        return confidence(case_of(self.setup), speedup)

    def speedup_wall(self, at: AtGamma) -> float | None:
        """Return the speedup of the whole batch at one of `by_gamma`; None without an alpha or
        tokens to generate.
        """
        if at.alpha is None or self.generate_len < 2:
            return None
        steps = self.generate_len - 1  # the prefill gives the first token
        return batch_speedup(
            at.gamma,
            at.alpha,
            self.setup.batch,
            steps,
            at.times.target.total,
            at.times.round_s,
            at.proposes,
        )

    @cached_property
    def memory(self) -> Memory:
        """Return the bytes that the fullest GPU holds, at the best gamma."""
        return memory(self.prompts or self.setup, self.best.gamma, self.generate_len)

    @property
    def fits(self) -> bool:
        """Return whether `memory` is within the device's memory."""
        return self.memory.total <= self.setup.hardware.device.memory

    @cached_property
    def critical_context(self) -> int | None:
        """Return S* at the best gamma."""
        return critical_context(self.setup, self.best.gamma, self.batches)

    def metrics(self) -> dict[str, float | int | str | None]:
        """Return flat values under `predicted/`, as result.json and W&B hold them; times in
        milliseconds.
        """
        best = self.best
        times = self.best.times
        hardware = self.setup.hardware
        sure = self.confidence
        steps = times.steps(self.setup.cache)
        selection_steps = steps_per_selection(self.setup, best.gamma)
        values: dict[str, float | int | str | None] = {
            "speedup": best.speedup,
            "speedup_wall": self.speedup_wall(best),
            "gamma": best.gamma,
            "alpha": best.alpha,
            "acceptance_source": self.estimate.source if self.estimate else None,
            "break_even_alpha": best.break_even_alpha,
            "critical_context": self.critical_context,
            "target_decode_ms": 1e3 * times.target.total,
            "draft_ms": 1e3 * steps["draft"].total,
            "select_ms": 1e3 * times.select.total * selection_steps,
            "verify_ms": 1e3 * times.verify.total,
            "overhead_ms": 1e3 * times.overhead.total,
            "round_ms": 1e3 * times.round_s,
            "memory_gib": self.memory.total / GIB,
            "fits": self.fits,
            "kv_share": kv_share(self.setup),
            "arithmetic_intensity": arithmetic_intensity(self.setup.target_pass, hardware),
            "ridge": hardware.device.ridge,
            "calibration": hardware.note,
            "kernel_costs": self.setup.remark,
            "speedup_low": sure.low if sure else None,
            "speedup_high": sure.high if sure else None,
            "pays": sure.pays if sure else None,
        }
        for step, time in steps.items():
            values |= {f"{step}/{part}_ms": 1e3 * value for part, value in time._asdict().items()}
        values |= {
            f"speedup/gamma_{at.gamma}": at.speedup
            for at in self.by_gamma
            if at.speedup is not None
        }
        return {f"predicted/{name}": value for name, value in values.items()}


def predict(
    setup: Setup,
    gammas: Sequence[int] = GAMMAS,
    alpha: float | AlphaEstimate | None = None,
    curves: Curves | None = None,
    generate_len: int = 0,
    batches: tuple[int, int] = BATCHES,
) -> Prediction:
    """Predict a configuration at each of `gammas`. `alpha` is given, or looked up in `curves`, or
    unknown.
    """
    estimate = AlphaEstimate(alpha, "given") if isinstance(alpha, float | int) else alpha
    if estimate is None and curves is not None:
        estimate = curves.estimate(setup, generate_len)
    given = estimate.alpha if estimate else None
    budgets = curves.answers(setup, generate_len) if curves is not None and estimate is None else ()
    if given is not None:
        omega(1, given)  # raises UserError unless it is a probability
    # What runs have measured is a mean over all of their rounds, with a match or without.
    is_of_all = setup.draft.is_model or (estimate is not None and estimate.is_measured)
    proposes = 1.0 if is_of_all else setup.match_share
    by_gamma = tuple(
        AtGamma(round_times(setup, gamma), given, proposes, generate_len) for gamma in gammas
    )
    return Prediction(setup, estimate, by_gamma, generate_len, batches, budgets)


def halfway(setup: Setup, generate_len: int) -> Setup:
    """Return a setup of prompts in the middle of their generation: there a step takes as long as on
    average, because its time is linear in the context.
    """
    return setup.at(context=setup.context + generate_len // 2)


def predict_generation(
    prompts: Setup,
    gammas: Sequence[int],
    alpha: float | AlphaEstimate | None,
    curves: Curves,
    generate_len: int,
) -> Prediction:
    """Return the prediction of a whole generation: times in its middle, memory at its end, and an
    acceptance that is looked up by the length of the prompts, unless `alpha` is given.
    """
    estimate = AlphaEstimate(alpha, "given") if isinstance(alpha, float | int) else alpha
    if estimate is None:
        estimate = curves.estimate(prompts, generate_len)
    middle = halfway(prompts, generate_len)
    prediction = predict(middle, gammas, estimate, generate_len=generate_len)
    return replace(prediction, prompts=prompts)


def critical_context(setup: Setup, gamma: int, batches: tuple[int, int] = BATCHES) -> int | None:
    """Return S*: the smallest context at which the larger of two batches speeds up at least as much
    as the smaller.

    Beyond it the KV cache is what decoding loads, and speculation gains with the batch. Acceptance
    cancels out. None where there is none up to the target's longest context. (The two ends are
    compared, not every step between: attention's tiles come in waves, which makes speedup rise and
    fall by a few percent with the batch.)
    """
    setups = [setup.at(batch=batch) for batch in batches]

    def gain(context: int) -> float:
        smaller, larger = [round_times(each.at(context=context), gamma) for each in setups]
        return larger.target.total / larger.round_s - smaller.target.total / smaller.round_s

    low, high = SHORTEST, setup.target.max_position_embeddings
    if gain(high) < 0:
        return None
    if gain(low) >= 0:
        return low
    while high - low > max(1.0, CONTEXT_STEP * low):
        middle = max(low + 1, int((low * high) ** 0.5))
        low, high = (low, middle) if gain(middle) >= 0 else (middle, high)
    return high
