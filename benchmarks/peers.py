"""Our engine and others on a CPU, on the same prompts: decode tokens/s, time to first token, and what each has written.

    export MAGICDEC_SMOLLM2=models/smollm2-135m-q4 MAGICDEC_LLAMACPP_PYTHON=llamacpp-venv/bin/python
    python benchmarks/peers.py --minutes 38                      # writes docs/results/peers-cpu.md; telling cells first
    python benchmarks/peers.py --rows 16 --contexts 4096 8000    # these, too
    python benchmarks/peers.py --quick                           # small cells; writes nothing

Measures SmolLM2-135M where MAGICDEC_SMOLLM2 names a folder made by tools/get_smollm2.py, and the bundled pair. Engines
with an environment of their own take part where MAGICDEC_VLLM_PYTHON, MAGICDEC_LLAMACPP_PYTHON and
MAGICDEC_OPENVINO_PYTHON name one (docs/peers.md). All ways of decoding take turns at a cell, so that a ratio compares
times of the same minutes. The page is written after every way. Repeat the command to resume: what has been measured is
kept until a commit changes the package, conf/ or benchmarks/ (--restart forgets it). Comments on the results belong
into benchmarks/pages/peers-cpu.md.
"""

import argparse
import os
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import magicdec  # noqa: F401 - before PyTorch, which reads once how its threads wait

# isort: split
import peers_rows
import torch
from cpu import MODELS, SMOLLM2, at_the_limit, ceilings
from page import Cells
from peers_rows import OURS, PLAIN, Cell, Figures, Where, name_of

from magicdec.config.load import compose
from magicdec.config.registry import DRAFTS, ENGINES
from magicdec.costmodel.round import round_times
from magicdec.engine.decoder import Decoder
from magicdec.engine.native import Batch, warm_up
from magicdec.measure import metrics
from magicdec.measure.metrics import RowTimes
from magicdec.peers.process import WorkerPeer
from magicdec.planning import build
from magicdec.planning.resolve import Plan, resolve
from magicdec.scenarios.peer import WARMUP_CONTEXT, WARMUP_TOKENS, load
from magicdec.tracking.progress import progress

GAMMA = 3
OUR_DRAFTS = ("self", "ngram")  # with autoregressive decoding, all on one prefill
# How the others decode. llama.cpp looks up n-grams of one length, and finds few long ones.
WAYS = {
    "llamacpp": ("engine=llamacpp",),
    "openvino": ("engine=openvino",),
    "transformers": ("engine=transformers",),
    "vllm": ("engine=vllm",),
    "llamacpp, ngram": ("engine=llamacpp", "draft=ngram", "draft.max_ngram=2"),
    "openvino, prompt lookup": ("engine=openvino", "draft=ngram"),
    "transformers, prompt lookup": ("engine=transformers", "draft=ngram"),
    "vllm, ngram": ("engine=vllm", "draft=ngram"),
    "llamacpp, draft model": ("engine=llamacpp", "draft=model"),
    "openvino, draft model": ("engine=openvino", "draft=model"),
    "transformers, assisted": ("engine=transformers", "draft=model"),
    "vllm, draft model": ("engine=vllm", "draft=model"),
    "llamacpp, F16": ("engine=llamacpp", "hardware.dtype=float16"),
    "openvino, 8-bit KV": ("engine=openvino", "engine.kv_type=u8"),
}
LOOKUPS = ("llamacpp, ngram", "openvino, prompt lookup", "transformers, prompt lookup", "vllm, ngram")
ONE_ROW = ("transformers, assisted", "transformers, prompt lookup")
EVERY, FAST = tuple(WAYS), (*PLAIN, *LOOKUPS)
SMOL, TINY = "SmolLM2-135M", "tiny"
# Model, rows, context: the cells that say most, in the order in which they are measured, and how. A peer prefills in
# every pass, so that long cells leave no time for more.
TELLING: dict[Where, tuple[str, ...]] = {
    (SMOL, 8, 1024): FAST,
    (SMOL, 1, 1024): EVERY,
    (TINY, 8, 1024): EVERY,
    (SMOL, 4, 2048): FAST,
    (SMOL, 8, 4096): PLAIN,
    (SMOL, 16, 1024): PLAIN,
    (TINY, 16, 4096): PLAIN,
    (TINY, 8, 4096): PLAIN,
    (TINY, 16, 1024): PLAIN,
    (SMOL, 1, 8000): PLAIN,
    (TINY, 8, 8000): PLAIN,
    (SMOL, 8, 2048): PLAIN,
    (SMOL, 4, 4096): PLAIN,
    (SMOL, 1, 4096): PLAIN,
    (TINY, 4, 4096): PLAIN,
    (SMOL, 16, 2048): PLAIN,
    (TINY, 1, 1024): FAST,
    (TINY, 8, 2048): PLAIN,
    (TINY, 4, 2048): PLAIN,
    (TINY, 1, 4096): PLAIN,
}
CONTEXTS, ROWS = (1024, 2048, 4096, 8000), (1, 4, 8, 16)
NEW_TOKENS, REPEATS = 48, 2
ONCE = {SMOL: 5_000, TINY: 20_000}  # prompt tokens of a cell from which each way decodes it once
LLAMACPP_TOKENS = 8_192  # prompt tokens of a cell of SmolLM2 up to which llama.cpp takes part: more take it minutes
TIME_LIMIT_S = 600


