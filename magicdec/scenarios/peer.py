"""scenario=compare on another engine: the same prompts, metrics and files as on ours, except for
what needs a look inside (the profile of a round, the logits of the audit, the cost model).
"""

from dataclasses import replace
from typing import Any

from magicdec.config.registry import ENGINES
from magicdec.config.scenario_settings import Compare
from magicdec.data import Prompts
from magicdec.measure import memory_use, metrics
from magicdec.measure.metrics import Metrics
from magicdec.measure.system import Watch
from magicdec.peers.base import AcceptanceCounts, Peer, PeerSpec
from magicdec.planning import build
from magicdec.planning.resolved import Plan
from magicdec.scenarios.outcome import Outcome
from magicdec.scenarios.outputs import Outputs, lossless, speeds
from magicdec.scenarios.peer_units import PeerRepeat, PeerUnit, PeerUnits
from magicdec.scenarios.repeats import Goal
from magicdec.tracking.progress import Progress
from magicdec.tracking.store import Run
from magicdec.units import GIB, WAYS

WARMUP_CONTEXT, WARMUP_TOKENS = 64, 8


def run(plan: Plan, run: Run, progress: Progress) -> Outcome:
    """Decode what the run lacks of `scenario.repeats` of every batch, one way after the other;
    medians over all repeats are the result.

    A peer prefills in every pass: its time to first token is a median, too.
    """
    tokenizer = build.tokenizer(plan)
    prompts = build.prompts(plan, tokenizer)
    build.warn_about(plan, prompts)
    gpu = Watch(plan.device)
    units = PeerUnits(run, plan.config.batch.num_batches)
    _decode(plan, units, prompts.tokens, progress)
    outputs = _outputs(units, prompts)
    results = _figures(plan, units, outputs) | gpu.metrics() | outputs.accuracy(tokenizer)
    rows = outputs.rows(plan.config.data.save_prompts)
    return Outcome(results, rows, samples=outputs.samples(tokenizer))


def so_far(plan: Plan, run: Run) -> Outcome:
    """Return the figures of the complete repeats of a run that has failed."""
    units = PeerUnits(run, plan.config.batch.num_batches)
    if not units.repeats("autoregressive"):
        return Outcome({})
    outputs = _outputs(units, build.prompts(plan, build.tokenizer(plan)))
    rows = outputs.rows(plan.config.data.save_prompts)
    return Outcome(_figures(plan, units, outputs), rows)


def _decode(plan: Plan, units: PeerUnits, prompts: list[list[int]], progress: Progress) -> None:
    """Decode what is missing in each way after a short warm-up; write each unit when it ends."""
    config = plan.config
    rows = int(plan.config.batch.size)
    batches = [prompts[start : start + rows] for start in range(0, len(prompts), rows)]
    wanted = Goal(config.settings(Compare), units.run.before).wanted
    ways = WAYS if config.speculates else WAYS[:1]
    missing = {way: units.missing(way, wanted) for way in ways}
    if not any(missing.values()):
        return
    with progress.task(f"loading {config.engine.name}", total=None):
        engine: Peer = load(plan)
    with engine:
        for way, numbers in missing.items():
            if not numbers:
                continue
            fast = way == "speculative"
            with progress.task(way, total=len(numbers)) as task:
                engine.generate([row[:WARMUP_CONTEXT] for row in batches[0]], WARMUP_TOKENS, fast)
                for number in numbers:
                    generation = engine.generate(
                        batches[number], config.batch.generate_len, fast, number * rows
                    )
                    unit = PeerUnit(number, way, generation, engine.version, engine.peak_bytes)
                    units.add(unit, number)
                    task.advance(1)


def _outputs(units: PeerUnits, prompts: Prompts) -> Outputs:
    """Return the tokens of the first repeat of each way."""
    plain = units.repeats("autoregressive")
    fast = units.repeats("speculative")
    return Outputs(prompts, _tokens(plain[0]), _tokens(fast[0]) if fast else [])


def _figures(plan: Plan, units: PeerUnits, outputs: Outputs) -> Metrics:
    """Return what the units say. There is at least one autoregressive repeat."""
    plain = units.repeats("autoregressive")
    fast = units.repeats("speculative")
    results: Metrics = outputs.prompts.facts | {"output/fingerprint": outputs.fingerprint}
    results |= {
        "device": plan.device_name,
        "engine/version": units.units[-1].version,
        **plan.sources,
        "memory/peak_gib": max(unit.peak_bytes for unit in units.units) / GIB,
        "repeats": min(len(plain), len(fast)) if fast else len(plain),
    }
    results |= speeds([_speed(repeat) for repeat in plain], [_speed(repeat) for repeat in fast])
    results |= outputs.sizes_by_category
    if fast:
        generations = [generation for repeat in fast for generation in repeat]
        counts = sum((generation.counts for generation in generations), AcceptanceCounts())
        gamma = max(plan.config.gammas)
        results |= counts.metrics(gamma) | {"gamma": gamma, "acceptance/source": "measured"}
        results |= lossless(plan, outputs.autoregressive, outputs.speculative)
    return results


def load(plan: Plan, gamma: int | None = None, **changes: Any) -> Any:
    """Return another engine: a Peer, which loads its models, or a Servable. `changes` are those of
    its settings.
    """
    c = plan.config
    gamma = max(c.gammas) if gamma is None else gamma
    longest = plan.target.config.max_position_embeddings
    models = [model.config for model in (plan.target, plan.draft) if model is not None]
    settings: dict[str, Any] = {
        "target": str(plan.target.folder),
        "hardware": c.hardware,
        "num_rows": int(c.batch.size),
        # a round behind the last token, and the one that vLLM must have room for before it proposes
        "max_len": min(longest, c.batch.context_len + c.batch.generate_len + 2 * (gamma + 1)),
        "sampling": c.sampling,
        "eos_token_ids": () if c.sampling.ignore_eos else tuple(plan.target.config.eos_token_ids),
        "engine": c.engine,
        "draft": replace(c.draft, gamma=gamma) if c.speculates else c.draft,
        "cache": c.cache,
        "draft_folder": str(plan.draft.folder) if plan.draft else None,
        "gamma": gamma,
        "kv_bytes_per_token": sum(memory_use.kv_bytes(model, 1, plan.dtype) for model in models),
        "plugins": c.plugins,
        "target_choice": c.target,
        "prefill_chunk": c.batch.prefill_chunk,
    }
    return ENGINES[c.engine.name].work(PeerSpec(**settings | changes))


def _tokens(batches: PeerRepeat) -> list[list[int]]:
    return [row for generation in batches for row in generation.tokens]


def _speed(batches: PeerRepeat) -> dict[str, float]:
    return metrics.speed_metrics([generation.times for generation in batches])
