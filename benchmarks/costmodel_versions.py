"""The MagicDec paper's first version, its throughput against latency, and the share of KV, next to
predictions.

benchmarks/costmodel.py writes these CSV files next to docs/results/costmodel.md, which has a
section on each. Published values are those of magicdec/costmodel/published/, each with its source.
Figures that exist only as pictures are named there, and nothing is read off them.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from operator import itemgetter
from typing import Any

import numpy as np
from costmodel_scores import Compared
from page import RESULTS
from render import groups, read_csv, write_csv

from magicdec.costmodel.acceptance import Curves, published_points
from magicdec.costmodel.comparison import acceptance_length
from magicdec.costmodel.hardware import DEVICES, hardware_named
from magicdec.costmodel.prediction import Prediction, predict
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
MACHINE = "8xA100"
Line = dict[str, Any]


@cache
def best_gamma(row: Row) -> Prediction:
    """Return the prediction over gammas, at the acceptance that the ICLR version gives."""
    return predict(row.setup(architecture), GAMMAS, curves=Curves(published_points(), row.task))


def speedups() -> Iterator[Line]:
    """Yield the first version's rows with the predictions for them: at the paper's gamma, and at
    the best.
    """
    for row in first_version():
        length, best = acceptance_length(row) or 0.0, best_gamma(row).best
        predicted = round_times(row.setup(architecture), row.gamma).speedup(length)
        line = {
            "gamma": row.gamma,
            "published_speedup": row.speedup,
            "predicted_speedup": predicted,
        }
        line |= {
            "error": predicted / (row.speedup or 1.0) - 1,
            "best_gamma": best.gamma,
            "best_speedup": best.speedup,
        }
        yield _cell(row) | line | {"version": row.version, "source": row.source}


def latencies() -> Iterator[Line]:
    """Yield the points of the first version's Figure 1 with the predictions for them, at the gamma
    predicted best.
    """
    for point in read_csv(FIGURE):
        keys = ("target", "draft", "policy", "hardware", "context_len", "batch_size")
        row = Row(
            **{key: point[key] for key in keys},
            gamma=0,
            task="pg19",
            kv_budget=FIRST_VERSION_BUDGET,
        )
        best = best_gamma(row).best
        slow, fast = 1e3 * best.times.target.total, 1e3 * best.time_per_token_s
        batch, values = 1e3 * row.batch_size, {}
        for way, ms in (("autoregressive", slow), ("speculative", fast)):
            values |= {f"{way}_ms": ms, f"{way}_tokens_per_second": batch / ms}
        values["speedup"] = best.speedup
        line = {"best_gamma": best.gamma, "error": (best.speedup or 0.0) / point["speedup"] - 1}
        line |= {f"published_{name}": point[name] for name in values}
        line |= {f"predicted_{name}": value for name, value in values.items()}
        yield (
            _cell(row)
            | line
            | {"version": f"{point['version']}, figure 1", "source": point["source"]}
        )


def paper_rows(compared: Sequence[Compared]) -> Iterator[Line]:
    """Yield the rows of the ICLR version as those of the first."""
    for c in compared:
        values = {
            "gamma": c.row.gamma,
            "published_speedup": c.measured,
            "predicted_speedup": c.predicted,
        }
        values |= {
            "error": c.error,
            "version": "ICLR",
            "table": c.row.table,
            "source": PAPER.format(c.row.table),
        }
        values |= {
            f"{step}_error": c.time_errors.get(step) for step in ("target", "draft", "verify")
        }
        yield _cell(c.row) | values


def _cell(row: Row) -> Line:
    keys = ("hardware", "target", "draft", "policy", "context_len", "batch_size")
    return {key: getattr(row, key) for key in keys}


def shares() -> Iterator[Line]:
    """Yield the share of reading KV in a decode step: as predicted, and by the bytes and FLOPs of
    Table 1.
    """
    for target, (batches, contexts) in SHARES.items():
        for batch, context in product(batches, contexts):
            setup = Setup(architecture(target), hardware_named(MACHINE), batch, context)
            step = setup.target_time
            work = step.total - step.overhead - step.communication
            line = {
                "target": target,
                "batch": batch,
                "context": context,
                "share": step.kv / step.total,
            }
            yield line | {"share_of_work": step.kv / work, "by_table_1": by_table_1(setup)}


def by_table_1(setup: Setup) -> float:
    """Return the share by Table 1 of the authors' post: a layer's bytes and FLOPs, on the
    datasheet's machine.

    Its layer has an MLP of 4 d: parameters take max(2 P / bandwidth, 2 b P / FLOPs) with P = 10 d^2
    + 2 d^2 / g, and the KV cache max(4 b n d / g / bandwidth, 4 b n d / FLOPs).
    """
    device, batch, g = DEVICES["A100"], setup.batch, setup.target.group_size
    d = setup.target.hidden_size
    parameters, entries = 10 * d**2 + 2 * d**2 / g, batch * setup.context * d
    dense = max(2 * parameters / device.bandwidth, 2 * batch * parameters / device.flops)
    kv = max(4 * entries / g / device.bandwidth, 4 * entries / device.flops)
    return kv / (dense + kv)


def slopes(compared: Sequence[Compared]) -> list[Line]:
    """Return the share of KV that the measured T_T of tables 3a and 3c imply: what grows with the
    context.

    T_T at one batch is a line over contexts; all but its intercept is taken as KV. The prediction
    is treated alike.
    """
    lines = []
    found = [_cell(c.row) | {"c": c} for c in compared if c.row.table in ("3a", "3c")]
    order = sorted(found, key=itemgetter("target", "batch_size"))
    for (name, batch), members in groups(order, "target", "batch_size"):
        rows = [member["c"] for member in members]
        contexts = np.array([c.row.context_len for c in rows])
        if len(rows) < 3:
            continue
        last = int(contexts.argmax())
        ways = {"measured": np.array([c.row.autoregressive_ms for c in rows], dtype=float)}
        ways["predicted"] = np.array([1e3 * c.times.target.total for c in rows])
        values = {
            way: float(np.polyfit(contexts, ms, 1)[0] * contexts[last] / ms[last])
            for way, ms in ways.items()
        }
        kv = rows[last].times.target.kv / rows[last].times.target.total
        line = {
            "target": name,
            "batch": batch,
            "contexts": len(rows),
            "context": int(contexts[last]),
        }
        lines.append(line | values | {"predicted_kv": kv})
    return lines


def write_versions(compared: Sequence[Compared]) -> None:
    """Write the CSV files of these sections."""
    write_csv(RESULTS / "costmodel.csv", [*paper_rows(compared), *speedups(), *latencies()])
    write_csv(RESULTS / "costmodel-shares.csv", list(shares()))
    write_csv(RESULTS / "costmodel-growth.csv", slopes(compared))
