"""Every draft, cache policy and budget on the bundled pair: acceptance on several texts, times and speedups on one.

    python benchmarks/strategies.py --books FOLDER    # an hour or more, on an otherwise idle machine
    python benchmarks/strategies.py --quick           # one short text, to try it out; writes nothing

Repeat the command to resume. It writes docs/results/strategies.csv and renders its page. All drafts and policies of a
text share one prefill of the target, and the part of their own prefill that is the same at every budget.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import magicdec  # noqa: F401 - before PyTorch, which reads once how its threads wait

# isort: split
import render
import torch
from page import RESULTS, ROOT, setting
from render import rounded, write_csv
from torch import Tensor

from magicdec.cache.draft_cache import DraftCache
from magicdec.config.load import compose
from magicdec.config.registry import DRAFTS, POLICIES
from magicdec.config.schema import Config
from magicdec.data.ruler import accuracy
from magicdec.decoding.prefill import prefill
from magicdec.decoding.scoring import score
from magicdec.decoding.timers import Stopwatch
from magicdec.drafts import base, model
from magicdec.engine.decoder import Generation
from magicdec.engine.native import Batch, NativeEngine
from magicdec.measure import metrics
from magicdec.measure.profile import profile_round
from magicdec.models.kv_cache import KVCache
from magicdec.models.transformer import Transformer
from magicdec.planning import build
from magicdec.planning.resolve import resolve
from magicdec.tracking.progress import progress

BUDGETS, MIDDLE, GAMMA = (64, 128, 256, 512), 256, 3
SIZES = {"context_len": 8192, "size": 8, "generate_len": 64}  # the pair was trained for 8,448 tokens
TASK_SIZES = SIZES | {"context_len": 1024}  # over which the bundled target finds a passage again
QUICK = {"context_len": 640, "size": 2, "generate_len": 16}
TEXTS = {
    "stdlib": ["data=stdlib"],
    "text": ["data=text"],
    "repeat": ["data=repeat"],
    "ruler": ["data=ruler", "data.task=niah_multikey"],
}
TIMED = "stdlib"
TASKS = ("repeat", "ruler")  # measured at one budget
WITHOUT_BUDGET = ("full", "quantized")  # quantized has one, but reads everything
DRAFTS_POLICIES = {
    "self": [policy for policy in POLICIES if policy != "h2o"],
    "ngram": ["full"],
    "layer_skip": ["full", "streaming"],
    "hierarchical": ["streaming", "quest", "topk"],
    "model": [policy for policy in POLICIES if policy != "h2o" and not POLICIES[policy].facts.needs_target],
}
SLOWEST = [("self", "h2o"), ("model", "h2o")]  # a second pass over the prompt
REPEATS, PASSES = 5, 2  # of each step, and of whole passes

Cell = tuple[str, str, int]  # draft, policy, budget; 0 where a policy has no use for one


def cells_of(text: str) -> list[Cell]:
    """Return what is compared on a text, the slowest last."""
    pairs = [(draft, policy) for draft, policies in DRAFTS_POLICIES.items() for policy in policies] + SLOWEST
    budgets = (MIDDLE,) if text in TASKS else BUDGETS
    if text in TASKS:
        pairs = [pair for pair in pairs if pair[0] in ("self", "ngram") and pair not in SLOWEST]
    return [(*pair, budget) for pair in pairs for budget in ((0,) if pair[1] in WITHOUT_BUDGET else budgets)]


def configured(*overrides: str) -> Config:
    """Return a configuration as `launch.py` would make it."""
    return compose([f"draft.gamma={GAMMA}", "hardware=cpu", *overrides])


class Prefilled:
    """One batch of a text after the target's prefill, the target's output, and drafts to continue the batch with."""

    def __init__(self, overrides: list[str], sizes: dict[str, int]):
        sized = [f"batch.{key}={value}" for key, value in sizes.items()]
        plan = resolve(configured("draft=hierarchical", *overrides, *sized))  # which has all that any draft needs
        tokenizer: Any = build.tokenizer(plan)
        prompts = build.prompts(plan, tokenizer)
        with progress() as bars:
            self.engine = build.engine(plan, bars)
        self.attention = plan.config.attention
        self.decoder = self.engine.open(prompts.tokens).decoder
        self.decoder.prefill(self.engine.prefill_chunk)
        self.expected = self.decoder.generate().tokens
        outputs = map(tokenizer.decode, self.expected)
        self.accuracy = fmean(map(accuracy, outputs, prompts.answers)) if prompts.answers else None
        self.once = Once()
        base.score, model.prefill = self.once.score, self.once.prefill  # type: ignore[assignment]

    def engine_for(self, draft: str, policy: str, budget: int) -> NativeEngine:
        """Return the same target with another draft."""
        chosen = configured(f"draft={draft}", f"cache={policy}", *([f"cache.budget={budget}"] if budget else []))
        return replace(
            self.engine,
            draft=chosen.draft,
            cache=chosen.cache,
            draft_model=self.engine.draft_model if DRAFTS[draft].facts.needs_model else None,
        )


class Once:
    """The part of a draft's prefill that does not depend on the budget: run once per model, counted each time."""

    def __init__(self) -> None:
        self.known: dict[tuple, tuple[Any, float]] = {}
        self.saved_s = 0.0  # by recalling
        self.scoring_s = 0.0  # of the scores last asked for

    def score(self, model: Transformer, cache: KVCache, feed: Any, longest: int, last: int, tell: Any) -> Tensor:
        """See magicdec.decoding.scoring.score."""
        key = (id(model), last)
        scores_LBKS = self._recalled(key, lambda: score(model, cache, feed, longest, last, tell))
        self.scoring_s = self.known[key][1]
        return scores_LBKS

    def prefill(self, model: Transformer, cache: DraftCache, tokens_BS: Tensor, *how: Any) -> None:
        """See magicdec.decoding.prefill.prefill; `how` begins with the rows' lengths and the longest of them."""

        def run() -> dict[str, Tensor]:
            prefill(model, cache, tokens_BS, *how)
            return {name: tensor.clone() for name in cache.per_row if (tensor := getattr(cache, name)) is not None}

        key = (id(model), type(cache), cache.capacity, how[1])
        for name, tensor in self._recalled(key, run).items():
            getattr(cache, name).copy_(tensor)

    def _recalled(self, key: tuple, run: Any) -> Any:
        if key in self.known:
            self.saved_s += self.known[key][1]
        else:
            with Stopwatch(torch.device("cpu")) as watch:
                result = run()
            self.known[key] = result, watch.seconds
        return self.known[key][0]


