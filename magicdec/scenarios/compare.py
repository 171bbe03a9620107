"""The default scenario: the same prompts autoregressively and speculatively, paired, audited and
profiled.

A session decodes what the run lacks, one batch after another, and writes each unit when it ends
(stored_units.py). The figures are computed from all units of the run, whichever session has
measured them (run_figures.py).
"""

import logging
from contextlib import closing
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

from magicdec.config.scenario_settings import Compare
from magicdec.data import Prompts
from magicdec.drafts.base import Draft
from magicdec.engine.decoder import Decoder, Generation
from magicdec.engine.native import Batch, NativeEngine, warm_up
from magicdec.engine.output_audit import Audit, audit
from magicdec.measure import expert_choices, memory_use, metrics
from magicdec.measure.ceilings import read_bandwidth
from magicdec.measure.metrics import Metrics
from magicdec.measure.round_profile import profile_round
from magicdec.measure.system import Interference, Watch
from magicdec.measure.trust import is_impossible
from magicdec.models.last_queries import USUALLY_KEPT
from magicdec.planning import build
from magicdec.planning.resolved import Plan
from magicdec.planning.shared import SHARED, Prefilled, prefill_key
from magicdec.scenarios.outcome import Outcome
from magicdec.scenarios.points import Points
from magicdec.scenarios.repeats import Goal
from magicdec.scenarios.run_figures import Figures, repeat_line
from magicdec.scenarios.stored_units import Stored, Unit
from magicdec.tracking.progress import Progress
from magicdec.units import GIB

if TYPE_CHECKING:
    from magicdec.tracking.store import Run

log = logging.getLogger(__name__)

MOST_LEFT_OUT = 2  # units in a row with other tokens than the first: no further ones are measured
# Figures that a run keeps while repeats are added to it.
PROFILED = ("time/", "memory/", "roofline/", "routing/")


@dataclass
class Session:
    """The part of a run that this process measures."""

    plan: Plan
    prompts: Prompts
    stored: Stored
    goal: Goal
    progress: Progress
    # Of each opened batch: an earlier job has done it.
    prefills_shared: list[bool] = field(default_factory=list)

    @classmethod
    def of(cls, plan: Plan, run: "Run", prompts: Prompts, progress: Progress) -> "Session":
        """Read what the run holds already."""
        goal = Goal(plan.config.settings(Compare), run.before)
        return cls(plan, prompts, Stored.read(run, plan.config.batch.num_batches), goal, progress)

    @property
    def figures(self) -> Figures:
        """Return the figures of all units so far."""
        return Figures(self.plan, self.prompts, self.stored, self.goal)

    def lacks_units(self, number: int) -> bool:
        """Return whether the first batch has too few repeats, or another one fewer than the
        first.
        """
        units = self.stored.units
        num_batches = self.plan.config.batch.num_batches
        if number == 0:
            return not self.goal.is_reached(units.by_batch[0], num_batches)
        return len(units.of_batch(number)) < len(units.of_batch(0))

    def lacks_audit(self, number: int) -> bool:
        """Return whether a batch has not been audited."""
        return self.plan.is_audited and number not in self.stored.audits


