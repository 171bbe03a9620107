"""The search: which draft, policy, budget and gamma to run for a target on a machine, under a latency bound.

Only configurations with a known acceptance can be ranked; the others are listed with the alpha from which they would
pay, because a guess would decide the ranking.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from magicdec.costmodel.acceptance import Curves, is_same
from magicdec.costmodel.predict import GAMMAS, Prediction, predict
from magicdec.costmodel.round import Setup
from magicdec.drafting import DraftConfig, PromptLookup, SelfSpeculation
from magicdec.errors import UserError
from magicdec.policies import CacheConfig

BUDGETS = (256, 512, 1024, 2048)  # tried in addition to those with a known acceptance
FOUND_BY = "# Found by:"  # in the experiments that it writes


@dataclass(frozen=True)
class Candidate:
    """A configuration that could be run: speculative, or autoregressive where `prediction` is None."""

    setup: Setup
    prediction: Prediction | None
    time_per_token_s: float  # of a row, after its first token

    @property
    def tokens_per_second(self) -> float:
        """Return the throughput of the whole batch."""
        return self.setup.batch / self.time_per_token_s

    @property
    def gamma(self) -> int:
        """Return the tokens proposed per round; 0 where nothing is."""
        return self.prediction.best.gamma if self.prediction else 0

    @property
    def speedup(self) -> float:
        """Return the speedup over autoregressive decoding of the same batch."""
        return self.setup.target_time.total / self.time_per_token_s


@dataclass(frozen=True)
class Plans:
    """The outcome of a search."""

    ranked: tuple[Candidate, ...]  # within memory and latency, the highest throughput first
    unknown: tuple[Prediction, ...]  # no acceptance is known; the soonest to break even first
    too_slow: int  # predicted beyond the latency bound
    too_large: int  # predicted beyond the GPU's memory


def search(
    setup: Setup,
    curves: Curves,
    batches: Sequence[int] | None = None,
    drafts: Iterable[DraftConfig] = (SelfSpeculation(),),
    caches: Sequence[CacheConfig] = (),
    gammas: Sequence[int] = GAMMAS,
    latency_ms: float | None = None,
    generate_len: int = 0,
) -> Plans:
    """Rank configurations of `setup`'s target, machine and context.

    `caches` are those to search, at any budget; empty: the one of `setup`. `latency_ms` bounds the time per output
    token. Raise UserError where nothing, not even autoregressive decoding of the smallest batch, is within memory and
    bound.
    """
    drafts, caches = tuple(drafts), tuple(caches) or (setup.cache,)
    plans: list[Candidate] = []
    unknown: list[Prediction] = []
    too_large = 0
    for batch in batches or (setup.batch,):
        alone = setup.at(batch=batch, draft=PromptLookup())  # needs no memory of its own
        if predict(alone, (1,), generate_len=generate_len).fits:
            plans.append(Candidate(alone, None, alone.target_time.total))
        for candidate in _setups(setup.at(batch=batch), drafts, caches, curves):
            prediction = predict(candidate, gammas, curves=curves, generate_len=generate_len)
            if not prediction.fits:
                too_large += 1
            elif prediction.estimate is None:
                unknown.append(prediction)
            else:
                plans.append(Candidate(candidate, prediction, prediction.best.time_per_token_s))
    fast = [plan for plan in plans if latency_ms is None or 1e3 * plan.time_per_token_s <= latency_ms]
    if not fast:
        raise UserError(_nothing(setup, batches, plans, latency_ms))
    ranked = sorted(fast, key=lambda plan: plan.tokens_per_second, reverse=True)
    unknown.sort(key=lambda p: 2.0 if p.best.break_even_alpha is None else p.best.break_even_alpha)
    return Plans(tuple(ranked), tuple(unknown), len(plans) - len(fast), too_large)


def _setups(
    setup: Setup, drafts: Sequence[DraftConfig], caches: Sequence[CacheConfig], curves: Curves
) -> Iterable[Setup]:
    for draft in drafts:
        for cache in caches[: None if draft.is_model else 1]:
            if cache.needs_target and not draft.shares_target:
                continue
            found = setup.at(draft=draft, cache=cache)
            known = curves.budgets(found)
            others = [budget for budget in BUDGETS if not any(is_same(budget, other) for other in known)]
            for budget in (setup.context,) if not cache.has_budget else sorted(known + others):
                if budget <= setup.context:
                    yield found.at(budget=budget)


def _nothing(setup: Setup, batches: Sequence[int] | None, plans: Sequence[Candidate], latency_ms: float | None) -> str:
    smallest = min(batches or (setup.batch,))
    if not plans:
        return (
            f"batch.size={smallest} at batch.context_len={setup.context} does not fit into the memory of "
            f"hardware={setup.hardware.name}; take a smaller batch, a shorter context or more GPUs"
        )
    fastest = min(1e3 * plan.time_per_token_s for plan in plans)
    return f"scenario.latency_ms={latency_ms}: the fastest plan takes {fastest:.1f} ms per token"


def experiment_yaml(plan: Candidate, command: str, path: str | None = None) -> str:
    """Return the plan as the text of a file in conf/experiment; `path` is that of a target that no option names."""
    setup, prediction = plan.setup, plan.prediction
    draft = setup.draft.name if prediction else "none"
    lines = ["# @package _global_"]
    if prediction and prediction.estimate:
        lines.append(
            f"# Predicted: {plan.speedup:.2f}x over autoregressive, {plan.tokens_per_second:,.0f} tokens/s; alpha "
            f"{prediction.estimate.alpha:.2f} ({prediction.estimate.source})."
        )
    else:
        lines.append(f"# Predicted: {plan.tokens_per_second:,.0f} tokens/s; no known draft is faster.")
    lines.append(f"{FOUND_BY} {command}")
    lines += [
        "defaults:",
        f"  - override /target: {'custom' if path else setup.target_name}",
        f"  - override /draft: {draft}",
    ]
    if prediction and setup.draft.model:
        lines.append(f"  - override /target@draft.model: {setup.draft.model.name}")
    lines += [f"  - override /cache: {setup.cache.policy}"] if prediction else []
    lines += [f"  - override /hardware: {setup.hardware.name.lower()}", ""]
    lines += ["target:", f"  path: {json.dumps(path)}"] if path else []
    if prediction:
        lines += ["draft:", f"  gamma: {plan.gamma}"]
        if setup.draft.tensor_parallel is not None:
            lines += [f"  tensor_parallel: {setup.draft.tensor_parallel}"]
        keys = {"budget": setup.cache.budget} if setup.cache.has_budget else {}
        keys |= dict(zip(setup.cache.own_keys(), setup.cache.settings, strict=True))
        lines += ["cache:", *(f"  {key}: {value}" for key, value in keys.items())] if keys else []
    lines += ["batch:", f"  size: {setup.batch}", f"  context_len: {setup.context}"]
    return "\n".join(lines) + "\n"
