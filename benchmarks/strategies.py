"""Every draft, cache policy and budget on the bundled pair: acceptance, times, memory; a page and a picture.

    python benchmarks/strategies.py FOLDER_OF_BOOKS     # data=stdlib and data=text; writes docs/results/strategies.*
    python benchmarks/strategies.py --quick             # one small text, to try it out; writes nothing
    python benchmarks/strategies.py --page              # the page anew, from the figures that lie there

All of a text share one prefill. Speedups are ratios within a row: an autoregressive step is timed beside each.
"""

import argparse
import csv
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from itertools import groupby, product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from torch import Tensor

from magicdec import build
from magicdec.cache.draft_cache import CACHES
from magicdec.cache.kv_cache import KVCache
from magicdec.config import Config, load
from magicdec.decoding.decoder import Decoder
from magicdec.decoding.scoring import score
from magicdec.drafts import model as model_drafts
from magicdec.drafts.base import DRAFTS
from magicdec.engines.native import NativeEngine
from magicdec.measure import metrics
from magicdec.measure.timers import Stopwatch
from magicdec.models.transformer import Transformer
from magicdec.tracking.progress import progress

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results"
BUDGETS, GAMMA = (64, 128, 256, 512), 3
CONTEXT_LEN, ROWS, NEW_TOKENS = 8192, 2, 48  # the pair was trained for 8,448 tokens
STEPS = 5  # of each kind timed
WITHOUT_BUDGET = ("full", "quantized")  # quantized has one, but reads everything
OTHER_POLICIES = {
    "ngram": ("full",),
    "layer_skip": ("full", "streaming"),
    "hierarchical": ("streaming", "quest", "topk"),
}
POLICY_DRAFTS = ("self", "model")  # that go with all policies
ORACLE, SINKS, NO_SINKS = "topk", "streaming", "window"


def configured(*overrides: str) -> Config:
    """A configuration as `launch.py` would make it."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return load(compose("config", [f"draft.gamma={GAMMA}", "hardware=cpu", *overrides]))


def combinations(drafts: Iterable[str]) -> Iterator[tuple[str, str, int]]:
    """Draft, policy, budget; 0 where a policy has no use for one."""
    for name in drafts:
        for policy in OTHER_POLICIES.get(name, CACHES):
            if CACHES[policy].needs_target and DRAFTS[name].needs_model:
                continue
            for budget in (0,) if policy in WITHOUT_BUDGET else BUDGETS:
                yield name, policy, budget


def measure_text(drafts: Iterable[str], overrides: list[str]) -> Iterator[dict]:
    """A row of figures for every combination with these drafts on one prefilled batch."""
    plan = build.plan(configured("draft=hierarchical", *overrides))  # which has all that any draft needs
    prompts = build.prompts(plan, build.tokenizer(plan)).tokens
    with progress() as bars:
        engine = replace(build.engine(plan, bars), gamma=GAMMA)
    decoder = engine.open(prompts).decoder
    decoder.prefill(engine.prefill_chunk)
    expected = decoder.generate().tokens
    model_drafts.score = one_pass = OnePass()
    for name, policy, budget in combinations(drafts):
        chosen = configured(f"draft={name}", f"cache={policy}", *([f"cache.budget={budget}"] if budget else []))
        with_policy = replace(
            engine,
            draft_name=name,
            draft_model=engine.draft_model if DRAFTS[name].needs_model else None,
            draft_options=build.draft_options(chosen.draft),
            policy=policy,
            cache_options={key: value for key, value in asdict(chosen.cache).items() if key != "policy"},
        )
        where = {"data": plan.config.data.name, "draft": name, "policy": policy if name != "ngram" else "none"}
        yield where | {"budget": budget} | measure(with_policy, decoder, expected, one_pass)


class OnePass:
    """The scoring pass, which is the same at every budget: run once for each model and its time counted each time."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, int], tuple[Tensor, float]] = {}
        self.saved_s = 0.0

    def __call__(self, model: Transformer, cache: KVCache, tokens_BS: Tensor, longest: int, *how: Any) -> Tensor:
        """See magicdec.decoding.scoring.score; `how` begins with the number of last tokens that count."""
        key, self.saved_s = (id(model), how[0]), 0.0
        if key in self.known:
            scores_LBKS, self.saved_s = self.known[key]
            return scores_LBKS
        with Stopwatch(tokens_BS.device) as watch:
            scores_LBKS = score(model, cache, tokens_BS, longest, *how)
        self.known[key] = scores_LBKS, watch.seconds
        return scores_LBKS


