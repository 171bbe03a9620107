"""The bundled pair on three engines, on a CPU: decode tokens/s, time to first token, memory, and what each has written.

    python benchmarks/peers.py --python vllm-venv/bin/python    # writes docs/results/peers-cpu.md; a quarter of an hour
    python benchmarks/peers.py --quick                          # small cells, to try it out; writes nothing

Without --python (or MAGICDEC_VLLM_PYTHON) vLLM is left out. Repeat the command to resume: a cell that this commit has
measured is not measured again (--restart forgets them). As runs of their own: sweeps/peers.yaml.

Every way of decoding has a process that stays, loaded once for the largest cell, and all take turns at each cell.
"""

import argparse
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import cache
from statistics import median
from typing import Any

import magicdec  # noqa: F401 - before PyTorch, which reads once how its threads wait

# isort: split
from page import RESULTS, Cells, provenance

from magicdec.config.load import compose
from magicdec.data.base import fingerprint
from magicdec.engine.native import warm_up
from magicdec.measure import memory, metrics
from magicdec.measure.metrics import RowTimes
from magicdec.peers.vllm import PYTHON_VARIABLE
from magicdec.planning import build
from magicdec.planning.resolve import Plan, resolve
from magicdec.scenarios.peer import WARMUP_CONTEXT, WARMUP_TOKENS
from magicdec.tracking.cells import markdown_table
from magicdec.tracking.progress import progress
from magicdec.units import GIB

GAMMA = 3
# By engine and draft; a peer decodes one way, ours both, on one prefill.
WAYS = {
    "native": ("draft=self",),
    "transformers": ("engine=transformers",),
    "transformers, assisted": ("engine=transformers", "draft=model"),
    "transformers, prompt lookup": ("engine=transformers", "draft=ngram"),
    "vllm": ("engine=vllm",),
    "vllm, draft model": ("engine=vllm", "draft=model"),
    "vllm, ngram": ("engine=vllm", "draft=ngram"),
}
ONE_ROW = ("transformers, assisted", "transformers, prompt lookup")
PLAIN = ("native", "transformers", "vllm")
OURS, OURS_FAST = "native", "native, self"
# Context and batch, the smallest first: the most memory so far is then this cell's.
CELLS = [(1024, 1), (4096, 1), (8192, 1), (1024, 8), (1024, 16), (4096, 8), (4096, 16), (8192, 8), (8192, 16)]
QUICK_CELLS = [(256, 1), (256, 2)]
NEW_TOKENS, QUICK_TOKENS, REPEATS = 48, 16, 2
MANY = 40_000  # tokens of a cell's prompts from which a peer, which prefills in every pass, has one only

Figures = dict[str, Any]


@cache
def loaded(way: str, context: int, rows: int, new_tokens: int) -> tuple[Plan, Any, memory.Peak, object]:
    """Return the plan, the engine with room for so much, the memory from before it, the tokenizer; loaded once."""
    drafts = [f"draft.gamma={GAMMA}"] if "draft" in "".join(WAYS[way]) else []
    sizes = [f"batch.context_len={context}", f"batch.size={rows}", f"batch.generate_len={new_tokens}"]
    plan = resolve(compose([*WAYS[way], *drafts, *sizes, "hardware=cpu"]))
    peak = memory.Peak(plan.device)
    with progress() as bars:
        engine = build.engine(plan, bars) if way == OURS else build.peer(plan)
    return plan, engine, peak, build.tokenizer(plan)


def measure(way: str, context: int, rows: int, largest: tuple[int, int], new_tokens: int) -> dict[str, Figures]:
    """Measure one cell, in a process of the way's own. Return the metrics by their names on the page."""
    plan, engine, peak, tokenizer = loaded(way, largest[0], 1 if way in ONE_ROW else largest[1], new_tokens)
    prompts = build.prompts(plan, tokenizer, rows, context).tokens
    repeats = REPEATS if rows * context < MANY else 1
    if way == OURS:
        found = ours(engine, prompts, peak)
        return found | {OURS: found[OURS] | {"version": f"attention by {plan.config.attention.name}"}}
    fast = plan.config.draft.name != "none"
    engine.generate([row[:WARMUP_CONTEXT] for row in prompts], WARMUP_TOKENS, fast)
    passes = [engine.generate(prompts, new_tokens, fast) for _ in range(repeats)]
    accepted = passes[0].counts.metrics(GAMMA).get("acceptance_length")
    found = figures([one.times for one in passes], passes[0].tokens, engine.peak_bytes, accepted)
    return {way: found | {"version": engine.version}}


def ours(engine: Any, prompts: list[list[int]], peak: memory.Peak) -> dict[str, Figures]:
    """Measure both ways of our engine on one prefill."""
    batch = engine.open(prompts)
    prefill_seconds = batch.decoder.prefill(engine.prefill_chunk)
    warm_up(batch)
    pairs = [(batch.decoder.generate(), batch.decoder.generate(batch.draft)) for _ in range(REPEATS)]
    found = {}
    for name, passes in zip((OURS, OURS_FAST), zip(*pairs, strict=True), strict=True):
        accepted = metrics.acceptance_metrics(list(passes)).get("acceptance_length")
        times = [metrics.row_times(one, prefill_seconds) for one in passes]
        found[name] = figures(times, passes[0].tokens, peak.num_bytes, accepted)
    batch.close()
    return found


