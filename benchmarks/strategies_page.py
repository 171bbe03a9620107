"""The page and the pictures of docs/results/strategies.csv and strategies_retained.csv.

python benchmarks/strategies_page.py
"""

import csv
from itertools import groupby
from pathlib import Path
from statistics import median

import matplotlib
from page import RESULTS
from strategies import BUDGETS, DRAFTS_POLICIES, GAMMA, MIDDLE, SIZES, TASK_SIZES, TASKS, TEXTS, cells_of

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from magicdec.tracking.cells import markdown_table

ORACLE, SINKS, NO_SINKS = "topk", "streaming", "window"
DRAWN = ("self", "model")  # that go with all policies
POLICIES = ["topk", "verify_guided", "quest", "h2o", "snapkv", "pyramidkv", "streaming", "window", "quantized", "full"]
NAMES = {"data", "draft", "policy", "choice", "measured_by"}

Row = dict


def read(path: Path) -> list[Row]:
    """Return the rows of a benchmark, or [] if it has not been run."""
    if not path.exists():
        return []
    rows = []
    with path.open() as file:
        for line in csv.DictReader(file):
            numbers = {key: float(value) for key, value in line.items() if key not in {*NAMES, "lossless"} and value}
            row = (
                {key: value for key, value in line.items() if key in NAMES} | numbers | {"budget": int(line["budget"])}
            )
            rows.append(row | {"lossless": line.get("lossless") == "True"})
    return rows


def in_order(rows: list[Row]) -> list[Row]:
    """Return the rows in the page's order of drafts and policies."""
    return sorted(rows, key=lambda row: (list(DRAFTS_POLICIES).index(row["draft"]), rank(row["policy"])))


def rank(policy: str) -> int:
    """Return the position of a policy in a table."""
    return POLICIES.index(policy) if policy in POLICIES else len(POLICIES)


