"""scenario=compare on another engine: the same prompts, metrics and files as on ours, except for
what needs a look inside (the profile of a round, the logits of the audit, the cost model).
"""

from dataclasses import replace
from typing import Any

from magicdec.config.registry import ENGINES
from magicdec.config.schema import Compare
from magicdec.measure import memory_use, metrics
from magicdec.measure.metrics import Metrics
from magicdec.measure.system import Watch
from magicdec.peers.base import Counts, Peer, PeerGeneration, PeerSpec
from magicdec.planning import build
from magicdec.planning.resolved import Plan
from magicdec.scenarios.outcome import Outcome
from magicdec.scenarios.outputs import Outputs, lossless, speeds
from magicdec.tracking.progress import Progress
from magicdec.tracking.store import Run
from magicdec.units import GIB

WARMUP_CONTEXT, WARMUP_TOKENS = 64, 8

Repeat = list[PeerGeneration]  # a generation per batch


def run(plan: Plan, run: Run, progress: Progress) -> Outcome:
    """Decode every batch `scenario.repeats` times both ways, one way after the other; medians are
    the result.

    A peer prefills in every pass: its time to first token is a median, too.
    """
    config, batch = plan.config, plan.config.batch
    tokenizer = build.tokenizer(plan)
    prompts = build.prompts(plan, tokenizer)
    rows = prompts.tokens
    batches = [
        rows[start : start + int(batch.size)] for start in range(0, len(rows), int(batch.size))
    ]
    gpu = Watch(plan.device)
    with progress.task(f"loading {config.engine.name}", total=None):
        engine = load(plan)
    with engine:
        plain = _passes(engine, batches, "autoregressive", plan, progress)
        fast = (
            _passes(engine, batches, "speculative", plan, progress)
            if config.draft.name != "none"
            else []
        )
        peak, version = engine.peak_bytes, engine.version
    outputs = Outputs(prompts, _tokens(plain[0]), _tokens(fast[0]) if fast else [])
    results: Metrics = {**prompts.facts, "output/fingerprint": outputs.fingerprint}
    results |= {
        "device": plan.device_name,
        "engine/version": version,
        **plan.sources,
    } | gpu.metrics()
    results |= speeds([_speed(repeat) for repeat in plain], [_speed(repeat) for repeat in fast]) | {
        "repeats": len(plain)
    }
    results |= outputs.sizes_by_category
    if fast:
        counts = sum((generation.counts for repeat in fast for generation in repeat), Counts())
        gamma = max(config.gammas)
        results |= counts.metrics(gamma) | {"gamma": gamma, "acceptance/source": "measured"}
        results |= lossless(plan, outputs.autoregressive, outputs.speculative)
    results |= outputs.accuracy(tokenizer) | {"memory/peak_gib": peak / GIB}
    return Outcome(
        results, outputs.rows(config.data.save_prompts), samples=outputs.samples(tokenizer)
    )


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
    }
    return ENGINES[c.engine.name].work(PeerSpec(**settings | changes))


def _passes(
    engine: Peer, batches: list[list[list[int]]], way: str, plan: Plan, progress: Progress
) -> list[Repeat]:
    """Return the repeats of one way, after a short warm-up."""
    generate_len, fast = plan.config.batch.generate_len, way == "speculative"
    repeats = int(plan.config.settings(Compare).repeats)
    with progress.task(way, total=repeats * len(batches)) as task:
        engine.generate([row[:WARMUP_CONTEXT] for row in batches[0]], WARMUP_TOKENS, fast)
        passes: list[Repeat] = []
        for _ in range(repeats):
            passes.append([])
            for number, batch in enumerate(batches):
                passes[-1].append(
                    engine.generate(batch, generate_len, fast, number * len(batches[0]))
                )
                task.advance(1)
    return passes


def _tokens(batches: Repeat) -> list[list[int]]:
    return [row for generation in batches for row in generation.tokens]


def _speed(batches: Repeat) -> dict[str, float]:
    return metrics.speed_metrics([generation.times for generation in batches])
