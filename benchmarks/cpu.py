"""The bundled pair on a CPU: times, speedups, memory, and transformers on the same prompts.

    python benchmarks/cpu.py              # writes docs/results/cpu.md; minutes, on an otherwise idle machine
    python benchmarks/cpu.py --quick      # one small cell, to try it out; writes nothing

Comparisons are ratios within one run: a shared machine's absolute times drift.
"""

import argparse
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from statistics import median

import magicdec  # noqa: F401 - before PyTorch, which reads once how its threads wait

# isort: split
import torch
from page import RESULTS, commit

from magicdec.config.load import compose
from magicdec.drafting import IndependentDraft, NgramDraft
from magicdec.engine.audit import audit
from magicdec.engine.native import Batch, NativeEngine, warm_up
from magicdec.measure import memory, metrics
from magicdec.measure.profile import profile_round
from magicdec.measure.system import cpu_name
from magicdec.peers.base import PeerSpec
from magicdec.peers.transformers import CACHES, TransformersPeer
from magicdec.planning import build
from magicdec.planning.resolve import Plan, resolve
from magicdec.registry import TransformersEngine
from magicdec.tracking.cells import markdown_table
from magicdec.tracking.progress import progress
from magicdec.units import GIB
from magicdec.verification.sampling import Sampling

CELLS = ((1024, 8), (4096, 1), (4096, 8), (4096, 24), (8192, 8))  # context, batch
PEER_CELLS = ((4096, 1), (4096, 8))
DRAFTS = (("self", 2), ("self", 3), ("ngram", 3), ("model", 3))  # name, gamma
NEW_TOKENS, REPEATS, PROFILE_REPEATS = 48, 2, 6
TIMES = ("target_decode_ms", "draft_ms", "verify_ms", "round_ms")


def prepared(context: int, batch: int) -> Plan:
    """Return a plan as `launch.py` would make it. The largest gamma gives the caches room for all."""
    largest = max(gamma for _, gamma in DRAFTS)
    sizes = [f"batch.context_len={context}", f"batch.size={batch}", f"batch.generate_len={NEW_TOKENS}"]
    return resolve(compose(["draft=model", f"draft.gamma={largest}", "hardware=cpu", *sizes]))


def measure_cell(context: int, batch: int) -> tuple[list[dict], list[list[int]], dict, str]:
    """Measure every draft on one prefill. Return rows of metrics, the prompts, the memory and the attention used."""
    plan = prepared(context, batch)
    prompts = build.prompts(plan, build.tokenizer(plan)).tokens
    peak = memory.Peak(plan.device)
    with progress() as bars:
        engine = build.engine(plan, bars)
    opened = engine.open(prompts)
    opened.decoder.prefill(engine.prefill_chunk)
    rows = [measure(engine, opened, name, gamma) for name, gamma in DRAFTS]
    weights = plan.target.config.num_parameters * plan.dtype.itemsize
    held = weights + opened.decoder.cache.num_bytes
    used = {"peak": peak.num_bytes / GIB, "held": held / GIB}
    return rows, prompts, used, plan.config.attention.name


def measure(engine: NativeEngine, opened: Batch, name: str, gamma: int) -> dict:
    """Measure pairs of an autoregressive and a speculative pass, the audit, and the parts of a round."""
    model = engine.draft_model if name == "model" else None
    draft = replace(engine, gamma=gamma, draft=replace(engine.draft, name=name), draft_model=model).draft_for(
        opened.decoder
    )
    batch = Batch(opened.decoder, draft)
    warm_up(batch)
    pairs = [(batch.decoder.generate(), batch.decoder.generate(draft)) for _ in range(REPEATS)]
    times = [[metrics.time_per_output_token_ms(metrics.row_times(g, 0.0)) for g in pair] for pair in pairs]
    identical = audit(batch.decoder, pairs[0][0].tokens, pairs[0][1].tokens).passed
    figures = {"draft": name, "gamma": gamma, "identical": identical, "tokens": pairs[0][0].tokens}
    figures |= {"autoregressive": median(a for a, _ in times), "speedup": median(a / s for a, s in times)}
    accepted = metrics.acceptance_metrics([fast for _, fast in pairs])
    return figures | accepted | profile_round(batch, PROFILE_REPEATS)


