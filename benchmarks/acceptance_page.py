"""The page and the pictures of what benchmarks/acceptance_study.py has measured.

python benchmarks/acceptance_study.py --page
"""

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from acceptance_results import CENTRE, FEWEST, LEVEL, POLICIES, SHIPPED, Found, Results, by_policy, ship
from acceptance_study import GENERATED, LONG, MAIN, ROWS, TASKS, Cell, known
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from page import RESULTS

from magicdec.costmodel.acceptance import published
from magicdec.tracking.cells import markdown_table

WAYS = {0.0: "greedy", 0.7: "temperature 0.7"}
TEXTS = {"books": "novels", "code": "Python's standard library", "long": f"novels, {LONG:,} new tokens"}
LOCAL = (
    "A possible reason: of a budget of 256, SnapKV gives 32 entries to recent tokens and StreamingLLM 252, and short "
    "continuations of novels by a small model may need their neighbourhood more than what the end of the prompt "
    "attended to."
)
fill = partial(textwrap.fill, width=120, break_long_words=False, break_on_hyphens=False)
PAPER = sorted(
    (point.context_len, point.alpha)
    for point in published()
    if (point.target, point.draft, point.policy, point.budget) == ("llama-3.1-8b", "self", "streaming", 512)
)

OPENING = """# What SmolLM2-135M accepts of its own drafts

{finding}

The model is SmolLM2-135M-Instruct after 4-bit quantization, dequantized (`target=smollm2-135m-q4`): its weights are not
those of the hub's model. Slices go through one centre: 4,096 tokens of a novel, budget 256, gamma 3, fp32;
{rows} documents at a time, {generated} new tokens each. {lossless}
Acceptance does not depend on the hardware, and no times are reported here:
[predicted speedups](../predictions/smollm2.md) have a page of their own.

alpha is the probability that a proposal is accepted, given that all before it in its round were. In brackets is the
{level}% interval, by resampling whole documents, because tokens of one document are not independent. † marks cells of
fewer than {fewest:,} proposals. What has not been measured is left out.

`python benchmarks/acceptance_study.py --books FOLDER` measures, and resumes; with `--page` it makes this page of
[smollm2.jsonl](smollm2.jsonl) ({cells} lines). The books are eight novels in the public domain, of the kind that PG-19
is made of. Measured by {measured}."""

POLICY = """## Policy and budget

Novels, 4,096 tokens, gamma 3. Greedy output of so small a model soon repeats itself. The share of its runs of eight
tokens that have occurred before in the same output: {repeats}.
Loops are easy to draft, so greedy figures flatter every draft, and sampled output says more about other models.

![Alpha by budget, a line per policy](smollm2_budget.png)
"""
CONTEXT = """## Context

Novels, gamma 3.

![Alpha by context, a line per policy](smollm2_context.png)
"""
GAMMA = """## Gamma

Novels, 4,096 tokens, budget 256. If proposals were accepted independently of each other, alpha would be the same at
every gamma.
"""
TEXT = """## Text

4,096 tokens (1,024 where the output is long), budget 256, gamma 3.
"""
OTHER = """## Other drafts

Novels, 4,096 tokens, gamma 3. int8 and int4 are the draft's weights (`draft.quantization`); layer_skip drafts with the
first of 30 layers; ngram looks the text up. The cache `full` keeps every entry. The target's own weights were made of
4-bit codes, so that int4 loses less here than it would elsewhere.
"""
TASK = """## RULER

Needles in novels: the share of questions whose answer the output contains, decoded autoregressively and speculatively.
{changed}
"""


def write(lines: Path) -> None:
    """Write the page, its pictures, and the acceptances that the package ships."""
    results = Results(known(lines))
    ship(results.cells.values(), SHIPPED)
    made = (section(results) for section in (opening, policies, contexts, paper, gammas, texts, others, tasks))
    (RESULTS / "smollm2.md").write_text("\n\n".join(text.strip() for text in made if text) + "\n")


def opening(results: Results) -> str:
    """Return the finding, and how it was measured."""
    return OPENING.format(
        finding=finding(results),
        rows=ROWS,
        generated=GENERATED,
        cells=len(results.lines),
        level=LEVEL,
        fewest=FEWEST,
        lossless=results.lossless,
        measured=" and ".join(sorted({line["measured_by"].split(", ", 1)[1] for line in results.lines.values()})),
    )


