"""The default scenario: the same prompts autoregressively and speculatively, paired, audited and profiled."""

import logging
from dataclasses import dataclass
from statistics import fmean, median

from magicdec import build
from magicdec.costmodel.beside import beside, published
from magicdec.costmodel.hardware import device_in
from magicdec.costmodel.speedup import speculative_time
from magicdec.data.base import Prompts
from magicdec.data.ruler import accuracy
from magicdec.decoding.audit import Audit, audit
from magicdec.decoding.decoder import Decoder, Generation
from magicdec.engines.native import Batch, NativeEngine, warm_up
from magicdec.errors import UserError
from magicdec.measure import memory, metrics
from magicdec.measure.ceilings import matmul_rate
from magicdec.measure.footprint import Footprint
from magicdec.measure.gpu import Watch
from magicdec.measure.metrics import Metrics
from magicdec.measure.profile import profile_round
from magicdec.scenarios.foresee import setup_of_run, task_of
from magicdec.scenarios.outcome import Outcome
from magicdec.tracking.progress import Progress
from magicdec.tracking.reader import NOISY

log = logging.getLogger(__name__)

NUM_SAMPLES = 4  # rows whose text is logged
SAMPLE_PROMPT_TOKENS = 64  # the end of their prompts


@dataclass
class Pass:
    """One repeat over all batches: the two generations of each."""

    autoregressive: list[Generation]
    speculative: list[Generation]


def compare(plan: build.Plan, progress: Progress) -> Outcome:
    """Decode every batch `scenario.repeats` times both ways; medians over the repeats are the result."""
    config = plan.config
    estimate = build.check_memory(plan, int(config.batch.size), config.batch.context_len)
    tokenizer = build.tokenizer(plan)
    prompts = build.prompts(plan, tokenizer)
    peak, gpu = memory.Peak(plan.device), Watch(plan.device)
    engine = build.engine(plan, progress)
    rows = int(config.batch.size)
    passes = [Pass([], []) for _ in range(config.scenario.repeats)]
    prefill_seconds: list[float] = []
    audits: list[Audit] = []
    for start in range(0, len(prompts.tokens), rows):
        batch = engine.open(prompts.tokens[start : start + rows])
        if not prefill_seconds:
            with progress.task("warm-up", total=None):
                batch.decoder.rehearse_prefill(engine.prefill_chunk)
        prefill_seconds.append(_prefill(batch, engine, progress))
        warm_up(batch)
        for one in passes:
            one.autoregressive.append(_generate(batch.decoder, None, "autoregressive", progress))
            if batch.draft is not None:
                one.speculative.append(_generate(batch.decoder, batch, "speculative", progress))
        if build.is_audited(plan):
            first = passes[0]
            audits.append(audit(batch.decoder, first.autoregressive[-1].tokens, first.speculative[-1].tokens))
        if start + rows < len(prompts.tokens):  # the last one is profiled below
            batch.close()  # or the caches of two batches would be held at once
    results: Metrics = {"data/fingerprint": prompts.fingerprint, "device": plan.device_name, **plan.sources}
    results |= _speeds(passes, prefill_seconds) | gpu.metrics()
    speculative = [generation for one in passes for generation in one.speculative]
    gamma = metrics.usual_gamma(speculative)
    if speculative:
        results |= metrics.acceptance_metrics(speculative) | {"gamma": gamma}
        results["acceptance/source"] = "measured" if config.draft.synthetic_acceptance is None else "synthetic"
        results |= _lossless(audits)
    if config.draft.synthetic_acceptance is None:  # otherwise what is written means nothing
        results |= _accuracy(tokenizer, prompts, passes[0])
    if batch.draft is not None and gamma:  # an adaptive one is profiled as it ran most
        batch.draft.gamma = gamma
    with progress.task("profiling", total=None):
        times = profile_round(batch, config.scenario.profile_repeats)
    results |= {f"time/{name}": value for name, value in times.items()}
    results |= _memory(batch, peak, estimate)  # first: measuring the bandwidth takes memory of its own
    results |= _formula(results, gamma) | _roofline(plan, batch, times)
    results |= _predicted(plan, results, gamma)
    return Outcome(
        results,
        _generations(prompts, passes[0], config.data.save_prompts),
        _history(passes[0]),
        _samples(tokenizer, prompts, passes[0]),
    )


def _prefill(batch: Batch, engine: NativeEngine, progress: Progress) -> float:
    with progress.task("prefill", total=batch.decoder.state.max_prompt_len) as task:
        return batch.decoder.prefill(engine.prefill_chunk, task.advance)


def _generate(decoder: Decoder, batch: Batch | None, name: str, progress: Progress) -> Generation:
    with progress.task(name, total=decoder.state.max_len - decoder.state.max_prompt_len) as task:
        return decoder.generate(batch.draft if batch else None, task.advance)


def _speeds(passes: list[Pass], prefill_seconds: list[float]) -> Metrics:
    """Medians over the repeats; a speedup is formed within a repeat, so that a slow spell hits both of its sides."""
    result: Metrics = {}
    plain = [metrics.speed_metrics(one.autoregressive, prefill_seconds) for one in passes]
    fast = [metrics.speed_metrics(one.speculative, prefill_seconds) for one in passes if one.speculative]
    for name, repeats in (("autoregressive", plain), ("speculative", fast)):
        for key in repeats[0] if repeats else ():
            result[f"{name}/{key}"] = median(r[key] for r in repeats)
    for name, key in (("speedup", "time_per_output_token_ms"), ("speedup_wall", "decode_s")):
        ratios = [a[key] / s[key] for a, s in zip(plain, fast, strict=False)]
        if ratios:
            result[name] = median(ratios)
            if len(ratios) > 1:
                result[f"{name}_spread"] = spread = metrics.spread(ratios)
                result.setdefault("noisy", spread > NOISY)  # that of speedup, the first
    return result


