"""The MagicDec paper's first version, its throughput against latency, and the share of KV, next to predictions.

benchmarks/costmodel.py adds these sections to docs/results/costmodel.md and writes the CSV files next to it.
Published values are those of magicdec/costmodel/published/, each with its source. Figures that exist only as pictures
are named, and nothing is read off them.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby
from statistics import median
from typing import Any

import numpy as np
from costmodel_scores import Compared
from page import RESULTS
from render import groups, pivot, read_csv, rounded, span, table, write_csv

from magicdec.costmodel.acceptance import Curves, published
from magicdec.costmodel.comparison import acceptance_length
from magicdec.costmodel.hardware import DEVICES, hardware_named
from magicdec.costmodel.predict import Prediction, predict
from magicdec.costmodel.round import Setup, round_times
from magicdec.costmodel.tables import FIRST_VERSION_BUDGET, PUBLISHED, Row, first_version
from magicdec.costmodel.targets import architecture

GAMMAS = range(1, 9)  # among which the best is chosen
FIGURE = PUBLISHED.with_name("magicdec_first_version_figure1.csv")
PAPER = "MagicDec (arXiv 2408.11049), ICLR version, table {}"
SHARES = {  # target: the batches and contexts of which the share of KV is shown
    "llama-2-7b-32k": ((1, 4, 16, 64, 256), (1024, 4000, 16000, 32000)),
    "llama-3.1-8b": ((1, 16, 32, 64, 256), (4000, 16000, 32000, 100000)),
}
SHOWN = (1, 64)  # batches of the page
MACHINE = "8xA100"
Line = dict[str, Any]


@cache
def best_gamma(row: Row) -> Prediction:
    """Return the prediction over gammas, at the acceptance that the ICLR version gives."""
    return predict(row.setup(architecture), GAMMAS, curves=Curves(published(), row.task))


def speedups() -> list[Line]:
    """Return the first version's rows with the predictions for them: at the paper's gamma, and at the best."""
    lines = []
    for row in first_version():
        length, best = acceptance_length(row) or 0.0, best_gamma(row).best
        predicted = round_times(row.setup(architecture), row.gamma).speedup(length)
        lines.append(
            _cell(row)
            | {"gamma": row.gamma, "published_speedup": row.speedup, "predicted_speedup": predicted}
            | {"error": predicted / (row.speedup or 1.0) - 1, "best_gamma": best.gamma, "best_speedup": best.speedup}
            | {"version": row.version, "source": row.source}
        )
    return lines


def latencies() -> list[Line]:
    """Return the points of the first version's Figure 1 with the predictions for them, at the gamma predicted best."""
    lines = []
    for point in read_csv(FIGURE):
        keys = ("target", "draft", "policy", "hardware", "context_len", "batch_size")
        row = Row(**{key: point[key] for key in keys}, gamma=0, task="pg19", kv_budget=FIRST_VERSION_BUDGET)
        best = best_gamma(row).best
        slow, fast = 1e3 * best.times.target.total, 1e3 * best.time_per_token_s
        names = ("autoregressive_ms", "autoregressive_tokens_per_second", "speculative_ms")
        names += ("speculative_tokens_per_second", "speedup")
        batch = 1e3 * row.batch_size
        values = dict(zip(names, (slow, batch / slow, fast, batch / fast, best.speedup), strict=True))
        lines.append(
            _cell(row)
            | {"best_gamma": best.gamma, "error": (best.speedup or 0.0) / point["speedup"] - 1}
            | {f"published_{name}": point[name] for name in names}
            | {f"predicted_{name}": value for name, value in values.items()}
            | {"version": f"{point['version']}, figure 1", "source": point["source"]}
        )
    return lines


def paper_rows(compared: Sequence[Compared]) -> Iterator[Line]:
    """Yield the rows of the ICLR version as those of the first."""
    for c in compared:
        values = {"gamma": c.row.gamma, "published_speedup": c.measured, "predicted_speedup": c.predicted}
        yield _cell(c.row) | values | {"error": c.error, "version": "ICLR", "source": PAPER.format(c.row.table)}


def _cell(row: Row) -> Line:
    keys = ("hardware", "target", "draft", "policy", "context_len", "batch_size")
    return {key: getattr(row, key) for key in keys}


