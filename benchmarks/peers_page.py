"""The page of what benchmarks/peers.py has measured."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from page import RESULTS, provenance

from magicdec.config.load import compose
from magicdec.tracking.cells import markdown_table

OURS = "native"
PLAIN = ("llamacpp", "openvino", "transformers", "vllm")
ON_PYTORCH = ("transformers", "vllm")
REDUCED = ("llamacpp, F16", "openvino, 8-bit KV")
FILE = RESULTS / "peers-cpu.md"
KEPT = ("<!-- Written by hand: kept when the page is written again. -->", "<!-- End of what is written by hand. -->")

Figures = dict[str, Any]
Cell = dict[str, Figures]
Where = tuple[str, int, int]  # model, rows, context
Time = Callable[[Figures], float]


def name_of(model: str, rows: int, context: int) -> str:
    """Return a cell's name."""
    return f"{model}, {rows} x {context:,}"


def write(found: dict[str, Cell], wanted: dict[Where, list[str]], settings: dict[str, Any]) -> None:
    """Write the page of the cells that have been measured, of those that were wanted with these ways of decoding."""
    old = FILE.read_text() if FILE.exists() else ""
    start, end = KEPT
    by_hand = old.split(start)[1].split(end)[0].strip() if start in old and end in old else ""
    measured = {where: found[name_of(*where)] for where in sorted(wanted) if OURS in found.get(name_of(*where), {})}
    plain = {w: cell for w, cell in measured.items() if {*PLAIN}.intersection(wanted[w]) <= cell.keys()}
    compared = {where: at_their_best(cell, wanted[where]) for where, cell in plain.items()}
    versions = {row["version"] for cell in measured.values() for row in cell.values()}
    defaults = compose([])
    text = PAGE.format(
        finding=finding(compared),
        by_hand="\n\n".join(filter(None, (start, by_hand, end))),
        provenance=provenance("python benchmarks/peers.py"),
        versions="\n".join(f"- {version}" for version in sorted(versions)),
        built=BUILT if any("built without" in version for version in versions) else "",
        budget=defaults.cache.budget,
        data=defaults.data.name,
        races=races(compared),
        everything=everything(measured),
        missing=missing(found, wanted),
        **settings,
    )
    FILE.write_text(text.rstrip() + "\n")


def at_their_best(cell: Cell, wanted: Sequence[str]) -> Cell:
    """Return a cell without the others' speculation where a way of theirs is missing: it may be the fastest."""
    if set(wanted) <= {*cell, *REDUCED}:
        return cell
    return {way: row for way, row in cell.items() if way.startswith(OURS) or way in PLAIN}


def finding(measured: dict[Where, Cell]) -> str:
    """Return a sentence for each model: where ours is ahead of all others, and by how much."""
    sentences = []
    for model in dict.fromkeys(model for model, _, _ in measured):
        cells = [cell for (name, _, _), cell in measured.items() if name == model]
        plain = [ratio(cell, OURS, best) for cell in cells if (best := fastest(cell, PLAIN))]
        every = [ratio(cell, mine(cell), best) for cell in cells if (best := fastest(cell, others(cell)))]
        first = [ratio(cell, OURS, best, prefill_s) for cell in cells if (best := fastest(cell, PLAIN, prefill_s))]
        if plain:
            parts = [f"{model}: decoding autoregressively, magicdec is {ahead(plain)}"]
            parts += [f"each engine decoding in its fastest way, it is {ahead(every)}"] if every else []
            parts += [f"prefilling all rows, it is {ahead(first)}"]
            sentences.append("; ".join(parts) + ".")
    return "\n".join(sentences)


def ahead(ratios: Sequence[float]) -> str:
    """Return how often ours is ahead of the fastest other engine, and the range of the ratios."""
    won, low, high = sum(one >= 1 for one in ratios), min(ratios), max(ratios)
    cells = f"{len(ratios)} cell{'s' if len(ratios) > 1 else ''}"
    span = f"{low:.2f}x to {high:.2f}x as fast, median {median(ratios):.2f}x" if len(ratios) > 1 else f"{low:.2f}x"
    return f"ahead of the fastest other engine in {won} of {cells} ({span})"


def races(measured: dict[Where, Cell]) -> str:
    """Return the table of ours against the best of the others."""
    lines = []
    for where, cell in measured.items():
        own = mine(cell)
        versus = [(OURS, PLAIN), (OURS, ON_PYTORCH), (own, others(cell))]
        line = [text for way, ways in versus for text in race(cell, way, fastest(cell, ways))]
        lines.append([*place(where), *line[:4], own, *line[4:]])
    columns = ["best peer, autoregressive", "native to it", "best of transformers and vllm", "native to it"]
    return markdown_table([*HEADER, *columns, "our best way", "best peer, any way", "ours to it"], lines)


def everything(measured: dict[Where, Cell]) -> str:
    """Return the table with a line for each way of decoding."""
    lines = []
    for where, cell in measured.items():
        own = cell[OURS]
        for way, row in cell.items():
            length, step = row["acceptance_length"], row["time_per_output_token_ms"]
            line = [*place(where), way, f"{row['tokens_per_second']:,.0f}", f"{ratio(cell, way, OURS):.2f}x"]
            line += [f"{step:.1f}", "" if length else f"{own['limit_ms'] / step:.2f}"]
            line += [f"{row['time_to_first_token_ms'] / 1e3:.2f}", f"{prefill_s(row):.2f}"]
            line += [f"{length:.2f}" if length else ""]
            lines.append([*line, *agreement(row["tokens"], own)])
    columns = ["tokens/s", "to native", "TPOT, ms", "of limit", "TTFT, s", "last row's", "length"]
    columns += ["same rows", "gap"]
    return markdown_table([*HEADER, "engine", *columns], lines)


