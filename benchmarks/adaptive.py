"""What choosing gamma costs while it stays where it is, and what it gains or loses against every fixed one.

    python benchmarks/adaptive.py        # five minutes on an otherwise idle machine

Self-speculation of the bundled target. Whole passes over one batch take turns: each fixed gamma, draft.gamma=auto
(which begins every pass with its guess), and autoregressive decoding. Then rounds of the best fixed gamma take turns:
called directly, and by an AdaptiveCycle for which every choice is this one.
"""

import argparse
from statistics import median
from typing import Any

import magicdec  # noqa: F401 - before PyTorch, which reads once how its threads wait

# isort: split
import torch
from page import setting

from magicdec.config.load import compose
from magicdec.decoding.timers import Stopwatch
from magicdec.engine.adaptive import AdaptiveCycle
from magicdec.engine.native import Batch, warm_up
from magicdec.measure import metrics
from magicdec.planning import build
from magicdec.planning.resolve import resolve
from magicdec.tracking.cells import markdown_table
from magicdec.tracking.progress import progress

SETTING = ["hardware=cpu", "draft.gamma=auto", "batch.context_len=4096"]


def opened(size: int) -> Batch:
    """Return a batch after its prefill."""
    plan = resolve(compose([*SETTING, f"batch.size={size}"]))
    tokenizer: Any = build.tokenizer(plan)
    with progress() as bars:
        engine = build.engine(plan, bars)
    batch = engine.open(build.prompts(plan, tokenizer).tokens)
    batch.decoder.prefill(engine.prefill_chunk)
    warm_up(batch)
    return batch


@torch.inference_mode()
def overhead(batch: Batch, gammas: tuple[int, ...], gamma: int, pairs: int) -> tuple[float, float, float]:
    """Return the milliseconds of a round, the median extra cost of choosing, and its standard error."""
    decoder, draft = batch.decoder, batch.draft
    assert draft is not None
    fixed = decoder.cycle(draft, gamma)
    chosen = AdaptiveCycle(dict.fromkeys((0, *gammas), fixed), decoder.state)
    plain, extra = [], []
    while len(extra) < pairs:
        batch.restart()
        chosen.restart()
        for index in range(decoder.state.max_rounds // 2):
            seconds = {}
            for way in (chosen, fixed) if index % 2 else (fixed, chosen):
                with Stopwatch(decoder.device) as watch:
                    way()
                seconds[way] = watch.seconds
            plain.append(seconds[fixed])
            extra.append(seconds[chosen] - seconds[fixed])
    spread = torch.tensor(extra).std().item()
    return 1e3 * median(plain), 1e3 * median(extra), 1e3 * 1.25 * spread / len(extra) ** 0.5


def passes(batch: Batch, gammas: tuple[int, ...], repeats: int) -> dict[str, tuple[float, float]]:
    """Return the milliseconds per token of each way, and their spread over passes."""
    decoder, draft = batch.decoder, batch.draft
    assert draft is not None
    ways: dict[str, int | None] = {**{str(gamma): gamma for gamma in gammas}, "auto": None, "autoregressive": None}
    samples: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, gamma in ways.items():
            generation = decoder.generate(None if way == "autoregressive" else draft, gamma=gamma)
            samples[way].append(metrics.time_per_output_token_ms(metrics.row_times(generation, 0.0)))
    return {way: (median(times), metrics.spread(times)) for way, times in samples.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 8, 24], help="rows of a batch")
    parser.add_argument("--pairs", type=int, default=400, help="pairs of rounds")
    parser.add_argument("--repeats", type=int, default=5, help="passes of each way")
    arguments = parser.parse_args()
    print(f"{setting()}\n")
    lines = []
    for size in arguments.sizes:
        batch = opened(size)
        assert batch.draft is not None
        gammas = batch.decoder.gammas
        times = passes(batch, gammas, arguments.repeats)
        best = min((way for way in times if way.isdigit()), key=lambda way: times[way])
        round_ms, extra_ms, error_ms = overhead(batch, gammas, int(best), arguments.pairs)
        cost = f"{extra_ms / round_ms:+.2%} ± {error_ms / round_ms:.2%} of {round_ms:.1f} ms"
        lines.append([str(size), *(f"{ms:.2f} ({spread:.0%})" for ms, spread in times.values()), cost])
        header = ["rows", *times, "choosing, at the best gamma"]
    print(markdown_table(header, lines))


if __name__ == "__main__":
    main()