def shares() -> list[Line]:
    """Return the share of reading KV in a decode step: as predicted, and by the bytes and FLOPs of Table 1."""
    lines = []
    for target, (batches, contexts) in SHARES.items():
        for batch in batches:
            for context in contexts:
                setup = Setup(architecture(target), hardware_named(MACHINE), batch, context)
                step = setup.target_time
                work = step.total - step.overhead - step.communication
                lines.append(
                    {"target": target, "batch": batch, "context": context, "share": step.kv / step.total}
                    | {"share_of_work": step.kv / work, "by_table_1": by_table_1(setup)}
                )
    return lines


def by_table_1(setup: Setup) -> float:
    """Return the share by Table 1 of the authors' post: a layer's bytes and FLOPs, on the datasheet's machine.

    Its layer has an MLP of 4 d: parameters take max(2 P / bandwidth, 2 b P / FLOPs) with P = 10 d^2 + 2 d^2 / g, and
    the KV cache max(4 b n d / g / bandwidth, 4 b n d / FLOPs).
    """
    device, batch, g = DEVICES["A100"], setup.batch, setup.target.group_size
    d = setup.target.hidden_size
    parameters, entries = 10 * d**2 + 2 * d**2 / g, batch * setup.context * d
    dense = max(2 * parameters / device.bandwidth, 2 * batch * parameters / device.flops)
    kv = max(4 * entries / g / device.bandwidth, 4 * entries / device.flops)
    return kv / (dense + kv)


def slopes(compared: Sequence[Compared]) -> list[Line]:
    """Return the share of KV that the measured T_T of tables 3a and 3c imply: what grows with the context.

    T_T at one batch is a line over contexts; all but its intercept is taken as KV. The prediction is treated alike.
    """
    lines = []
    order = sorted((c for c in compared if c.row.table in ("3a", "3c")), key=_series)
    for (name, batch), members in groupby(order, _series):
        rows = list(members)
        contexts = np.array([c.row.context_len for c in rows])
        if len(rows) < 3:
            continue
        last = int(contexts.argmax())
        ways = {
            "measured": np.array([c.row.autoregressive_ms for c in rows], dtype=float),
            "predicted": np.array([1e3 * c.times.target.total for c in rows]),
        }
        values = {way: float(np.polyfit(contexts, ms, 1)[0] * contexts[last] / ms[last]) for way, ms in ways.items()}
        kv = rows[last].times.target.kv / rows[last].times.target.total
        lines.append(
            {"target": name, "batch": batch, "contexts": len(rows), "context": int(contexts[last])}
            | values
            | {"predicted_kv": kv}
        )
    return lines


def _series(c: Compared) -> tuple[str, int]:
    return c.row.target, c.row.batch_size


def sections(compared: Sequence[Compared]) -> list[str]:
    """Write the CSV files next to the page, draw the second chart, and return the sections of the page."""
    first, figure = speedups(), latencies()
    write_csv(RESULTS / "costmodel.csv", [rounded(line) for line in (*paper_rows(compared), *first, *figure)])
    _draw(figure)
    return [*_speedups(first), *_latencies(figure), *_shares(compared)]


def _draw(figure: Sequence[Line]) -> None:
    from charts import draw_chart

    points = [
        {"ms": line[f"{kind}_{way}_ms"], "tokens": line[f"{kind}_{way}_tokens_per_second"], "way": f"{way}, {kind}"}
        for way in ("autoregressive", "speculative")
        for kind in ("published", "predicted")
        for line in figure
        if line["context_len"] == 8000
    ]
    draw_chart(
        RESULTS / "costmodel-latency.png",
        points,
        "ms",
        "tokens",
        series="way",
        labels=("milliseconds per token", "tokens per second"),
    )


def _speedups(first: Sequence[Line]) -> list[str]:
    errors = [abs(line["error"]) for line in first]
    own = [line for line in first if line["hardware"] == MACHINE]
    worst = max(own, key=lambda line: abs(line["error"]))
    return [
        "## The paper's first version",
        "",
        "The first version (arXiv v1 and v2, August 2024) gives each speedup at its best gamma. Its authors' pages "
        f"have {len(first)} rows, with neither times nor acceptance. Predicted at its gamma, the median error is "
        f"{median(errors):.1%}, on 8xA100 {median(abs(line['error']) for line in own):.1%}; the furthest of these "
        f"is {worst['target']} at "
        f"{worst['context_len']:,} x {worst['batch_size']}, {worst['error']:+.0%}. [costmodel.csv](costmodel.csv) has "
        "the rows of both versions with the source of each, and the gamma predicted best.",
        "",
        table(_by_machine(first), "hardware", "target", "draft", "rows", "median error=error:.1%"),
        "",
        f"- Assumed: a budget of {FIRST_VERSION_BUDGET} for the draft, because the rows name none, and the acceptance "
        "of the ICLR version for the same models and contexts. Where they chose a larger budget, more was accepted.",
        "- 8xH100 is calibrated on the software of November 2024; these rows are older.",
        "- Its end-to-end figure (speedup by batch, with gammas) exists only as a picture; its values are not used.",
        "- `python launch.py -m experiment=paper/first_version hydra/launcher=basic` predicts cells of it as runs, "
        "with `published/speedup` next to `predicted/speedup`.",
        "",
    ]


