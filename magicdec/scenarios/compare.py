"""The default scenario: the same prompts autoregressively and speculatively, paired, audited and profiled."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean

from magicdec.config.schema import Compare
from magicdec.costmodel.acceptance import task_of
from magicdec.costmodel.comparison import limit_metrics, predicted_metrics, published
from magicdec.costmodel.hardware import device_in
from magicdec.costmodel.memory import Memory
from magicdec.costmodel.speedup import batch_speedup, round_time
from magicdec.costmodel.speedup import speedup as formula_speedup
from magicdec.data import Prompts
from magicdec.drafts.base import Draft
from magicdec.engine.audit import Audit, audit
from magicdec.engine.decoder import Decoder, Generation
from magicdec.engine.native import Batch, NativeEngine, warm_up
from magicdec.errors import UserError
from magicdec.measure import memory, metrics
from magicdec.measure.ceilings import matmul_rate, read_bandwidth
from magicdec.measure.metrics import Metrics, Times
from magicdec.measure.profile import profile_round
from magicdec.measure.system import Watch
from magicdec.planning import build
from magicdec.planning.resolve import Plan, resolve
from magicdec.planning.shared import SHARED, Prefilled, prefill_key
from magicdec.scenarios.outcome import Outcome, keeping
from magicdec.scenarios.outputs import Outputs, lossless, speeds
from magicdec.scenarios.points import Points
from magicdec.scenarios.repeats import Earlier, Repeat, precision, repeats
from magicdec.tracking.progress import Progress
from magicdec.tracking.reader import is_impossible
from magicdec.units import GIB, WAYS

log = logging.getLogger(__name__)
prepare = resolve


@dataclass
class Measured:
    """The measurements of all batches; the last batch is still open."""

    batch: Batch
    repeats: list[Repeat] = field(default_factory=list)
    prefill_seconds: list[float] = field(default_factory=list)
    num_shared: int = 0  # batches whose prefill an earlier job has done
    verdict: Audit | None = None
    earlier: Sequence[Times] = ()  # the repeats of earlier attempts

    @property
    def speculative(self) -> list[Generation]:
        """Return the speculative generations of all repeats and batches."""
        return [generation for one in self.repeats for generation in one.speculative]

    @property
    def times(self) -> list[Times]:
        """Return the times of every repeat, those of earlier attempts first."""
        return [*self.earlier, *(one.times(self.prefill_seconds) for one in self.repeats)]


def run(plan: Plan, progress: Progress) -> Outcome:
    """Decode every batch `scenario.repeats` times both ways; medians over the repeats are the result."""
    config = plan.config
    estimate = build.check_memory(plan, int(config.batch.size), config.batch.context_len)
    tokenizer = build.tokenizer(plan)
    prompts = build.prompts(plan, tokenizer)
    peak, gpu = memory.Peak(plan.device, SHARED.num_bytes), Watch(plan.device)
    engine = build.engine(plan, progress)
    earlier = Earlier.read(plan.earlier, int(config.batch.size)) if plan.earlier else Earlier()
    measured = _decoded(plan, engine, prompts, earlier.times, progress)
    batch, first = measured.batch, measured.repeats[0]
    outputs = first.outputs(prompts)
    measured.earlier = earlier.of_the_same(outputs)
    outputs = replace(outputs, decode_s=_decode_seconds(measured.times))
    results: Metrics = {**prompts.facts, "output/fingerprint": outputs.fingerprint}
    results |= {"device": plan.device_name, "prefill/shared": measured.num_shared > 0, **plan.sources} | gpu.metrics()
    results |= _figures(plan, measured, outputs)
    if config.draft.synthetic_acceptance is None:  # otherwise what is written means nothing
        results |= outputs.accuracy(tokenizer)
    if plan.turn and len(measured.times) < int(config.settings(Compare).repeats):
        batch.close()
        return Outcome(results, outputs.rows(config.data.save_prompts), _history(first))
    gamma = results.get("gamma", config.gammas[-1])
    results |= _profiled(plan, batch, gamma, progress)
    growth = 1 + config.batch.generate_len / 2 / fmean(map(len, prompts.tokens))
    results |= metrics.agreement(results, measured.speculative, growth)
    results |= _memory(batch, peak, estimate)  # first: measuring the bandwidth takes memory of its own
    results |= _formula(plan, results, gamma) | _roofline(plan, batch, results)
    if gamma:
        results |= _predicted(plan, results, gamma)
    history = _history(first)
    batch.close()
    return Outcome(results, outputs.rows(config.data.save_prompts), history, outputs.samples(tokenizer))


def _decoded(
    plan: Plan, engine: NativeEngine, prompts: Prompts, earlier: Sequence[Times], progress: Progress
) -> Measured:
    """Prefill, decode and audit one batch after another; `earlier` repeats count towards an interval."""
    rows, scenario = int(plan.config.batch.size), plan.config.settings(Compare)
    scenario = replace(scenario, repeats=1) if plan.turn else scenario
    measured: Measured | None = None
    for start in range(0, len(prompts.tokens), rows):
        if measured is not None:
            measured.batch.close()  # or the caches of two batches would be held at once
        batch, seconds, was_shared = _opened(plan, engine, prompts.tokens[start : start + rows], start, progress)
        measured = replace(measured, batch=batch) if measured else Measured(batch)
        measured.prefill_seconds.append(seconds)
        measured.num_shared += was_shared
        progress.report({"live/prefill_s": seconds})
        warm_up(batch)
        is_last = start + rows >= len(prompts.tokens)
        with keeping(partial(_partial, plan, measured, prompts, is_last)):
            asked = repeats(scenario, plan.config.batch.num_batches, measured.repeats, earlier)
            for number, one in enumerate(asked, start=1):
                one.autoregressive.append(_generate(batch.decoder, None, progress))
                if batch.draft is not None:
                    one.speculative.append(_generate(batch.decoder, batch.draft, progress))
                if is_last:
                    progress.report(_reported(number, one.times(measured.prefill_seconds)))
        if plan.is_audited:
            first = measured.repeats[0]
            found = audit(batch.decoder, first.autoregressive[-1].tokens, first.speculative[-1].tokens)
            measured.verdict = measured.verdict + found if measured.verdict else found
    assert measured is not None, "there is a batch"
    return measured


def _figures(plan: Plan, measured: Measured, outputs: Outputs) -> Metrics:
    """Return the speeds of both ways and, with a draft, acceptance, intervals and losslessness."""
    times = measured.times
    ways = [[metrics.speed_metrics(one[way]) for one in times if way in one] for way in WAYS]
    results = speeds(*ways) | {"repeats": len(times)} | outputs.sizes_by_category
    if (reached := precision(times)) is not None:
        results["speedup_precision"] = reached
    if speculative := measured.speculative:
        gamma = metrics.usual_gamma(speculative) or plan.config.gammas[-1]  # every row ended at its first token
        rounds = metrics.rounds_of_prompts(one.speculative for one in measured.repeats)
        results |= metrics.acceptance(sum(rounds, metrics.Rounds())) | {"gamma": gamma}
        results |= metrics.interval_metrics(rounds, times)
        results |= metrics.category_acceptance(outputs.prompts.categories, rounds)
        synthetic = plan.config.draft.synthetic_acceptance is not None
        results["acceptance/source"] = "synthetic" if synthetic else "measured"
        results |= lossless(plan, outputs.autoregressive, outputs.speculative, measured.verdict)
    return results


def _profiled(plan: Plan, batch: Batch, gamma: int, progress: Progress) -> Metrics:
    """Return the times of the parts of a round; for an adaptive draft, at the gamma that ran most."""
    with progress.task("profiling", total=None):
        times = profile_round(batch, plan.config.settings(Compare).profile_repeats, gamma)
    results: Metrics = {f"time/{name}": value for name, value in times.items()}
    if batch.draft is not None:
        results["time/impossible"] = is_impossible(results)
    return results


def _opened(
    plan: Plan, engine: NativeEngine, tokens: list[list[int]], start: int, progress: Progress
) -> tuple[Batch, float, bool]:
    """Return a prefilled batch, the seconds that the prefill took, and whether an earlier job has done it."""
    key = prefill_key(plan, start)
    # A draft that listens needs the target's hidden states, which are not kept.
    shared = None if engine.draft.listens else SHARED.prefilled(key, engine.capacity(max(map(len, tokens))))
    batch = engine.open(tokens, start, shared.cache if shared else None)
    if shared:
        batch.decoder.resume(shared.last_BE)
    prefilled = shared or _prefill(batch, engine, progress, rehearses=start == 0)
    SHARED.keep(key, prefilled, plan.config.batch.num_batches)
    return batch, prefilled.seconds, shared is not None


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


def _partial(plan: Plan, measured: Measured, prompts: Prompts, is_last: bool) -> Outcome:
    """Return the results of the complete repeats, for a run that ends early."""
    ways = 2 if plan.config.speculates else 1
    batches = len(measured.prefill_seconds)
    complete = [one for one in measured.repeats if len(one.autoregressive + one.speculative) == ways * batches]
    if not (complete and is_last):
        return Outcome({})
    done = replace(measured, repeats=complete)
    outputs = replace(complete[0].outputs(prompts), decode_s=_decode_seconds(done.times))
    figures = {**prompts.facts, "device": plan.device_name, **plan.sources} | _figures(plan, done, outputs)
    return Outcome(figures, outputs.rows(plan.config.data.save_prompts), _history(complete[0]))


def _reported(number: int, times: Times) -> dict[str, float]:
    """Return the line that reports a repeat."""
    ways = {way: metrics.speed_metrics(batches) for way, batches in times.items()}
    line = {"repeat": number, "repeat/seconds": sum(way["decode_s"] for way in ways.values())}
    line |= {f"repeat/{way}/tokens_per_second": speed["tokens_per_second"] for way, speed in ways.items()}
    found = speeds(*([ways[way]] if way in ways else [] for way in WAYS))
    return line | {f"repeat/{key}": found[key] for key in ("speedup", "speedup_wall") if key in found}


def _decode_seconds(times: Sequence[Times]) -> list[dict[str, list[float]]]:
    """Return the seconds that each row took in every repeat, by way."""
    found: list[dict[str, list[float]]] = []
    for way in times[0]:
        repeats = [[row.decode for batch in one[way] for row in batch] for one in times]
        found = found or [{} for _ in repeats[0]]
        for row, seconds in zip(found, zip(*repeats, strict=True), strict=True):
            row[way] = [*seconds]
    return found


def _formula(plan: Plan, results: Metrics, gamma: int) -> Metrics:
    """Return the speedup by the paper's formula, from the measured times and acceptance: for a row and, where all rows
    become equally long, in wall-clock time for the batch, which waits for its slowest row.
    """
    if "alpha" not in results or "speedup" not in results:
        return {}
    names = ("time/target_decode_ms", "time/draft_ms", "time/verify_ms", "alpha", "speedup")
    decode, draft, verify, alpha, speedup = (float(results[name] or 0.0) for name in names)
    formula = formula_speedup(gamma, alpha, decode, draft, verify)
    found: Metrics = {"formula/speedup": formula, "formula/speedup_error": formula / speedup - 1}
    if plan.config.sampling.ignore_eos:
        rows, steps = int(plan.config.batch.size), plan.config.batch.generate_len - 1  # the prefill gives the first
        whole = round_time(gamma, draft, verify)
        found["formula/speedup_wall"] = batch_speedup(gamma, alpha, rows, steps, decode, whole)
    return found


def _roofline(plan: Plan, batch: Batch, measured: Metrics) -> Metrics:
    """Return the bytes that a step must read over its time, as a share of the bandwidth. That comes from `hardware`, or
    is measured: variants of a device may share a name.
    """
    given = plan.config.hardware.bandwidth_gbs
    measured_at = ("bandwidth", plan.device)
    bandwidth = given * 1e9 if given else SHARED.fact(measured_at, lambda: read_bandwidth(plan.device))
    target = batch.decoder.target  # one rank's share, as the bandwidth is one device's
    weights = target.step_weight_bytes
    kv = memory.kv_bytes(target.config, int(batch.decoder.state.prompt_len_B.sum()), plan.dtype)
    result: Metrics = {"roofline/bandwidth_gbs": bandwidth / 1e9}
    for name in ("target_decode", "verify"):
        if f"time/{name}_ms" in measured:
            result[f"roofline/{name}"] = (weights + kv) / (measured[f"time/{name}_ms"] / 1e3) / bandwidth
    return result


def _predicted(plan: Plan, results: Metrics, gamma: int) -> Metrics:
    """Return the prediction for these rounds at the measured acceptance, and its errors."""
    known = device_in(plan.device_name)
    measured_at = ("matmul rate", plan.device, plan.dtype)
    rate = None if known else SHARED.fact(measured_at, lambda: matmul_rate(plan.device, plan.dtype)) / 1e12
    bandwidth = float(results["roofline/bandwidth_gbs"] or 0.0)
    try:
        setup = plan.setup(bandwidth, rate).at(context=round(results["data/context_len_mean"]))  # type: ignore[arg-type]
        predicted = predicted_metrics(setup, gamma, results, plan.config.batch.generate_len)
        return predicted | limit_metrics(setup, gamma, results) | published(setup, task_of(plan.config), gamma)
    except UserError as error:  # a draft that has no cost model
        log.info("not predicted: %s", error)
        return {}


def _memory(batch: Batch, peak: memory.Peak, estimate: Memory) -> Metrics:
    return {
        "memory/peak_gib": peak.num_bytes / GIB,
        "memory/estimated_gib": estimate.total / GIB,
        "memory/target_kv_gib": batch.decoder.cache.num_bytes / GIB,
        "memory/draft_kv_gib": batch.draft.cache_bytes / GIB if batch.draft else 0.0,
    }


def _history(one: Repeat) -> list[dict]:
    rounds: list[dict] = []
    for number, generation in enumerate(one.speculative):
        for row in metrics.round_history(generation):
            rounds.append(row | {"batch": number, "round": len(rounds)})
    return rounds