def measure(engine: NativeEngine, decoder: Decoder, expected: list[list[int]], one_pass: OnePass) -> dict:
    """A speculative pass, and then, behind its end, the steps alone, at full cost."""
    draft = engine.draft_for(decoder)
    one_pass.saved_s = 0.0
    fast = decoder.generate(draft)
    target_ms = timed(decoder.decode_token, decoder)
    none_B = torch.zeros_like(decoder.state.num_tokens_B)
    accepted = metrics.acceptance_metrics([fast])
    per_round = CACHES[engine.policy].selects in ("round", "step")  # what is chosen at the prefill is timed with it
    figures = {key: float(accepted[key] or 0.0) for key in ("acceptance_rate", "acceptance_length")}
    figures |= {
        "target_ms": target_ms,
        "draft_ms": timed(lambda: draft.propose(decoder.state), decoder, lambda: draft.commit(none_B)) / draft.gamma,
        "select_ms": timed(draft.selection(decoder.state), decoder) if per_round else 0.0,
        "prefill_ms": 1e3 * (fast.draft_prefill_seconds + one_pass.saved_s),
        "kv_mib": draft.cache_bytes / 2**20,
        "speedup": target_ms / metrics.speed_metrics([metrics.row_times(fast, 0.0)])["time_per_output_token_ms"],
    }
    return {key: round(value, 4) for key, value in figures.items()} | {"lossless": fast.tokens == expected}


@torch.inference_mode()
def timed(step: Callable[[], object] | None, decoder: Decoder, undo: Callable[[], None] = lambda: None) -> float:
    """Median milliseconds; 0 where there is no such step."""
    seconds = []
    for _ in range(STEPS if step else 0):
        with Stopwatch(decoder.device) as watch:
            step()
        undo()
        decoder.state.forget_rounds()
        seconds.append(watch.seconds)
    return 1e3 * median(seconds) if seconds else 0.0