def run(plan: Plan, run: "Run", progress: Progress) -> Outcome:
    """Decode every batch `scenario.repeats` times both ways; medians over the repeats are the
    result.
    """
    batches = range(plan.config.batch.num_batches)
    tokenizer = build.tokenizer(plan)
    prompts = build.prompts(plan, tokenizer)
    if run.writes:  # of several ranks, the first
        build.warn_about(plan, prompts)
    session = Session.of(plan, run, prompts, progress)
    peak = memory_use.Peak(plan.device, SHARED.num_bytes)
    gpu = Watch(plan.device)
    profile: Metrics = {} if run.before else run.earlier(PROFILED)
    engine = build.engine(plan, progress)
    for number in batches:
        profiles = number == batches[-1] and not profile
        if not (profiles or session.lacks_units(number) or session.lacks_audit(number)):
            continue
        # Close each batch: the caches of two may not fit.
        with closing(_opened(session, engine, number)) as batch:
            _decode(session, batch, number)
            if session.lacks_audit(number):
                session.stored.add_audit(
                    number, _audited(batch, session.stored.units.of_batch(number)[0])
                )
            if profiles:
                profile = _profiled(session, batch) | _memory(batch, peak)
                profile |= _routed(session, batch, run)
                # Last: the bandwidth's measurement takes memory.
                profile |= _roofline(session, batch, profile)
    figures = session.figures
    results = (
        figures.metrics()
        | {"prefill/shared": any(session.prefills_shared)}
        | gpu.metrics()
        | profile
    )
    plain = figures.repeats.generations("autoregressive")
    fast = figures.repeats.generations("speculative")
    growth = 1 + plan.config.batch.generate_len / 2 / fmean(map(len, session.prompts.tokens))
    results |= metrics.agreement(results, plain, fast, growth)
    outputs = figures.outputs
    if plan.config.draft.synthetic_acceptance is None:  # otherwise what is written means nothing
        results |= outputs.accuracy(tokenizer)
    rows = outputs.rows(plan.config.data.save_prompts)
    return Outcome(results, rows, figures.history(), outputs.samples(tokenizer))


def prediction_of(plan: Plan, results: Metrics) -> Metrics:
    """Return what the formula and the cost model say of a run that has been measured."""
    # Here, because measuring must not wait for them.
    from magicdec.scenarios.prediction_errors import prediction_metrics

    return prediction_metrics(plan, results)


def so_far(plan: Plan, run: "Run") -> Outcome:
    """Return the figures of the complete repeats of a run that has failed."""
    num_batches = plan.config.batch.num_batches
    if not Stored.read(run, num_batches).units.num_repeats:
        return Outcome({})
    prompts = build.prompts(plan, build.tokenizer(plan))
    goal = Goal(plan.config.settings(Compare), run.before)
    figures = Figures(plan, prompts, Stored.read(run, num_batches), goal)
    rows = figures.outputs.rows(plan.config.data.save_prompts)
    return Outcome(figures.metrics(), rows, figures.history())


def _decode(session: Session, batch: Batch, number: int) -> None:
    """Decode a batch both ways until it has its repeats; write each unit when it ends."""
    new: list[Unit] = []
    while session.lacks_units(number):
        if len(new) >= MOST_LEFT_OUT and all(unit.left_out for unit in new[-MOST_LEFT_OUT:]):
            return
        interference = Interference(session.plan.device, session.plan.num_ranks)
        ways = {"autoregressive": _generate(batch.decoder, None, session.progress)}
        if batch.draft is not None:
            ways["speculative"] = _generate(batch.decoder, batch.draft, session.progress)
        unit = Unit(number, batch.prefill_s, ways, interference.description())
        new.append(session.stored.add(unit))
        if unit.disturbed:
            log.info("batch %d, repeat %d: %s", number, len(new), unit.disturbed)
        if number == session.plan.config.batch.num_batches - 1:
            done = session.stored.units.num_repeats
            times = {way: [rows] for way, rows in unit.times().items()}
            session.progress.report(repeat_line(done, times))


def _audited(batch: Batch, unit: Unit) -> Audit:
    """Return the audit of what a unit has written."""
    plain = unit.ways["autoregressive"]
    fast = unit.ways["speculative"]
    return audit(batch.decoder, plain.tokens, fast.tokens, fast.accepted)


def _profiled(session: Session, batch: Batch) -> Metrics:
    """Return the times of the parts of a round; for an adaptive draft, at the gamma that ran
    most.
    """
    repeats = session.plan.config.settings(Compare).profile_repeats
    with session.progress.task("profiling", total=None):
        times = profile_round(batch, repeats, session.figures.gamma)
    results: Metrics = {f"time/{name}": value for name, value in times.items()}
    if batch.draft is not None:
        results["time/impossible"] = is_impossible(results)
    return results


