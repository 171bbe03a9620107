"""Our engine and others on a CPU, on the same prompts: decode tokens/s, time to first token, and what each has written.

    export MAGICDEC_SMOLLM2=models/smollm2-135m-q4 MAGICDEC_LLAMACPP_PYTHON=llamacpp-venv/bin/python
    python benchmarks/peers.py --minutes 20 --rows 1 4 8 --contexts 1024 4096    # part of docs/results/peers-cpu.md
    python benchmarks/peers.py                                                   # all of it; hours
    python benchmarks/peers.py --quick                                           # small cells; writes nothing

Measures SmolLM2-135M where MAGICDEC_SMOLLM2 names a folder made by tools/get_smollm2.py, and the bundled pair. Engines
with an environment of their own take part where MAGICDEC_VLLM_PYTHON, MAGICDEC_LLAMACPP_PYTHON and
MAGICDEC_OPENVINO_PYTHON name one (docs/peers.md). All ways of decoding take turns at a cell, so that a ratio compares
times of the same minutes. The page is written after every cell. Repeat the command to resume: what this commit has
measured is not measured again (--restart forgets it).
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import magicdec  # noqa: F401 - before PyTorch, which reads once how its threads wait

# isort: split
from cpu import MODELS, SMOLLM2, at_the_limit, ceilings
from page import RESULTS, Cells, provenance

from magicdec.config.load import compose
from magicdec.costmodel.round import round_times
from magicdec.data.base import fingerprint
from magicdec.engine.native import Batch, NativeEngine, warm_up
from magicdec.errors import UserError
from magicdec.measure import metrics
from magicdec.measure.metrics import RowTimes
from magicdec.peers.process import WorkerPeer
from magicdec.planning import build
from magicdec.planning.resolve import Plan, resolve
from magicdec.registry import DRAFTS, ENGINES
from magicdec.scenarios.peer import WARMUP_CONTEXT, WARMUP_TOKENS
from magicdec.tracking.cells import markdown_table
from magicdec.tracking.progress import progress

GAMMA = 3
OURS, OUR_DRAFTS = "native", ("self", "ngram")  # all on one prefill
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
ONE_ROW = ("transformers, assisted", "transformers, prompt lookup")
PLAIN = ("llamacpp", "openvino", "transformers", "vllm")
REDUCED = ("llamacpp, F16", "openvino, 8-bit KV")
CONTEXTS, ROWS = (4096, 1024, 2048, 8000), (4, 1, 8, 16)  # the ones that say most first
NEW_TOKENS, REPEATS = 48, 2
MANY = {"tiny": 40_000, "SmolLM2-135M": 5_000}  # prompt tokens from which a peer, which prefills in every pass, has one

Figures = dict[str, Any]


def overrides_of(model: str) -> list[str]:
    """Return what chooses the target, without its draft."""
    return [override for override in MODELS[model] if not override.startswith("draft=")]


def prepared(model: str, rows: int, context: int, *overrides: str) -> Plan:
    """Return a plan as `launch.py` would make it."""
    sizes = [f"batch.context_len={context}", f"batch.size={rows}", f"batch.generate_len={NEW_TOKENS}"]
    drafts = [f"draft.gamma={GAMMA}"] if "draft" in "".join(overrides) else []
    return resolve(compose([*overrides_of(model), *overrides, *drafts, *sizes, "hardware=cpu"]))


def ours(model: str, rows: int, context: int) -> dict[str, Figures]:
    """Measure our engine: autoregressive and with each draft, in turns on one prefill."""
    plan = prepared(model, rows, context, "draft=self")
    prompts = build.prompts(plan, build.tokenizer(plan)).tokens
    with progress() as bars:
        engine = build.engine(plan, bars)
    opened = engine.open(prompts)
    prefill_seconds = opened.decoder.prefill(engine.prefill_chunk)
    found, version = {}, f"attention by {plan.config.attention.name}"
    for draft in OUR_DRAFTS:
        passes = dict(zip((OURS, f"{OURS}, {draft}"), pairs(engine, opened, draft), strict=True))
        for name, generations in passes.items():
            times = [metrics.row_times(one, prefill_seconds) for one in generations]
            accepted = metrics.acceptance_metrics(generations).get("acceptance_length")
            found[name] = figures(times, generations[0].tokens, accepted) | {"version": version}
    limit = round_times(at_the_limit(plan, plan.config.draft, *ceilings(plan)), GAMMA).target.total
    opened.close()
    return found | {OURS: found[OURS] | {"limit_ms": 1e3 * limit}}


def pairs(engine: NativeEngine, opened: Batch, draft: str) -> tuple[list[Any], list[Any]]:
    """Return passes without and with a draft."""
    drafting = replace(engine, draft=DRAFTS[draft].facts()).draft_for(opened.decoder)
    warm_up(Batch(opened.decoder, drafting))
    found = [(opened.decoder.generate(), opened.decoder.generate(drafting)) for _ in range(REPEATS)]
    return [plain for plain, _ in found], [fast for _, fast in found]


def theirs(way: str, model: str, rows: int, context: int) -> dict[str, Figures]:
    """Measure another engine, loaded for this cell."""
    plan = prepared(model, rows, context, *WAYS[way])
    prompts = build.prompts(plan, build.tokenizer(plan)).tokens
    fast = plan.config.draft.name != "none"
    with build.peer(plan) as peer:
        peer.generate([row[:WARMUP_CONTEXT] for row in prompts], WARMUP_TOKENS, fast)
        repeats = REPEATS if rows * context < MANY[model] else 1
        passes = [peer.generate(prompts, NEW_TOKENS, fast) for _ in range(repeats)]
        version = peer.version
    accepted = passes[0].counts.metrics(GAMMA).get("acceptance_length")
    return {way: figures([one.times for one in passes], passes[0].tokens, accepted) | {"version": version}}


def figures(passes: list[list[RowTimes]], tokens: list[list[int]], accepted: Any) -> Figures:
    """Return medians over the passes, and a fingerprint of each row."""
    speeds = [metrics.speed_metrics([times]) for times in passes]
    found: Figures = {key: median(speed[key] for speed in speeds) for key in speeds[0]}
    return found | {"acceptance_length": accepted, "rows": [fingerprint([row]) for row in tokens]}


def ways_of(model: str, rows: int) -> Iterator[str]:
    """Yield the ways of decoding a cell: of the engines that are there, with a draft model where there is one."""
    for way, overrides in WAYS.items():
        peer = ENGINES[overrides[0].removeprefix("engine=")].load()
        there = not issubclass(peer, WorkerPeer) or os.environ.get(peer.variable())
        has_draft = "draft=model" not in overrides or "draft=model" in MODELS[model]
        if there and has_draft and (way not in ONE_ROW or rows == 1):
            yield way


def page(found: dict[str, dict[str, Figures]], command: str) -> str:
    """Return the page as Markdown, with the cells that have been measured."""
    lines, races = [], []
    cells = [(model, context, rows) for model in MODELS for context in sorted(CONTEXTS) for rows in sorted(ROWS)]
    for model, context, rows in cells:
        cell = found.get(name_of(model, rows, context), {})
        if OURS not in cell:
            continue
        where = [model, f"{context:,}", str(rows)]
        limit = cell[OURS]["limit_ms"]
        for name, row in cell.items():
            same = sum(a == b for a, b in zip(row["rows"], cell[OURS]["rows"], strict=True))
            length, step = row["acceptance_length"], row["time_per_output_token_ms"]
            line = [*where, name, f"{row['tokens_per_second']:,.0f}", ratio(row, cell[OURS]), f"{step:.1f}"]
            line += ["" if length else f"{limit / step:.2f}", f"{row['time_to_first_token_ms'] / 1e3:.2f}"]
            lines.append([*line, f"{length:.2f}" if length else "", f"{same}/{rows}"])
        exact = [way for way in cell if not way.startswith(OURS) and way not in REDUCED]
        own = fastest(cell, [way for way in cell if way.startswith(OURS)])
        plain = race(cell, OURS, [way for way in exact if way in PLAIN])
        races.append([*where, *plain, own, *race(cell, own, exact)])
    versions = {row["version"] for cell in found.values() for row in cell.values()}
    name = ["target", "context", "batch"]
    header = ["engine", "tokens/s", "of native", "TPOT, ms", "of limit", "TTFT, s", "length", "same rows"]
    best = ["best peer, autoregressive", "native to it", "our best way", "best peer, any way", "ours to it"]
    return PAGE.format(
        provenance=provenance(command),
        versions="\n".join(f"- {version}" for version in sorted(versions)),
        new=NEW_TOKENS,
        gamma=GAMMA,
        budget=compose([]).cache.budget,
        races=markdown_table([*name, *best], races),
        everything=markdown_table([*name, *header], lines),
    )


def ratio(row: Figures, other: Figures) -> str:
    return f"{other['time_per_output_token_ms'] / row['time_per_output_token_ms']:.2f}x"


def fastest(cell: dict[str, Figures], ways: list[str]) -> str:
    return min(ways, key=lambda way: cell[way]["time_per_output_token_ms"])


def race(cell: dict[str, Figures], mine: str, ways: list[str]) -> list[str]:
    """Return the fastest of these ways, and how many times faster ours is."""
    if not ways:
        return ["", ""]
    best = fastest(cell, ways)
    return [best, ratio(cell[mine], cell[best])]


def name_of(model: str, rows: int, context: int) -> str:
    return f"{model}, {rows} x {context}"


def measure(cell: dict[str, Figures], way: str, *where: Any) -> None:
    """Add a way of decoding to a cell. One that fails, perhaps for want of memory, is left out of it."""
    try:
        cell |= ours(*where) if way == OURS else theirs(way, *where)
        print(f"{name_of(*where)}  {way}: {cell[way]['tokens_per_second']:,.0f} tokens/s", flush=True)
    except (RuntimeError, UserError) as error:
        print(f"{name_of(*where)}  {way}: failed: {error}", file=sys.stderr, flush=True)


def main() -> None:
    """Measure what is missing, and write the page after every cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["SmolLM2-135M", "tiny"])
    parser.add_argument("--contexts", nargs="+", type=int, choices=CONTEXTS, default=CONTEXTS)
    parser.add_argument("--rows", nargs="+", type=int, choices=ROWS, default=ROWS)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start nothing after so many")
    parser.add_argument("--quick", action="store_true", help="small cells; write nothing")
    parser.add_argument("--restart", action="store_true", help="forget what has been measured")
    arguments = parser.parse_args()
    contexts, rows = ((256,), (2,)) if arguments.quick else (arguments.contexts, arguments.rows)
    models = [model for model in arguments.models if SMOLLM2 or model == "tiny"]
    cells = [(model, row, context) for context in contexts for row in rows for model in models]
    found = Cells("peers-cpu", restart=arguments.quick or arguments.restart)
    end = time.monotonic() + 60 * arguments.minutes
    command = "python benchmarks/peers.py"
    for where in cells:
        cell = found.setdefault(name_of(*where), {})
        for way in (OURS, *ways_of(*where[:2])):
            if way not in cell and time.monotonic() < end:
                measure(cell, way, *where)
                if not arguments.quick:
                    found.save()
                    (RESULTS / "peers-cpu.md").write_text(page(found, command))
    if arguments.quick:
        print({name: {way: row["tokens_per_second"] for way, row in cell.items()} for name, cell in found.items()})
    else:
        print(page(found, command))


PAGE = """# Our engine and others on a CPU

{provenance}; fp32 and greedy unless a row says otherwise, {new} new tokens a row, gamma {gamma}; `self` drafts over a
streaming cache of {budget} entries. SmolLM2-135M is the instruct model after 4-bit quantisation, dequantised; `tiny` is
the bundled pair. How the engines are set up and timed: [peers.md](../peers.md). They were:

{versions}

Ratios are of times per output token (TPOT) within a cell: above 1, ours is faster. All ways of a cell were measured
one after the other.

## Ours against the best of the others

Rows with weights or KV cache of fewer bits do not compete.

{races}
## Everything

Tokens per second count decoding alone, over all rows. `of limit` is what a step would take if every operator took
max(bytes / read bandwidth, FLOPs / matmul rate), with our weights in bfloat16, over the time that it takes. TTFT is
that of the whole batch for native, transformers and openvino; llamacpp and vllm prefill rows in turn, and the mean row
counts. Length is that of acceptance: tokens per round. The last column counts rows whose tokens are those of native,
autoregressive.

{everything}"""


if __name__ == "__main__":
    main()