def draw(rows: list[Row], path: Path, value: str, error: str, label: str) -> None:
    """Draw all rows by budget, with a line per policy; a policy without a budget is a dashed line across."""
    drafts = [draft for draft in DRAWN if any(row["draft"] == draft for row in rows)]
    texts = list(dict.fromkeys(row["data"] for row in rows))
    size = (5.2 * len(texts) + 1.6, 3.6 * len(drafts) + 0.4)
    figure, axes = plt.subplots(len(drafts), len(texts), figsize=size, squeeze=False, sharex=True, sharey="row")
    for draft, line in zip(drafts, axes, strict=True):
        for text, axis in zip(texts, line, strict=True):
            mine = [row for row in rows if (row["data"], row["draft"]) == (text, draft)]
            for policy, group in groupby(mine, lambda row: row["policy"]):
                draw_policy(axis, policy, list(group), value, error)
            axis.set_title(f"draft={draft}, data={text}", fontsize=10)
            axis.set(xscale="log")
            axis.set_xticks(BUDGETS, [str(budget) for budget in BUDGETS], minor=False)
            axis.minorticks_off()
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
        line[0].set_ylabel(label)
        labelled = {
            label: handle for axis in line for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        order = sorted(labelled, key=rank)
        line[-1].legend(
            [labelled[n] for n in order], order, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False
        )
    for axis in axes[-1]:
        axis.set_xlabel("budget, entries per sequence and layer")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_policy(axis: plt.Axes, policy: str, rows: list[Row], value: str, error: str) -> None:
    """Draw one line of a panel, with its errors."""
    style = {"color": f"C{rank(policy)}", "label": policy}
    if not rows[0]["budget"]:
        axis.axhline(rows[0][value], linestyle="--", linewidth=1, **style)
        return
    shift = 1 + 0.012 * (rank(policy) - 4)  # so that bars do not hide each other
    values, errors = ([row[key] for row in rows] for key in (value, error))
    axis.errorbar([row["budget"] * shift for row in rows], values, errors, marker="o", ms=3.5, elinewidth=0.6, **style)


def page(rows: list[Row], kept: list[Row]) -> str:
    """Return the page as Markdown."""
    timed = in_time(rows)
    errors = [row["standard_error"] for row in rows if 0 < row["acceptance_rate"] < 1]
    proposals = [GAMMA * SIZES["size"] * (SIZES["generate_len"] - 1) / row["acceptance_length"] for row in rows]
    parts = [
        PAGE.format(
            finding=finding(rows),
            **SIZES,
            gamma=GAMMA,
            middle=MIDDLE,
            fewest=round(min(proposals), -2),
            most=round(max(proposals), -2),
            typical=median(errors),
            largest=max(errors),
            measured=measured_by(rows),
            lossless=f"{sum(row['lossless'] for row in rows)} of {len(rows)}",
        )
    ]
    parts += [f"Not measured: {'; '.join(absent)}.\n"] if (absent := missing(rows)) else []
    for text, group in by_text(rows):
        parts += [f"## Acceptance rate, data={text}\n", overview(group, "acceptance_rate", "standard_error", "±")]
        parts += [f"### Sinks, data={text}\n", sinks(group)]
    parts += [f"## The oracle\n\n{above_oracle(rows)}\n", f"## The small draft\n\n{small_draft(rows)}\n"]
    if any(row["data"] in TASKS for row in rows):
        parts += [f"## Tasks\n\n{TASKS_TEXT.format(middle=MIDDLE, **TASK_SIZES)}\n", tasks(rows)]
    if kept:
        parts += [f"## Attention retained\n\n{RETAINED_TEXT.format(measured=measured_by(kept))}\n", retained(kept)]
    if timed:
        parts += [f"## Speedup\n\n{SPEEDUP_TEXT.format(gamma=GAMMA)}"]
        parts += [overview(timed, "speedup", "speedup_spread", "spread", ".0%")]
        parts += [f"## Times\n\n{TIMES_TEXT.format(middle=MIDDLE)}\n", times(timed)]
    return "\n".join(parts)


def finding(rows: list[Row]) -> str:
    """Return two sentences: the policies that are accepted most on the first text, and what other drafts reach."""
    text, mine = by_text(rows)[0]
    whole = {"full", "quantized", ORACLE}
    own = [row for row in mine if row["draft"] == "self" and row["budget"] == MIDDLE and row["policy"] not in whole]
    best = sorted(own, key=lambda row: -row["acceptance_rate"])[:3]
    shown = ", ".join(f"`{row['policy']}` ({row['acceptance_rate']:.2f})" for row in best)
    least, most = ({row["acceptance_rate"] for row in mine if row["draft"] == name} for name in ("model", "ngram"))
    return (
        f"Over {MIDDLE} of {SIZES['context_len']:,} tokens of data={text}, self-speculation is accepted most often "
        f"with {shown}.\nThe independent draft reaches {max(least):.2f} at best, over any cache, and prompt lookup "
        f"{max(most):.2f}."
    )


def in_time(rows: list[Row]) -> list[Row]:
    """Return the rows of the text whose passes were timed."""
    return [row for row in rows if "speedup" in row]


def by_text(rows: list[Row]) -> list[tuple[str, list[Row]]]:
    """Return the rows of each text that was measured at all budgets."""
    texts = [text for text in dict.fromkeys(row["data"] for row in rows) if text not in TASKS]
    return [(text, [row for row in rows if row["data"] == text]) for text in texts]


def missing(rows: list[Row]) -> list[str]:
    """Return what strategies.py compares but has not measured yet."""
    measured, absent = {(row["data"], row["draft"], row["policy"]) for row in rows}, []
    for text in TEXTS:
        wanted = dict.fromkeys((draft, policy) for draft, policy, _ in cells_of(text) if draft != "ngram")
        left = [f"draft={d} cache={p} on data={text}" for d, p in wanted if (text, d, p) not in measured]
        absent += left if len(left) < len(wanted) else [f"data={text}"]
    return absent


def measured_by(rows: list[Row]) -> str:
    """Return where the rows were measured."""
    return "; ".join(dict.fromkeys(row["measured_by"] for row in rows))


def overview(rows: list[Row], value: str, error: str, last: str, form: str = ".2f") -> str:
    """Return a table of drafts and policies by budget; its last column is the largest error of the line."""
    lines = []
    for (draft, policy), group in groupby(rows, lambda row: (row["draft"], row["policy"])):
        mine = list(group)
        values = {row["budget"]: f"{row[value]:.2f}" for row in mine}
        largest = format(max(row[error] for row in mine), form)
        lines.append([draft, policy, *(values.get(budget, values.get(0, "")) for budget in BUDGETS), largest])
    return markdown_table(["draft", "policy", *map(str, BUDGETS), last], lines)


def sinks(rows: list[Row]) -> str:
    """Return a table of the same budget with and without the first tokens."""
    rates = {(row["draft"], row["policy"], row["budget"]): row["acceptance_rate"] for row in rows}
    lines = []
    for draft in DRAWN:
        pairs = [(rates.get((draft, SINKS, budget)), rates.get((draft, NO_SINKS, budget))) for budget in BUDGETS]
        lines.append(
            [draft, *(f"{a:.2f} / {b:.2f} ({a - b:+.2f})" if a is not None and b is not None else "" for a, b in pairs)]
        )
    return markdown_table([f"{SINKS} / {NO_SINKS}", *map(str, BUDGETS)], lines)


def above_oracle(rows: list[Row]) -> str:
    """Name the selections of as many entries that were accepted more often than the oracle's."""
    key = ("data", "draft", "budget")
    oracle = {tuple(row[k] for k in key): row for row in rows if row["policy"] == ORACLE}
    rivals = [row for row in rows if row["policy"] not in (ORACLE, "quantized", "full") and row["draft"] != "model"]
    pairs = [(row, oracle[place]) for row in rivals if (place := tuple(row[k] for k in key)) in oracle]
    above = [(row, best) for row, best in pairs if row["acceptance_rate"] > best["acceptance_rate"]]
    found = [
        f"`{row['policy']}` at {row['budget']} (draft={row['draft']}, data={row['data']}) "
        f"{row['acceptance_rate']:.2f} against {best['acceptance_rate']:.2f}"
        for row, best in above
    ]
    return (
        f"`{ORACLE}` keeps the most attention, which is not quite the most agreement. Accepted more often than it, of "
        f"{len(pairs)} choices of as many entries by drafts that are the target: {'; '.join(found) or 'none'}."
    )


def small_draft(rows: list[Row]) -> str:
    """Say whether an independent draft gains from the whole context."""
    parts = []
    for text, mine in by_text(rows):
        own = [row for row in mine if row["draft"] == "model"]
        whole = [row["acceptance_rate"] for row in own if row["policy"] == "full"]
        if whole:
            best = max(own, key=lambda row: row["acceptance_rate"])
            where = f"`{best['policy']}`" + (f" at {best['budget']}" if best["budget"] else "")
            parts.append(
                f"data={text}: {whole[0]:.2f} over everything, at best {best['acceptance_rate']:.2f} ({where})."
            )
    return " ".join(["Acceptance rate of the independent draft.", *parts, SMALL_DRAFT])


def tasks(rows: list[Row]) -> str:
    """Return a table of policies by task, at one budget."""
    rates = {(row["data"], row["draft"], row["policy"]): row for row in rows if row["budget"] in (0, MIDDLE)}
    names = dict.fromkeys((row["draft"], row["policy"]) for row in rows if row["data"] in TASKS)
    lines = []
    for name in names:
        cells = [rates.get((task, *name)) for task in TASKS]
        shown = [f"{c['acceptance_rate']:.2f} ± {c['standard_error']:.2f}" if c else "" for c in cells]
        scores = [f"{c['accuracy']:.2f}" for c in cells if c and "accuracy" in c]
        lines.append([*name, *shown, *(scores or [""])])
    return markdown_table(["draft", "policy", *TASKS, "ruler's answers"], lines)


def retained(rows: list[Row]) -> str:
    """Return a table of choices by budget."""
    shares = {(row["choice"], row["budget"]): f"{row['mean']:.2f}" for row in rows}
    names = dict.fromkeys(row["choice"] for row in rows)
    return markdown_table(
        ["choice", *map(str, BUDGETS)], [[name, *(shares[name, b] for b in BUDGETS)] for name in names]
    )


def times(rows: list[Row]) -> str:
    """Return a table of step times, and of the memory that a draft takes."""
    columns = ("target_decode_ms", "verify_ms", "draft_ms", "select_ms", "prefill_ms")
    lines = []
    for row in rows:
        if row["budget"] not in (0, MIDDLE):
            continue
        figures = [f"{row[name]:,.0f}" if row[name] >= 100 else f"{row[name]:.1f}" for name in columns]
        figures += [f"{row['acceptance_length']:.2f}", f"{row['kv_mib']:.1f}"]
        lines.append([row["draft"], row["policy"], *figures])
    header = ["draft", "policy", "T_T", "T_V", "T_D", "T_select", "prefill", "length", "KV, MiB"]
    return markdown_table(header, lines)


PAGE = """# Drafts and cache policies on the bundled pair

{finding}

How often the target accepts what each draft proposes, over each cache policy and budget. {size} rows of {context_len:,}
tokens (the pair was trained for 8,448), {generate_len} new tokens each, gamma {gamma}, fp32, greedy; identical to
autoregressive decoding in {lossless} runs. `python benchmarks/strategies.py --books FOLDER`, {measured}.

Acceptance does not depend on the machine. Each rate is of {fewest:,.0f} to {most:,.0f} proposals; their standard errors
(±) are over rows, {typical:.2f} typically and {largest:.2f} at most, so that differences of a few hundredths mean
little. All continue the same prompts. All figures, the draft's KV memory among them, are in
[strategies.csv](strategies.csv); [../strategies.md](../strategies.md) says what each policy keeps.

![Acceptance rate against budget, a line per policy](strategies.png)
"""

SMALL_DRAFT = """Where a part of the context beats all of it, the draft is a weak reader of long contexts, and `topk` is
no ceiling."""

TASKS_TEXT = """Contexts of {context_len:,} tokens and a budget of {middle}. `data=repeat` ends as an early passage
begins, of shuffled tokens: only a policy that reaches back sees how it went on. (The bundled target finds its place
again some 2,000 tokens back, not 8,000.) `data=ruler` (niah_multikey) asks for a needle. Its answers are scored, alike
with and without a draft; use a real model for that."""

RETAINED_TEXT = """What the entries chosen for the first decoding step receive of that step's attention over everything,
in a mean over layers; data=stdlib; `python benchmarks/strategies_retained.py`, {measured}. `best pages` are chosen by
the attention itself: what is lost between `topk` and them is the price of pages, and from them to `quest` that of
judging pages by bounds."""

SPEEDUP_TEXT = """Tokens per second of a row over those of autoregressive decoding, on data=stdlib with gamma {gamma},
in passes that take turns with autoregressive ones, without the draft's prefill; `spread` is the widest between the
two passes of a cell.

![Speedup against budget, a line per policy](strategies_speedup.png)
"""

TIMES_TEXT = """Milliseconds at a budget of {middle}, from the same runs. T_select is a part of T_D where entries are
chosen in every step (`quest`, `topk`), of the round with `verify_guided`, and of the prefill with `snapkv`, `pyramidkv`
and `h2o`. `prefill` is what the draft takes before its first round. Length is tokens per round; KV is the draft's cache
beyond the target's own."""


def main() -> None:
    """Write the page and its pictures."""
    rows, kept = in_order(read(RESULTS / "strategies.csv")), read(RESULTS / "strategies_retained.csv")
    compared = [row for _, mine in by_text(rows) for row in mine]
    draw(compared, RESULTS / "strategies.png", "acceptance_rate", "standard_error", "acceptance rate")
    if timed := [row | {"half_spread": row["speedup"] * row["speedup_spread"] / 2} for row in in_time(rows)]:
        draw(timed, RESULTS / "strategies_speedup.png", "speedup", "half_spread", "speedup")
    (RESULTS / "strategies.md").write_text(page(rows, kept))


if __name__ == "__main__":
    main()