def figures(passes: list[list[RowTimes]], tokens: list[list[int]], peak_bytes: int, accepted: Any) -> Figures:
    """Return medians over the passes, and a fingerprint of each row."""
    speeds = [metrics.speed_metrics([times]) for times in passes]
    found: Figures = {key: median(speed[key] for speed in speeds) for key in speeds[0]}
    rows = [fingerprint([row]) for row in tokens]
    return found | {"peak_gib": peak_bytes / GIB, "acceptance_length": accepted, "rows": rows}


def page(found: dict[str, dict[str, Figures]], cells: list[tuple[int, int]], new_tokens: int) -> str:
    """Return the page as Markdown, with the cells that have been measured."""
    lines, races = [], []
    for context, rows in sorted(cells):
        cell = found.get(name_of(context, rows), {})
        if OURS not in cell:
            continue
        where = [f"{context:,}", str(rows)]
        for name, figures in cell.items():
            same = sum(a == b for a, b in zip(figures["rows"], cell[OURS]["rows"], strict=True))
            length = figures["acceptance_length"]
            line = [*where, name, f"{figures['tokens_per_second']:,.0f}", ratio(figures, cell[OURS])]
            line += [f"{figures['time_per_output_token_ms']:.1f}", f"{figures['time_to_first_token_ms'] / 1e3:.2f}"]
            lines.append([*line, f"{figures['peak_gib']:.2f}", f"{length:.2f}" if length else "", f"{same}/{rows}"])
        races.append([*where, *race(cell, OURS, PLAIN), *race(cell, OURS_FAST, tuple(cell))])
    versions = {figures["version"] for cell in found.values() for figures in cell.values() if "version" in figures}
    header = [
        "context",
        "batch",
        "engine",
        "tokens/s",
        "of native",
        "TPOT, ms",
        "TTFT, s",
        "GiB",
        "length",
        "same rows",
    ]
    best = ["context", "batch", "best peer, autoregressive", "native to it", "best peer, any way", "native, self to it"]
    return PAGE.format(
        provenance=provenance("python benchmarks/peers.py --python vllm-venv/bin/python"),
        versions=", ".join(sorted(versions)),
        new=new_tokens,
        gamma=GAMMA,
        budget=compose([]).cache.budget,
        left_out="" if any(v.startswith("vllm") for v in versions) else " vLLM was not there to be measured.",
        races=markdown_table(best, races),
        everything=markdown_table(header, lines),
    )


def ratio(figures: Figures, other: Figures) -> str:
    return f"{other['time_per_output_token_ms'] / figures['time_per_output_token_ms']:.2f}x"


def race(cell: dict[str, Figures], mine: str, ways: tuple[str, ...]) -> list[str]:
    """Return the fastest of the others among these ways, and how much faster ours is."""
    peers = [way for way in ways if way in cell and not way.startswith(OURS)]
    if not peers:
        return ["", ""]
    best = min(peers, key=lambda way: cell[way]["time_per_output_token_ms"])
    return [best, ratio(cell[mine], cell[best])]


def name_of(context: int, rows: int) -> str:
    return f"{rows} x {context}"


def main() -> None:
    """Measure what is missing, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=os.environ.get(PYTHON_VARIABLE), help="that of an environment with vLLM")
    parser.add_argument("--quick", action="store_true", help="small cells; write nothing")
    parser.add_argument("--restart", action="store_true", help="forget what has been measured")
    arguments = parser.parse_args()
    ways = list(WAYS)
    if arguments.python:
        os.environ[PYTHON_VARIABLE] = os.path.abspath(arguments.python)
    else:
        ways = [way for way in ways if not way.startswith("vllm")]
    cells, new_tokens = (QUICK_CELLS, QUICK_TOKENS) if arguments.quick else (CELLS, NEW_TOKENS)
    found = Cells("peers-cpu", restart=arguments.quick or arguments.restart)
    with ExitStack() as stack:
        spawn = multiprocessing.get_context("spawn")
        pools = {way: stack.enter_context(ProcessPoolExecutor(1, spawn)) for way in ways}
        for context, rows in cells:
            cell = found.setdefault(name_of(context, rows), {})
            for way in ways:
                if way in cell or (way in ONE_ROW and rows > 1):
                    continue
                cell |= pools[way].submit(measure, way, context, rows, cells[-1], new_tokens).result()
                print(f"{name_of(context, rows)}  {way}: {cell[way]['tokens_per_second']:,.0f} tokens/s", flush=True)
                if not arguments.quick:
                    found.save()
    text = page(found, cells, new_tokens)
    print(text)
    if not arguments.quick:
        (RESULTS / "peers-cpu.md").write_text(text)


PAGE = """# The bundled pair on three engines

{provenance}, {versions}; fp32, greedy, {new} new tokens a row, gamma {gamma}; `self` drafts over a streaming cache of
{budget} entries.{left_out} How the engines are set up and timed: [peers.md](../peers.md).

Ratios are of times per output token (TPOT), within this run: more is faster. The machine is a shared one: ratios hold,
absolute times drift.

## Ours against the best of the others

{races}
## Everything

Tokens per second count decoding alone, over all rows. TTFT of native and of transformers is that of the whole batch;
vLLM prefills rows in turn, and the mean row counts. Memory is what the way's process has grown by so far, from before
the weights were loaded, cells in order of their size; native holds both of its ways. Length is that of acceptance:
tokens per round. The last column counts rows whose tokens are those of native, autoregressive.

{everything}"""


if __name__ == "__main__":
    main()