def draw(rows: list[dict], path: Path) -> None:
    """Acceptance against budget, a line per policy; what needs no budget is a dashed line across."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = [key for key in dict.fromkeys((row["data"], row["draft"]) for row in rows) if key[1] in POLICY_DRAFTS]
    figure, axes = plt.subplots(1, len(panels), figsize=(5.5 * len(panels), 4.5), squeeze=False)
    for (text, draft), axis in zip(panels, axes.flat, strict=True):
        mine = [row for row in rows if (row["data"], row["draft"]) == (text, draft)]
        for policy, group in groupby(mine, lambda row: row["policy"]):
            rates = {row["budget"]: row["acceptance_rate"] for row in group}
            style = {"color": f"C{list(CACHES).index(policy)}", "label": policy}
            if 0 in rates:
                axis.axhline(rates[0], linestyle="--", **style)
            else:
                axis.plot(rates.keys(), rates.values(), marker="o", **style)
        axis.set(title=f"draft={draft}, data={text}", xscale="log", xlabel="budget", ylabel="acceptance rate")
        axis.set_xticks(BUDGETS, [str(budget) for budget in BUDGETS], minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7, ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def page(rows: list[dict], written_by: str) -> str:
    """The whole page as Markdown."""
    parts = [PAGE.format(written_by=written_by, rows=ROWS, context=CONTEXT_LEN, new=NEW_TOKENS, gamma=GAMMA)]
    texts = dict.fromkeys(row["data"] for row in rows)
    measured = {(row["data"], row["draft"]) for row in rows}
    missing = [f"draft={d} on data={t}" for t, d in product(texts, sorted(DRAFTS)) if (t, d) not in measured]
    parts += [f"Not measured: {', '.join(missing)}.\n"] if missing else []
    for text, group in groupby(rows, lambda row: row["data"]):
        mine = list(group)
        parts += [f"## Acceptance rate, data={text}\n", overview(mine), f"### Sinks, data={text}\n", sinks(mine)]
    parts += [
        f"## The small draft\n\n{small_draft(rows)}\n",
        f"## Above the oracle\n\n{above_oracle(rows)}\n",
        "## Everything\n",
        everything(rows),
    ]
    return "\n".join(parts)


def overview(rows: list[dict]) -> str:
    """Drafts and policies downwards, budgets across."""
    lines = []
    for (draft, policy), group in groupby(rows, lambda row: (row["draft"], row["policy"])):
        rates = {row["budget"]: f"{row['acceptance_rate']:.2f}" for row in group}
        lines.append([draft, policy, *(rates.get(budget, rates.get(0, "")) for budget in BUDGETS)])
    return table(["draft", "policy", *map(str, BUDGETS)], lines)


def sinks(rows: list[dict]) -> str:
    """The same budget with and without the first tokens."""
    rates = {(row["draft"], row["policy"], row["budget"]): row["acceptance_rate"] for row in rows}
    lines = []
    for draft in dict.fromkeys(row["draft"] for row in rows if row["draft"] in POLICY_DRAFTS):
        pairs = [(rates[draft, SINKS, budget], rates[draft, NO_SINKS, budget]) for budget in BUDGETS]
        lines.append([draft, *(f"{having:.2f} / {lacking:.2f} ({having - lacking:+.2f})" for having, lacking in pairs)])
    return table([f"{SINKS} / {NO_SINKS}", *map(str, BUDGETS)], lines)


def above_oracle(rows: list[dict]) -> str:
    """Selections of as many entries that were accepted more often than the oracle's."""
    key = ("data", "draft", "budget")
    oracle = {tuple(row[k] for k in key): row["acceptance_rate"] for row in rows if row["policy"] == ORACLE}
    found = []
    own = [row for row in rows if row["draft"] != "model"]
    for row in own:
        best = oracle.get(tuple(row[k] for k in key))
        if best is not None and row["acceptance_rate"] > best:
            where = f"{row['policy']} at {row['budget']} (draft={row['draft']}, data={row['data']})"
            found.append(f"{where} {row['acceptance_rate']:.2f} against {best:.2f}")
    compared = sum(tuple(row[k] for k in key) in oracle and row["policy"] != ORACLE for row in own)
    return (
        f"`{ORACLE}` keeps the most attention, which is not quite the most agreement. Accepted more often than it, of "
        f"{compared} choices of as many entries: {'; '.join(found) or 'none'}."
    )


def small_draft(rows: list[dict]) -> str:
    """Whether an independent draft gains from the whole context."""
    parts = []
    for row in rows:
        if (row["draft"], row["policy"]) == ("model", "full"):
            others = [other for other in rows if (other["data"], other["draft"]) == (row["data"], "model")]
            best = max(others, key=lambda other: other["acceptance_rate"])
            over = f"{row['acceptance_rate']:.2f} over everything"
            better = f"{best['acceptance_rate']:.2f} over `{best['policy']}` {best['budget'] or ''}"
            parts.append(f"Acceptance rate of the independent draft on data={row['data']}: {over}, {better}.")
    parts.append("Where a part of the context beats all of it, the draft is a weak reader of long contexts:")
    return " ".join([*parts, f"`{ORACLE}` is no ceiling for it, and is not compared below."])


def everything(rows: list[dict]) -> str:
    """Every row with all its figures."""
    header = [
        "data",
        "draft",
        "policy",
        "budget",
        "rate",
        "length",
        "T_T",
        "T_D",
        "T_select",
        "prefill",
        "KV",
        "speedup",
    ]
    lines = []
    for row in rows:
        figures = [f"{row['acceptance_rate']:.3f}", f"{row['acceptance_length']:.2f}"]
        figures += [f"{row[name]:.1f}" for name in ("target_ms", "draft_ms", "select_ms", "prefill_ms", "kv_mib")]
        names = [row["data"], row["draft"], row["policy"], str(row["budget"] or "")]
        lines.append([*names, *figures, f"{row['speedup']:.2f}", "yes" if row["lossless"] else "NO"])
    return table([*header, "lossless"], lines)


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *rows]) + "\n"


