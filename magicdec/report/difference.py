"""Compare two runs: the configuration keys in which they differ, and the metrics with their
changes.
"""

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from magicdec.measure.trust import BASELINE, NOISY, noise
from magicdec.report.query import MAIN_METRICS
from magicdec.report.rows import FACTS, keys_of
from magicdec.report.terminal import ONLY_PREDICTED, WIDTH_OF_A_PIPE, marked
from magicdec.report.verdict import verdicts
from magicdec.tracking.cells import new_table
from magicdec.tracking.columns import Row, is_setting
from magicdec.tracking.run_table import SPEEDS, STEPS
from magicdec.tracking.store import counted
from magicdec.units import WAYS, is_number

WHERE = (
    "status",
    "reason",
    "version",
    "source",
    "commit",
    "commit_dirty",
    "device",
    "host",
    "python",
    "torch",
    "openmp",
)

CHANGE_WIDTH = 17  # of the column with the changes, and of the gaps between all columns
# Settings that autoregressive decoding does not read.
NOT_OF_BASELINE = ("draft.", "cache.", "scenario.")
MAIN = frozenset(
    [*(MAIN_METRICS.keys() - ONLY_PREDICTED), "alpha", "speedup_wall", "memory/peak_gib"]
    + [f"{way}/{key}" for way in WAYS for key in SPEEDS]
    + [f"time/{step}_ms" for step in STEPS]
)


def difference_table(
    a: Row, b: Row, everything: bool = False, width: int = WIDTH_OF_A_PIPE
) -> RenderableType:
    """Return what differs: settings, then where and with what the runs ran, then the main metrics;
    with `everything`, all metrics. Where the width does not do, values are folded first, then keys,
    and the ids never.
    """
    keys = [key for key in keys_of([a, b]) if a.get(key) != b.get(key)]
    settings = [key for key in keys if is_setting(key)]
    facts = [key for key in WHERE if key in keys]
    figures = [
        key
        for key in keys
        if not is_setting(key) and key not in FACTS and "." not in key and key != "device"
    ]
    parts = [settings, facts, figures]
    if not everything:
        named = [key for key in settings if ".architecture." not in key]
        parts = [named, facts, [key for key in figures if key in MAIN]]
    left_out = len(settings) + len(facts) + len(figures) - sum(map(len, parts))
    table = new_table()
    longest = max((len(key) for part in parts for key in part), default=0)
    room = (width - longest - CHANGE_WIDTH) // 2
    table.add_column("", overflow="fold")
    for name in (str(row.get("id", "?")) for row in (a, b)):
        table.add_column(
            name,
            justify="right",
            overflow="fold",
            min_width=len(name),
            max_width=max(len(name), room),
        )
    table.add_column("change", justify="right", no_wrap=True)
    for part in parts:
        for key in part:
            change = _change(key, a.get(key), b.get(key)) if part is parts[-1] else ""
            table.add_row(key, marked(a, key), marked(b, key), change)
        table.add_section()
    noise_or_not = Text("\n".join(verdicts(a, b)))
    caveats = [*_caveats(a, b, settings, facts)]
    notes = list(_notes(a, b, settings))
    if left_out:
        notes.append(
            f"{counted(left_out, 'more key')} differ{'s' if left_out == 1 else ''}; --all for"
            " everything"
        )
    return Group(
        table,
        noise_or_not,
        *(Text(line, style="yellow") for line in caveats),
        Text("\n".join(notes), style="dim"),
    )


def _caveats(a: Row, b: Row, settings: list[str], facts: list[str]) -> Iterator[str]:
    """Say which of the two cannot be trusted, and whether baselines that do the same work
    differ.
    """
    for row in (a, b):
        if reasons := noise(row):
            yield f"{row['id']}: {', '.join(reasons)}"
    same_work = all(key.startswith(NOT_OF_BASELINE) for key in settings) and a.get(
        "device"
    ) == b.get("device")
    baselines = (a.get(BASELINE), b.get(BASELINE))
    times = sorted(time for time in baselines if is_number(time) and time > 0)
    if same_work and len(times) == 2 and (more := times[1] / times[0] - 1) > NOISY:
        other = f", unless {' or '.join(facts)} above explains it" if facts else ""
        yield (
            f"the autoregressive baselines do the same work and differ by {more:.0%}: one of the"
            f" runs was disturbed{other}; measure both again"
        )


def _notes(a: Row, b: Row, settings: list[str]) -> Iterator[str]:
    """Describe what is the same."""
    if not settings:
        yield "the same configuration"
    if (
        a.get("data/fingerprint") == b.get("data/fingerprint")
        and "output/fingerprint" in a.keys() & b.keys()
    ):
        same = a["output/fingerprint"] == b["output/fingerprint"]
        yield f"the same prompts, {'the same' if same else 'other'} autoregressive tokens"


def _change(key: str, a: Any, b: Any) -> str:
    """Return the relative change of a metric. An error, which is relative itself, changes by
    percentage points, and a metric that may be negative by a difference.
    """
    if not (is_number(a) and is_number(b)):
        return ""
    if key.endswith("_error"):
        return f"{100 * (b - a):+.0f} points"
    if a > 0 and b > 0:
        return f"{b / a - 1:+.1%}"
    return f"{b - a:+.4g}"