def finding(results: Results) -> str:
    """Return the two sentences that the page opens with."""
    listed = {}
    for temperature in WAYS:
        cells = {one.cell.policy: one for one in results.slice("policy", temperature=temperature)}
        named = [f"{cells[policy].alpha:.2f} ({policy})" for policy in MAIN if policy in cells]
        listed[temperature] = ", ".join(named)
    return fill(
        f"Where the draft reads 256 of 4,096 tokens of a novel, alpha is {listed[0.7]} at temperature 0.7. "
        f"Greedy decoding accepts more, {listed[0.0]}, because greedy output of so small a model repeats itself."
    )


def grid(cells: Iterable[Found], row: Callable[[Cell], str], column: str) -> str:
    """Return a table of alphas by a row and a field of cells; only rows and columns with a measured cell are in it."""
    by_place = {(row(one.cell), getattr(one.cell, column)): str(one) for one in cells}
    rows = list(dict.fromkeys(place[0] for place in by_place))
    columns = sorted({place[1] for place in by_place})
    head = [column, *(f"{value:,}" for value in columns)]
    return markdown_table(head, [[r, *(by_place.get((r, c), "") for c in columns)] for r in rows])


def ways(slices: dict[float, list[Found]], row: Callable[[Cell], str], column: str) -> str:
    """Return a table for each way of choosing tokens."""
    found = {WAYS[way]: grid(cells, row, column) for way, cells in slices.items() if cells}
    return "\n\n".join(f"Alpha, {way}:\n\n{table.strip()}" for way, table in found.items())


def policies(results: Results) -> str:
    """Return the slice by policy and budget."""
    slices = {way: results.slice("policy", "budget", temperature=way) for way in WAYS}
    draw({WAYS[way]: cells for way, cells in slices.items() if cells}, "budget", RESULTS / "smollm2_budget.png")
    repeats = [f"{fmean(c.repeated for c in cells):.0%} ({WAYS[way]})" for way, cells in slices.items() if cells]
    table = ways(slices, lambda cell: cell.policy, "budget")
    return f"{POLICY.format(repeats=', '.join(repeats))}\n{table}"


def contexts(results: Results) -> str:
    """Return the slice by context."""
    slices = {}
    for way in WAYS:
        cells = results.slice("policy", "budget", "context", temperature=way)
        elsewhere = {(one.cell.policy, one.cell.budget) for one in cells if one.cell.context != 4096}
        slices[way] = [one for one in cells if (one.cell.policy, one.cell.budget) in elsewhere]
    panels = {f"budget 256, {WAYS[way]}": [c for c in cells if c.cell.budget == 256] for way, cells in slices.items()}
    draw({title: cells for title, cells in panels.items() if cells}, "context", RESULTS / "smollm2_context.png")
    return f"{CONTEXT}\n{ways(slices, lambda cell: f'{cell.policy}, {cell.budget:,}', 'context')}"


def paper(results: Results) -> str:
    """Return how the curves compare with the paper's."""
    (first, high), (last, low) = PAPER[0], PAPER[-1]
    ours = []
    for way, name in WAYS.items():
        cells = sorted((one.cell.context, one) for one in results.slice("context", policy="streaming", temperature=way))
        ours.append(f"{name}, {', '.join(f'{one} at {context:,}' for context, one in cells)}")
    pairs = [
        (one, other)
        for cell, one in results.cells.items()
        if cell.text == "books" and cell.policy == "snapkv"
        if (other := results.cells.get(replace(cell, policy="streaming")))
    ]
    above = sum(one.alpha > other.alpha for one, other in pairs)
    clear = sum(one.low > other.high for one, other in pairs), sum(one.high < other.low for one, other in pairs)
    differs = 2 * above < len(pairs)
    return "## Compared with the paper\n\n" + fill(
        f"MagicDec reports alpha {high:.2f} at {first:,} tokens falling to {low:.2f} at {last:,}, for Llama-3.1-8B on "
        f"PG-19 with StreamingLLM's cache of 512 entries. Here, with 256 entries: {'; '.join(ours)}. In the paper "
        f"SnapKV is above StreamingLLM. Here it is above in {above} of {len(pairs)} pairs of cells on novels; where "
        f"intervals do not overlap, above in {clear[0]} and below in {clear[1]}. {LOCAL if differs else ''}"
    )