def provenance(arguments: str) -> str:
    """The command, the commit and the machine."""
    git = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    threads = torch.get_num_threads()
    return (
        f"`python benchmarks/strategies.py {arguments}`, commit {commit}, {build.cpu_name()}, {threads} "
        f"thread{'s' if threads > 1 else ''}, PyTorch {torch.__version__}, fp32, greedy"
    )


def read(path: Path) -> tuple[str, list[dict]]:
    """What `write` has written."""
    lines = path.read_text().splitlines()
    rows = [dict(row) for row in csv.DictReader(lines[1:])]
    texts = ("data", "draft", "policy")
    for row in rows:
        row |= {key: float(value) for key, value in row.items() if key not in (*texts, "lossless", "budget")}
        row |= {"budget": int(row["budget"]), "lossless": row["lossless"] == "True"}
    return lines[0].removeprefix("# "), rows


def write(path: Path, written_by: str, rows: list[dict]) -> None:
    """The figures as CSV below a line that says where they are from."""
    with path.open("w", newline="") as file:
        file.write(f"# {written_by}\n")
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    """Measure, and write the figures, the page and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("books", nargs="?", help="a folder of text files for data=text")
    parser.add_argument("--quick", action="store_true", help="one small text; write nothing")
    parser.add_argument("--page", action="store_true", help="write the page and the picture anew; measure nothing")
    arguments = parser.parse_args()
    if not (arguments.books or arguments.quick or arguments.page):
        parser.error("name a folder of books, or --quick, or --page")
    os.environ["MAGICDEC_ROOT"] = str(ROOT)
    figures = RESULTS / "strategies.csv"
    if not arguments.page:
        rows, written_by = [], provenance("FOLDER_OF_BOOKS")
        sizes = (640, 2, 8) if arguments.quick else (CONTEXT_LEN, ROWS, NEW_TOKENS)
        sized = [f"batch.{key}={n}" for key, n in zip(("context_len", "size", "generate_len"), sizes, strict=True)]
        texts = [["data=stdlib"]] + ([] if arguments.quick else [["data=text", f"data.path={arguments.books}"]])
        for drafts, text in product((sorted({*DRAFTS} - {"model"}), ["model"]), texts):  # the slowest last
            for row in measure_text(drafts, [*text, *sized]):
                print(*row.values(), flush=True)
                rows.append(row)
                if not arguments.quick:
                    write(figures, written_by, rows)
        if arguments.quick:
            return
    written_by, rows = read(figures)
    rows.sort(key=lambda row: (row["data"], row["draft"] not in POLICY_DRAFTS, row["draft"], row["policy"]))
    draw(rows, RESULTS / "strategies.png")
    (RESULTS / "strategies.md").write_text(page(rows, written_by))


PAGE = """# Drafts and cache policies on the bundled pair

{written_by}.
{rows} rows of {context:,} tokens (the pair was trained for 8,448), {new} new tokens each, gamma {gamma}. Acceptance
is what this page is about: it does not depend on the machine, and each rate is of some 150 proposals, so that
differences below 0.05 mean little. Times are milliseconds on a machine that others were using: compare T_T, T_D and
the speedup within a row, not between rows. T_select is a part of T_D where entries are chosen in every step, and of
the round with `verify_guided`. `prefill` is what the draft takes before its first round: selection, where a policy
chooses then, and an independent draft's own prefill. KV is the draft's cache in MiB; the target's entries that a
policy reads in place cost nothing. The figures are in [strategies.csv](strategies.csv).

![Acceptance rate against budget, a line per policy](strategies.png)
"""


if __name__ == "__main__":
    main()