def measured(prefilled: Prefilled, cell: Cell, timed: bool) -> dict:
    """Measure one speculative pass, and times. The rate's error is over rows: tokens of a row are not independent."""
    draft = prefilled.engine_for(*cell).draft_for(prefilled.decoder)
    fast, figures = times(prefilled, cell, draft) if timed else (prefilled.decoder.generate(draft), {})
    rate, error = rate_and_error(fast)
    return {
        "acceptance_rate": rate,
        "standard_error": error,
        "acceptance_length": metrics.acceptance_metrics([fast])["acceptance_length"],
        "kv_mib": draft.cache_bytes / 2**20,
        "lossless": fast.tokens == prefilled.expected,
        "accuracy": prefilled.accuracy,
        **figures,
    }


def rate_and_error(generation: Generation) -> tuple[float, float]:
    """Return accepted over proposed tokens, and the standard error of this ratio over rows."""
    active_RB = generation.accepted_RB >= 0
    proposed_B = GAMMA * active_RB.sum(0).double()
    accepted_B = (generation.accepted_RB * active_RB).sum(0).double()
    rate, rows = float(accepted_B.sum() / proposed_B.sum()), len(proposed_B)
    squares = (accepted_B - rate * proposed_B).square().sum() * rows / (rows - 1)
    return rate, float(squares.sqrt() / proposed_B.sum())


def times(prefilled: Prefilled, cell: Cell, draft: Any) -> tuple[Generation, dict]:
    """Measure a pass, the speedup of several passes in turns with autoregressive ones, and the steps' times."""
    decoder, once = prefilled.decoder, prefilled.once
    ratios, prefills = [], []
    for _ in range(PASSES):
        plain, once.saved_s = decoder.generate(), 0.0
        fast = decoder.generate(draft)
        plain_ms, fast_ms = (metrics.time_per_output_token_ms(metrics.row_times(g, 0.0)) for g in (plain, fast))
        ratios.append(plain_ms / fast_ms)
        prefills.append(1e3 * (fast.setup_seconds + once.saved_s))
    steps = profile_round(Batch(decoder, draft), REPEATS)
    scores_once = POLICIES[cell[1]].facts.selects == "prefill"
    select_ms = steps.get("select_ms", 0.0) + (1e3 * once.scoring_s if scores_once else 0.0)
    decoder.forget_cycles()
    return fast, {
        **{f"{name}_ms": steps.get(f"{name}_ms", 0.0) for name in ("target_decode", "draft", "verify")},
        "select_ms": select_ms,
        "prefill_ms": median(prefills),
        "speedup": median(ratios),
        "speedup_spread": metrics.spread(ratios),
    }


def texts(books: str | None) -> dict[str, list[str]]:
    """Return the texts to measure on, with their overrides."""
    known = TEXTS | {"text": [*TEXTS["text"], f"data.path={books}"]}
    return {text: overrides for text, overrides in known.items() if text != "text" or books}


def rows_of(folder: Path, text: str, overrides: list[str]) -> Iterator[dict]:
    """Yield a row for every cell of a text, read from its file if it has been measured before."""
    prefilled = None
    for cell in cells_of(text):
        file = folder / ("-".join(map(str, (text, *cell))) + ".json")
        if not file.exists():
            prefilled = prefilled or Prefilled(overrides, TASK_SIZES if text in TASKS else SIZES)
            row = named(text, cell) | rounded(measured(prefilled, cell, text == TIMED))
            row |= {"measured_by": f"{setting()}, attention={prefilled.attention}"}
            print(*row.values(), flush=True)
            file.write_text(json.dumps(row, indent=1))
        yield json.loads(file.read_text())


def named(text: str, cell: Cell) -> dict:
    """Return the columns that name a row."""
    draft, policy, budget = cell
    return {"data": text, "draft": draft, "policy": "none" if draft == "ngram" else policy, "budget": budget}


def main() -> None:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--books", help="a folder of text files for data=text; without it that text is left out")
    parser.add_argument("--cells", type=Path, default=ROOT / "runs/strategies", help="where each result is kept")
    parser.add_argument("--quick", action="store_true", help="one short text; write nothing")
    arguments = parser.parse_args()
    if arguments.quick:
        prefilled = Prefilled(TEXTS[TIMED], QUICK)
        for cell in cells_of(TIMED):
            print(*cell, *rounded(measured(prefilled, cell, timed=True)).values(), flush=True)
        return
    arguments.cells.mkdir(parents=True, exist_ok=True)
    measured_on = texts(arguments.books).items()
    rows = [row for text, overrides in measured_on for row in rows_of(arguments.cells, text, overrides)]
    write_csv(RESULTS / "strategies.csv", rows)
    render.write("strategies")


if __name__ == "__main__":
    main()