def gammas(results: Results) -> str:
    """Return the slice by gamma."""
    slices = {}
    for way in WAYS:
        cells = results.slice("policy", "gamma", temperature=way)
        others = {one.cell.policy for one in cells if one.cell.gamma != CENTRE.gamma}
        slices[way] = [one for one in cells if one.cell.policy in others]
    table = ways(slices, lambda cell: cell.policy, "gamma")
    return f"{GAMMA}\n{table}" if table else ""


def texts(results: Results) -> str:
    """Return the slice by text."""
    rows = []
    for way, name in WAYS.items():
        for text in (*TEXTS, *TASKS):
            here: dict[str, Any] = {"text": text, "temperature": way, "context": 1024 if text == "long" else 4096}
            cells = {one.cell.policy: str(one) for one in results.slice("policy", **here)}
            lookup = results.cells.get(replace(CENTRE, **here, draft="ngram", policy="full", budget=0))
            if cells:
                known_cells = [*(cells.get(policy, "") for policy in MAIN), str(lookup or "")]
                rows.append([TEXTS.get(text, f"RULER, {text}"), name, *known_cells])
    return f"{TEXT}\n{markdown_table(['text', 'tokens', *MAIN, 'ngram'], rows)}"


def others(results: Results) -> str:
    """Return the drafts that are not the target's own weights over a sparse cache."""
    rows = []
    for way, name in WAYS.items():
        for one in results.slice("draft", "policy", "budget", "quantization", "num_layers", temperature=way):
            cell = one.cell
            if cell.draft != "self" or cell.quantization != "none":
                draft = f"{cell.draft}, {cell.num_layers} layers" if cell.num_layers else cell.draft
                draft += "" if cell.quantization == "none" else f", {cell.quantization}"
                cache = "" if cell.draft == "ngram" else f"{cell.policy} {cell.budget or ''}".strip()
                rows.append([draft, cache, name, str(one), f"{one.rate:.2f}"])
    head = ["draft", "cache", "tokens", "alpha", "acceptance rate"]
    return f"{OTHER}\n{markdown_table(head, rows)}" if rows else ""


def tasks(results: Results) -> str:
    """Return the accuracy on RULER's tasks, both ways."""
    cells = [one for one in results.cells.values() if one.accuracy is not None and one.cell.temperature == 0]
    rows = [
        [
            one.cell.text,
            f"{one.cell.context:,}",
            f"{one.cell.policy} {one.cell.budget}",
            str(one.documents),
            f"{one.accuracy_autoregressive:.0%}",
            f"{one.accuracy:.0%}",
            str(one.different),
        ]
        for one in sorted(cells, key=lambda one: (one.cell.context, one.cell.text, by_policy(one)))
    ]
    changed, excused = sum(one.different for one in cells), sum(one.excused for one in cells)
    text = "Not one answer changed: every output is the same, token for token."
    if changed:
        text = f"{changed} outputs differ from the autoregressive ones, {excused} of them by near-ties."
    head = ["task", "context", "cache", "questions", "autoregressive", "speculative", "outputs that differ"]
    return f"{TASK.format(changed=text)}\n{markdown_table(head, rows)}" if rows else ""


def draw(panels: dict[str, list[Found]], label: str, path: Path) -> None:
    """Draw alpha against `label`, a field of cells: a line for each policy, with intervals. A panel has a title."""
    figure = Figure(figsize=(5.2 * len(panels) + 1.3, 4.0), layout="constrained")
    axes = list(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0])
    for axis, (title, cells) in zip(axes, panels.items(), strict=True):
        for number, policy in enumerate(POLICIES):
            points = sorted((getattr(one.cell, label), one) for one in cells if one.cell.policy == policy)
            if points:
                line(axis, points, 1 + 0.01 * (number - 3), color=f"C{number}", label=policy)
        values = sorted({getattr(one.cell, label) for one in cells})
        axis.set(xscale="log", xlabel=f"{label}, tokens", title=title)
        axis.set_xticks(values, [f"{value:,}" for value in values])
        axis.set_xlim(values[0] / 1.3, values[-1] * 1.3)
        axis.minorticks_off()
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("alpha")
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    axes[-1].legend(handles.values(), handles, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.savefig(path, dpi=110)


def line(axis: Axes, points: Sequence[tuple[float, Found]], shift: float, **style: Any) -> None:
    """Draw one policy; `shift` keeps bars apart."""
    alphas = [one.alpha for _, one in points]
    errors = [[one.alpha - one.low for _, one in points], [one.high - one.alpha for _, one in points]]
    axis.errorbar([x * shift for x, _ in points], alphas, errors, marker="o", ms=3.5, elinewidth=0.7, **style)