def overrides_of(model: str) -> list[str]:
    """Return what chooses the target, without its draft."""
    return [override for override in MODELS[model] if not override.startswith("draft=")]


def prepared(model: str, rows: int, context: int, *overrides: str) -> Plan:
    """Return a plan as `launch.py` would make it."""
    sizes = [f"batch.context_len={context}", f"batch.size={rows}", f"batch.generate_len={NEW_TOKENS}"]
    drafts = [f"draft.gamma={GAMMA}"] if "draft" in "".join(overrides) else []
    return resolve(compose([*overrides_of(model), *overrides, *drafts, *sizes, "hardware=cpu"]))


def repeats_of(model: str, rows: int, context: int) -> int:
    """Return how often each way decodes a cell."""
    return REPEATS if rows * context < ONCE[model] else 1


def ours(*where: Any) -> Cell:
    """Measure our engine: autoregressive and with each draft, in turns on one prefill."""
    plan = prepared(*where, "draft=self")
    prompts = build.prompts(plan, build.tokenizer(plan)).tokens
    with progress() as bars:
        engine = build.engine(plan, bars)
    opened = engine.open(prompts)
    prefill_seconds = opened.decoder.prefill(engine.prefill_chunk)
    ways: dict[str, Any] = {OURS: None}
    for name in OUR_DRAFTS:
        ways[f"{OURS}, {name}"] = replace(engine, draft=DRAFTS[name].facts(gamma=engine.gamma)).draft_for(
            opened.decoder
        )
        warm_up(Batch(opened.decoder, ways[f"{OURS}, {name}"]))
    turns = [[opened.decoder.generate(draft) for draft in ways.values()] for _ in range(repeats_of(*where))]
    found, version = {}, f"{OURS}: attention by {plan.config.attention}"
    for name, generations in zip(ways, zip(*turns, strict=True), strict=True):
        times = [metrics.row_times(one, prefill_seconds) for one in generations]
        accepted = metrics.acceptance_metrics(generations).get("acceptance_length")
        found[name] = figures(times, generations[0].tokens, accepted) | {"version": version}
    limit = round_times(at_the_limit(plan, plan.config.draft, *ceilings(plan)), GAMMA).target.total
    choices = second_choices(opened.decoder, found[OURS]["tokens"])
    opened.close()
    return found | {OURS: found[OURS] | {"limit_ms": 1e3 * limit, "second_choices": choices}}


@torch.inference_mode()
def second_choices(decoder: Decoder, outputs: list[list[int]]) -> list[list[tuple[int, float]]]:
    """Return the token with the second largest logit at each new token (all rows have as many), and how far it lies
    behind the largest, relative to that one.
    """
    state = decoder.state
    tokens_BN = torch.tensor(outputs)
    last_B1 = state.tokens_BS.gather(1, state.prompt_len_B[:, None].long() - 1)
    decoder.cache.rollback(state.prompt_len_B - 1)
    hidden_BNE = decoder.target(torch.cat((last_B1, tokens_BN[:, :-1]), dim=1), decoder.cache)
    best_BN2 = decoder.target.logits(hidden_BNE).float().topk(2, dim=-1)
    gaps_BN = (best_BN2.values[..., 0] - best_BN2.values[..., 1]) / best_BN2.values[..., 0].abs()
    return [
        list(zip(tokens, gaps, strict=True))
        for tokens, gaps in zip(best_BN2.indices[..., 1].tolist(), gaps_BN.tolist(), strict=True)
    ]