def _by_machine(first: Sequence[Line]) -> list[Line]:
    """Return a line for the rows of each machine, target and draft."""
    lines = []
    for (hardware, target, draft), rows in groups(first, "hardware", "target", "draft"):
        error = median(abs(row["error"]) for row in rows)
        lines.append({"hardware": hardware, "target": target, "draft": draft, "rows": len(rows), "error": error})
    return lines


def _latencies(figure: Sequence[Line]) -> list[str]:
    errors = [abs(line["error"]) for line in figure]
    shown = [line for line in figure if line["context_len"] == 8000]
    return [
        "## Throughput and latency",
        "",
        "Figure 1 of the first version, TinyLlama-1.1B drafting for Llama-2-7B-32K on 8xA100, whose data the authors' "
        f"page holds. Over its {len(figure)} points the median error of the predicted ratio (throughput with "
        f"speculation over that without, at the gamma predicted best) is {median(errors):.1%}, and the largest "
        f"{max(errors):.1%}. [costmodel.csv](costmodel.csv) has both latencies and throughputs of each. "
        "At 8,000 tokens:",
        "",
        "![Tokens per second by milliseconds per token, published and predicted](costmodel-latency.png)",
        "",
        "- Published are latencies and throughputs, not batches. At 8,000 tokens a batch is their product; elsewhere "
        "ratio times latency is the T_T that table 3a has for the batch. Where the table has no row, the order of "
        "the points decides.",
        *_repeated(shown),
        "",
    ]


def _repeated(shown: Sequence[Line]) -> Iterator[str]:
    """Yield the published points whose throughput does not follow from batch and latency."""
    for line in shown:
        for way in ("autoregressive", "speculative"):
            ms, tokens = line[f"published_{way}_ms"], line[f"published_{way}_tokens_per_second"]
            batch = ms * tokens / 1e3
            if abs(batch / line["batch_size"] - 1) > 0.01:
                yield (
                    f"- One point does not fit: {tokens:,} tokens/s at {ms} ms would be a batch of {batch:.0f}. "
                    f"Batch {line['batch_size']} gives {1e3 * line['batch_size'] / ms:,.0f}."
                )


def _shares(compared: Sequence[Compared]) -> list[str]:
    lines, grown = shares(), slopes(compared)
    write_csv(RESULTS / "costmodel-shares.csv", list(map(rounded, lines)))
    write_csv(RESULTS / "costmodel-growth.csv", list(map(rounded, grown)))
    shown = [line for line in lines if line["batch"] in SHOWN]
    most = max(abs(line["measured"] - line["predicted"]) for line in grown)
    return [
        "## The share of KV in a decode step",
        "",
        f"Each cell, on {MACHINE}: the predicted share of reading KV in T_T; the same without launches and "
        "communication; the share by the bytes and FLOPs of a layer in Table 1 of the authors' post of September 2024, "
        "on the A100's datasheet. [costmodel-shares.csv](costmodel-shares.csv) has more batches.",
        "",
        pivot(shown, ("target", "batch"), "context", "{share:.0%}, {share_of_work:.0%}, {by_table_1:.0%}"),
        "",
        "The paper's times show the share too: at one batch, KV is the part of T_T that grows with the context. "
        f"At the longest context of the {len(grown)} batches of tables 3a and 3c, it is "
        f"{span((line['measured'] for line in grown), '.0%', '')} as measured and "
        f"{span((line['predicted'] for line in grown), '.0%', '')} as predicted, at most {100 * most:.1f} points "
        f"apart, and the predicted share of KV {span((line['predicted_kv'] for line in grown), '.0%', '')} "
        "([costmodel-growth.csv](costmodel-growth.csv)).",
        "",
        "- The published figures of this share (bars of Llama-2-7B at 4,000 tokens, theoretical; curves of a layer of "
        "width 1,024 on an H100, measured) exist only as pictures, from which no value is taken.",
        "- The T_T of Llama-2-7B were fitted (tables 3a and 3b share them), those of Llama-3.1-8B were not.",
        "",
    ]