def _lossless(audits: list[Audit]) -> Metrics:
    if not audits:
        return {"lossless/identical": None, "lossless/max_logit_gap": None}
    return {
        "lossless/identical": all(a.identical for a in audits),
        "lossless/excused_rows": sum(a.excused for a in audits),
        "lossless/max_logit_gap": max(a.max_logit_gap for a in audits),
        "lossless/baseline_max_logit_gap": max(a.baseline_max_logit_gap for a in audits),
    }


def _accuracy(tokenizer, prompts: Prompts, one: Pass) -> Metrics:
    """The mean share of a task's answers in the output of either way; nothing where the prompts are no task."""
    result: Metrics = {}
    for name, generations in (("autoregressive", one.autoregressive), ("speculative", one.speculative)):
        outputs = [tokenizer.decode(row) for g in generations for row in g.tokens] if prompts.answers else []
        if outputs:
            result[f"{name}/accuracy"] = fmean(map(accuracy, outputs, prompts.answers))
    return result


def _formula(results: Metrics, gamma: int) -> Metrics:
    """The speedup that the paper's formula gives for the times and the acceptance just measured."""
    if "alpha" not in results:
        return {}
    names = ("time/target_decode_ms", "time/draft_ms", "time/verify_ms", "alpha", "speedup")
    decode, draft, verify, alpha, speedup = (float(results[name] or 0.0) for name in names)
    formula = decode / speculative_time(gamma, alpha, draft, verify)
    return {"formula/speedup": formula, "formula/speedup_error": formula / speedup - 1}


def _roofline(plan: build.Plan, batch: Batch, times: dict[str, float]) -> Metrics:
    """Bytes that must be read, over the time taken and the bandwidth: the datasheet's, or measured where unknown."""
    known = plan.config.hardware.bandwidth_gbs
    bandwidth = known * 1e9 if known else memory.read_bandwidth(plan.device)
    target = batch.decoder.target  # one rank's share, as the bandwidth is one device's
    weights = sum(parameter.nbytes for parameter in target.parameters())
    kv = memory.kv_bytes(target.config, int(batch.decoder.state.prompt_len_B.sum()), plan.dtype)
    result: Metrics = {"roofline/bandwidth_gbs": bandwidth / 1e9}
    for name in ("target_decode", "verify"):
        if f"{name}_ms" in times:
            result[f"roofline/{name}"] = (weights + kv) / (times[f"{name}_ms"] / 1e3) / bandwidth
    return result


def _predicted(plan: build.Plan, results: Metrics, gamma: int) -> Metrics:
    """What the cost model says of these rounds, at the acceptance that was measured, and how far it is off."""
    known = device_in(plan.device_name)
    rate = None if known else matmul_rate(plan.device, plan.dtype) / 1e12
    draft = plan.draft.config if plan.draft else None
    bandwidth = float(results["roofline/bandwidth_gbs"] or 0.0)
    try:
        setup = setup_of_run(
            plan.config, plan.target.config, draft, plan.device_name, plan.dtype.itemsize, bandwidth, rate
        )
        return beside(setup, gamma, results) | published(setup, task_of(plan.config))
    except UserError as error:  # no draft, or one that has no cost model
        log.info("not predicted: %s", error)
        return {}


def _memory(batch: Batch, peak: memory.Peak, estimate: Footprint) -> Metrics:
    return {
        "memory/peak_gib": peak.num_bytes / memory.GIB,
        "memory/estimated_gib": estimate.total / memory.GIB,
        "memory/target_kv_gib": batch.decoder.cache.num_bytes / memory.GIB,
        "memory/draft_kv_gib": batch.draft.cache_bytes / memory.GIB if batch.draft else 0.0,
    }


def _generations(prompts: Prompts, one: Pass, save_prompts: bool) -> list[dict]:
    plain = [row for g in one.autoregressive for row in g.tokens]
    fast = [row for g in one.speculative for row in g.tokens]
    rows = []
    for index, (prompt, tokens) in enumerate(zip(prompts.tokens, plain, strict=True)):
        speculative = fast[index] if fast else None
        row = {"row": index, "context_len": len(prompt), "autoregressive": tokens, "speculative": speculative}
        row |= {"answers": prompts.answers[index]} if prompts.answers else {}
        rows.append(row | {"prompt": prompt} if save_prompts else row)
    return rows


def _history(one: Pass) -> list[dict]:
    rounds: list[dict] = []
    for number, generation in enumerate(one.speculative):
        for row in metrics.round_history(generation):
            rounds.append(row | {"batch": number, "round": len(rounds)})
    return rounds


def _samples(tokenizer, prompts: Prompts, one: Pass) -> list[dict]:
    """The text of a few rows: the prompt's end and what both ways wrote."""
    if tokenizer is None:
        return []
    rows = _generations(prompts, one, save_prompts=True)[:NUM_SAMPLES]
    return [
        {
            "row": row["row"],
            "prompt_end": tokenizer.decode(row["prompt"][-SAMPLE_PROMPT_TOKENS:]),
            "autoregressive": tokenizer.decode(row["autoregressive"]),
            "speculative": tokenizer.decode(row["speculative"]) if row["speculative"] else None,
        }
        for row in rows
    ]