def _routed(session: Session, batch: Batch, run: "Run") -> Metrics:
    """Record which experts the last batch's tokens choose, a line for each layer."""
    number = session.plan.config.batch.num_batches - 1
    written = session.stored.units.of_batch(number)[0].ways["autoregressive"].tokens
    most = max(session.plan.config.gammas) + 1
    lines = expert_choices.layer_lines(batch.decoder, written, most)
    if lines:
        run.write_lines("routing", lines)
    return expert_choices.metrics_of(lines)


def _opened(session: Session, engine: NativeEngine, number: int) -> Batch:
    """Return a prefilled batch, warmed up. An earlier job may have done the prefill."""
    plan = session.plan
    rows = int(session.plan.config.batch.size)
    start = rows * number
    tokens = session.prompts.tokens[start : start + rows]
    key = prefill_key(plan, start)
    # A draft that listens needs the target's hidden states, which are not kept.
    shared = (
        None
        if engine.draft.listens
        else SHARED.prefilled(key, engine.capacity(max(map(len, tokens))))
    )
    batch = engine.open(tokens, start, shared.cache if shared else None)
    if SHARED.keeps_prefills:  # the next job's policy may score by them
        batch.decoder.cache.keep_queries(USUALLY_KEPT)
    if batch.decoder.cache.lacks_queries:
        shared = None
    if shared:
        batch.decoder.resume(shared.last_BE)
    prefilled = shared or _prefill(batch, engine, session.progress, rehearses=start == 0)
    SHARED.keep(key, prefilled, plan.config.batch.num_batches)
    batch.prefill_s = prefilled.seconds
    session.prefills_shared.append(shared is not None)
    session.progress.report({"live/prefill_s": prefilled.seconds})
    warm_up(batch)
    return batch


def _prefill(batch: Batch, engine: NativeEngine, progress: Progress, rehearses: bool) -> Prefilled:
    decoder = batch.decoder
    if rehearses:
        with progress.task("warm-up", total=None):
            decoder.rehearse_prefill(engine.prefill_chunk)
    with progress.task("prefill", total=decoder.state.max_prompt_len) as task:
        seconds = decoder.prefill(engine.prefill_chunk, task.advance)
    decoder.state.check_finite("in the prefill")
    return Prefilled(decoder.cache, decoder.last_BE, seconds)


def _generate(decoder: Decoder, draft: Draft | None, progress: Progress) -> Generation:
    way = "autoregressive" if draft is None else "speculative"
    with progress.task(way, total=decoder.state.max_len - decoder.state.max_prompt_len) as task:
        return decoder.generate(draft, Points(decoder.state, way, task, progress))


def _roofline(session: Session, batch: Batch, measured: Metrics) -> Metrics:
    """Return the bytes that a step must read over its time, as a share of the bandwidth. That comes
    from `hardware`, or is measured: variants of a device may share a name.
    """
    plan = session.plan
    given = plan.config.hardware.bandwidth_gbs
    measured_at = ("bandwidth", plan.device)
    bandwidth = (
        given * 1e9 if given else SHARED.fact(measured_at, lambda: read_bandwidth(plan.device))
    )
    target = batch.decoder.target  # one rank's share, as the bandwidth is one device's
    rows = batch.decoder.cache.num_rows
    verified = rows * (session.figures.gamma + 1)
    kv = sum(
        memory.read_bytes(length, plan.dtype.itemsize)
        for memory in target.config.memories
        for length in batch.decoder.state.prompt_len_B.tolist()
    )
    result: Metrics = {"roofline/bandwidth_gbs": bandwidth / 1e9}
    for name, num_tokens in (("target_decode", rows), ("verify", verified)):
        if f"time/{name}_ms" in measured:
            weights = target.step_weight_bytes(num_tokens)
            result[f"roofline/{name}"] = (
                (weights + kv) / (measured[f"time/{name}_ms"] / 1e3) / bandwidth
            )
    return result


def _memory(batch: Batch, peak: memory_use.Peak) -> Metrics:
    return {
        "memory/peak_gib": peak.num_bytes / GIB,
        "memory/target_kv_gib": batch.decoder.cache.num_bytes / GIB,
        "memory/draft_kv_gib": batch.draft.cache_bytes / GIB if batch.draft else 0.0,
    }