def against_peers(plan: Plan, prompts: list[list[int]], ours: dict) -> list[str]:
    """Measure transformers on the same prompts: its two caches and, at batch 1 (its limit), its own speculation."""
    spec = PeerSpec(str(plan.target.folder), "float32", "cpu", len(prompts), 0, Sampling(), gamma=3)
    engines = {cache: TransformersEngine(cache=cache) for cache in CACHES}
    cells = [f"{ours['autoregressive']:.1f}"]
    for cache in CACHES:
        tokens, ms = theirs(TransformersPeer(replace(spec, engine=engines[cache])), prompts, False)
        same = "" if tokens == ours["tokens"] else ", other tokens"
        cells.append(f"{ms:.1f} ({ms / ours['autoregressive']:.1f}x{same})")
    if len(prompts) == 1 and plan.draft is not None:
        spec = replace(spec, engine=engines["static"])
        assisted = replace(spec, draft=IndependentDraft(), draft_folder=str(plan.draft.folder))
        for one in (assisted, replace(spec, draft=NgramDraft(max_ngram=8))):
            cells.append(f"{theirs(TransformersPeer(one), prompts, True)[1]:.1f}")
    return cells + [""] * (5 - len(cells))


def theirs(peer: TransformersPeer, prompts: list[list[int]], fast: bool) -> tuple[list[list[int]], float]:
    """Return the tokens of a peer, and its milliseconds per token."""
    peer.generate([row[:64] for row in prompts], 4, fast)
    got = peer.generate(prompts, NEW_TOKENS, fast)
    return got.tokens, metrics.time_per_output_token_ms(got.times)


def main() -> None:
    """Measure the cells and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small cell; write nothing")
    quick = parser.parse_args().quick
    speeds, parts, peers, memories = [], [], [], []
    for context, batch in ((512, 2),) if quick else CELLS:
        with ProcessPoolExecutor(1, get_context("spawn")) as own:  # which has no memory of the cell before
            rows, prompts, used, attention = own.submit(measure_cell, context, batch).result()
        where = [f"{context:,}", str(batch)]
        for row in rows:
            name = [*where, row["draft"], str(row["gamma"])]
            figures = [f"{row['acceptance_rate']:.2f}", f"{row['acceptance_length']:.2f}", f"{row['speedup']:.2f}"]
            speeds.append([*name, f"{row['autoregressive']:.1f}", *figures, "yes" if row["identical"] else "NO"])
            ratio = row["target_decode_ms"] / row["verify_ms"]
            parts.append([*name, *(f"{row[t]:.1f}" for t in TIMES), f"{ratio:.2f}"])
            print(*speeds[-1], flush=True)
        memories.append([*where, f"{used['peak']:.3f}", f"{used['held']:.3f}", f"{used['peak'] / used['held']:.2f}"])
        if quick or (context, batch) in PEER_CELLS:
            peers.append([*where, *against_peers(prepared(context, batch), prompts, rows[0])])
            print(*peers[-1], flush=True)
    page = PAGE.format(
        commit=commit(),
        machine=cpu_name(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        attention=attention,
        budget=compose([]).cache.budget,
        new=NEW_TOKENS,
        repeats=REPEATS,
        speeds=markdown_table(
            ["context", "batch", "draft", "gamma", "AR", "rate", "length", "speedup", "lossless"], speeds
        ),
        parts=markdown_table(["context", "batch", "draft", "gamma", "T_T", "T_D", "T_V", "round", "T_T / T_V"], parts),
        peers=markdown_table(
            ["context", "batch", "ours", *(f"{cache} cache" for cache in CACHES), "assisted", "prompt lookup"], peers
        ),
        memories=markdown_table(["context", "batch", "peak, GiB", "weights + KV, GiB", "ratio"], memories),
    )
    if quick:
        print(page)
        return
    (RESULTS / "cpu.md").write_text(page)


PAGE = """# The bundled pair on a CPU

`python benchmarks/cpu.py`, commit {commit}, {machine}, {threads} threads, PyTorch {torch}, attention by
{attention}, fp32, greedy, {new} new tokens, medians of {repeats} pairs on one prefill. `self` and `model` draft over
a streaming cache of {budget} entries, 4 of them sinks.
The machine is a shared one: ratios hold, absolute times drift.

## Speedup over our own autoregressive decoding (AR, ms per token)

{speeds}
## The parts of a round, in ms

{parts}
## Transformers on the same prompts, ms per token (and times ours, autoregressive)

{peers}
## Memory that a process of its own grew by, from before the weights were loaded

{memories}"""


if __name__ == "__main__":
    main()