def theirs(way: str, *where: Any) -> Cell:
    """Measure another engine, loaded for this cell."""
    limit = [f"engine.time_limit_s={TIME_LIMIT_S}"] if issubclass(engine_of(way), WorkerPeer) else []
    plan = prepared(*where, *WAYS[way], *limit)
    prompts = build.prompts(plan, build.tokenizer(plan)).tokens
    fast = plan.config.draft.name != "none"
    with load(plan) as peer:
        peer.generate([row[:WARMUP_CONTEXT] for row in prompts], WARMUP_TOKENS, fast)
        passes = [peer.generate(prompts, NEW_TOKENS, fast) for _ in range(repeats_of(*where))]
        version = peer.version
    accepted = passes[0].counts.metrics(GAMMA).get("acceptance_length")
    return {way: figures([one.times for one in passes], passes[0].tokens, accepted) | {"version": version}}


def figures(passes: list[list[RowTimes]], tokens: list[list[int]], accepted: Any) -> Figures:
    """Return medians over the passes, and the tokens of each row."""
    speeds = [metrics.speed_metrics([times]) for times in passes]
    found: Figures = {key: median(speed[key] for speed in speeds) for key in speeds[0]}
    return found | {"acceptance_length": accepted, "tokens": tokens}


def engine_of(way: str) -> Any:
    """Return the class of a way's engine."""
    return ENGINES[WAYS[way][0].removeprefix("engine=")].work


def ways_of(where: Where, ways: Iterable[str]) -> Iterator[str]:
    """Yield ours and those of the ways that this cell can be decoded in, with the engines that are installed."""
    model, rows, context = where
    long = model == SMOL and rows * context > LLAMACPP_TOKENS
    yield OURS
    for way in ways:
        there = not issubclass(engine_of(way), WorkerPeer) or os.environ.get(engine_of(way).variable())
        has_draft = "draft=model" not in WAYS[way] or "draft=model" in MODELS[model]
        in_time = not (long and way.startswith("llamacpp"))
        if there and has_draft and in_time and (way not in ONE_ROW or rows == 1):
            yield way


def measure(cell: Cell, way: str, *where: Any) -> None:
    """Add a way of decoding to a cell. One that fails, perhaps for want of memory, is left out of it."""
    start = time.monotonic()
    try:
        cell |= ours(*where) if way == OURS else theirs(way, *where)
    except Exception:  # a race goes on without it
        traceback.print_exc()
        print(f"{name_of(*where)}  {way}: failed", file=sys.stderr, flush=True)
    else:
        row, seconds = cell[way], time.monotonic() - start
        times = f"{row['time_per_output_token_ms']:.1f} ms, first token {row['time_to_first_token_ms'] / 1e3:.1f} s"
        print(f"{name_of(*where)}  {way}: {times} ({seconds:.0f} s)", flush=True)


def cells() -> dict[Where, tuple[str, ...]]:
    """Return all cells and their ways, in the order in which they are measured."""
    every = [(model, rows, context) for context in CONTEXTS for rows in ROWS for model in (SMOL, TINY)]
    return TELLING | {where: FAST for where in every if where not in TELLING}


def main() -> None:
    """Measure what is missing, and write the page after every cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[SMOL, TINY])
    parser.add_argument("--contexts", nargs="+", type=int, choices=CONTEXTS, default=CONTEXTS)
    parser.add_argument("--rows", nargs="+", type=int, choices=ROWS, default=ROWS)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start nothing after so many")
    parser.add_argument("--quick", action="store_true", help="small cells; write nothing")
    parser.add_argument("--restart", action="store_true", help="forget what has been measured")
    arguments = parser.parse_args()
    found = Cells("peers-cpu", restart=arguments.quick or arguments.restart)
    every = dict.fromkeys([(SMOL, 2, 256), (TINY, 2, 256)], EVERY) if arguments.quick else cells()
    wanted = {where: list(ways_of(where, ways)) for where, ways in every.items() if SMOLLM2 or where[0] == TINY}
    end = time.monotonic() + 60 * arguments.minutes
    for where, ways in wanted.items():
        sizes = arguments.quick or (where[1] in arguments.rows and where[2] in arguments.contexts)
        chosen = sizes and where[0] in arguments.models
        cell = found.setdefault(name_of(*where), {})
        for way in ways if chosen else ():
            if way not in cell and time.monotonic() < end:
                measure(cell, way, *where)
                if not arguments.quick:
                    found.save()
                    peers_rows.write(found, wanted)


if __name__ == "__main__":
    main()