def agreement(tokens: list[list[int]], own: Figures) -> tuple[str, str]:
    """Return how many rows are ours, and the target's largest gap between its choice and another engine's.

    Each row counts where it first differs. A token that is not the target's second choice lies further behind than
    that one, which `>` says.
    """
    gaps = []
    for row, expected, seconds in zip(tokens, own["tokens"], own["second_choices"], strict=True):
        differs = (i for i, (a, b) in enumerate(zip(row, expected, strict=True)) if a != b)
        if (at := next(differs, None)) is not None:
            second, gap = seconds[at]
            gaps.append((gap, row[at] != second))
    gap, further = max(gaps, default=(0.0, False))
    return f"{len(tokens) - len(gaps)}/{len(tokens)}", f"{'> ' * further}{gap:.1e}" if gaps else ""


def missing(found: dict[str, Cell], wanted: dict[Where, list[str]]) -> str:
    """Return what was not measured: ways of decoding in measured cells, and whole cells."""
    lines, cells = [], []
    for where, ways in sorted(wanted.items()):
        lacking = [way for way in ways if way not in found.get(name_of(*where), {})]
        if len(lacking) == len(ways):
            cells.append(name_of(*where))
        elif lacking:
            lines.append(f"- {name_of(*where)}: {'; '.join(lacking)}")
    lines += [f"- whole cells: {'; '.join(cells)}"] if cells else []
    return "\n".join(lines) or "Nothing is missing."


def place(where: Where) -> list[str]:
    """Return the first columns of a line."""
    model, rows, context = where
    return [model, str(rows), f"{context:,}"]


def mine(cell: Cell) -> str:
    """Return the fastest of our ways of decoding."""
    return fastest(cell, [way for way in cell if way.startswith(OURS)]) or OURS


def others(cell: Cell) -> list[str]:
    """Return the ways of the other engines that compete with ours at its best: none where none of them speculated."""
    ways = [way for way in cell if not way.startswith(OURS) and way not in REDUCED]
    return ways if set(ways) - set(PLAIN) else []


def tpot_ms(row: Figures) -> float:
    """Return a way's time per output token, in milliseconds."""
    return float(row["time_per_output_token_ms"])


def prefill_s(row: Figures) -> float:
    """Return the seconds after which all rows have their first token."""
    return float(row["wall_s"] - row["decode_s"])


def fastest(cell: Cell, ways: Sequence[str], time: Time = tpot_ms) -> str | None:
    """Return the fastest of these ways, or None where none of them was measured."""
    return min((way for way in ways if way in cell), key=lambda way: time(cell[way]), default=None)


def ratio(cell: Cell, way: str, other: str, time: Time = tpot_ms) -> float:
    """Return how many times as fast a way is as another."""
    return time(cell[other]) / time(cell[way])


def race(cell: Cell, way: str, best: str | None) -> list[str]:
    """Return a rival, and how many times as fast as it a way of ours is."""
    return [best, f"{ratio(cell, way, best):.2f}x"] if best else ["", ""]


HEADER = ("target", "batch", "context")

BUILT = """llama.cpp is a prebuilt wheel for many processors: a build for this one, with the instructions that it
lacks, would be faster. The others choose their instructions when they start."""

PAGE = """# Our engine and others on a CPU

{finding}

{by_hand}

{provenance}; fp32 and greedy unless a row says otherwise, {new} new tokens a row, gamma {gamma}; `self` drafts over a
streaming cache of {budget} entries. SmolLM2-135M is the instruct model after 4-bit quantisation, dequantised; `tiny` is
the bundled pair. Prompts are source code (`data={data}`), which suits n-grams. How the engines are set up and timed:
[peers.md](../peers.md). They were:

{versions}

{built}

Ratios are of times per output token (TPOT) within a cell: above 1, ours is faster. All ways of a cell were measured
one after the other: medians of {repeats} passes of each, or a single one from {once:,} prompt tokens on
(SmolLM2-135M; {tiny:,} with `tiny`), for all engines alike. llama.cpp takes part up to {llamacpp:,} prompt tokens of
SmolLM2-135M: more take it minutes to prefill in fp32.

## Ours against the best of the others

Cells in which every engine decoded autoregressively. Weights or a KV cache of fewer bits do not compete. The last
columns are filled in where no way of the other engines' speculation that the cell asks for is missing.

{races}
## Everything

Tokens per second count decoding alone, over all rows. `to native` above 1 is faster than native. `of limit` is what an
autoregressive step would take if every operator took max(bytes / read bandwidth, FLOPs / matmul rate), with our weights
in bfloat16, over the time that it takes; above 1, the machine was slower while both rates were measured than while
decoding. TTFT is the mean over rows, `last row's` the time after which all have their first token: native, transformers
and openvino prefill all rows at once, llamacpp and vllm in turn. Length is that of acceptance: tokens per round.

`same rows` counts rows whose tokens are those of native, autoregressive. Where rows differ, `gap` is how far the other
engine's token lay behind the target's own choice where the row first differs: the difference of the two logits over the
larger, at most of all rows, as our engine computes them in fp32. Engines add in different orders, so that tokens whose
logits nearly tie may change places.

{everything}
## Not measured

Of each cell, ways of decoding that there was no time for, or that failed:

{missing}
"""
