"""The menus of the page's charts: what each chart can show, over which settings, and the choices
that it begins with.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import islice
from typing import Any

from magicdec.report.charts import UNITS
from magicdec.report.fastest import PREDICTED
from magicdec.report.query import LOAD_KEYS, NEVER_MIXED, rank
from magicdec.tracking.columns import Row
from magicdec.units import WAYS, is_number

MAX_PICKS, MAX_VALUES = 9, 40  # settings with a menu of their values; values of such a setting
SPEEDS = (  # of each way
    "tokens_per_second",
    "time_per_output_token_ms",
    "time_to_first_token_ms",
    "request_latency_ms",
    "goodput_rps",
)
# What a chart shows, by its name in the menu: kinds that are drawn together, and their metrics.
MEASURES: dict[str, dict[str, str]] = {
    "speedup": {
        "measured": "speedup",
        "measured, per batch": "speedup_wall",
        "measured, per level": "speedup_duration",
        "predicted": PREDICTED,
        "published": "published/speedup",
    },
    "best gamma": {"predicted": "predicted/gamma"},
    "formula speedup": {"from step times and acceptance": "formula/speedup", "measured": "speedup"},
    **{name: {way: f"{way}/{name}" for way in reversed(WAYS)} for name in SPEEDS},
    **{
        name: {"measured": name}
        for name in ("acceptance_rate", "acceptance_length", "alpha", "memory/peak_gib")
    },
}
ACCEPTANCE = ("acceptance_rate", "acceptance_length", "alpha")  # of which a drawn one says nothing
TRADE = [
    [way, f"{way}/time_per_output_token_ms", f"{way}/tokens_per_second"] for way in reversed(WAYS)
]
# Predictions, as the name of a series, the measurement and the prediction.
OWN, MODEL = "the run's own step times and acceptance", "cost model"
STEPS = {"T_T": "target_decode", "T_D": "draft", "T_V": "verify", "round time": "round"}
COMPARED = {
    "speedup": [
        [OWN, "speedup", "formula/speedup"],
        [MODEL, "speedup", PREDICTED],
        [
            f"{MODEL} at the paper's gamma and acceptance",
            "published/speedup",
            "published/predicted_speedup",
        ],
    ],
    "speedup per batch": [
        [OWN, "speedup_wall", "formula/speedup_wall"],
        [MODEL, "speedup_wall", "predicted/speedup_wall"],
    ],
    **{
        f"{name}, ms": [[MODEL, f"time/{step}_ms", f"predicted/{step}_ms"]]
        for name, step in STEPS.items()
    },
}


def measures_of(keys: Sequence[str], numeric: Collection[str]) -> dict[str, dict[str, str]]:
    """Return the part of MEASURES that there are numbers for, and the acceptance of categories."""
    measures = {
        name: {kind: key for kind, key in kinds.items() if key in numeric}
        for name, kinds in MEASURES.items()
    }
    for name in ACCEPTANCE[:2]:
        of_categories = [
            key for key in keys if key.startswith("category/") and key.endswith(f"/{name}")
        ]
        measures[f"{name} by category"] = {
            key[len("category/") : -len(name) - 1]: key for key in of_categories
        }
    return {name: kinds for name, kinds in measures.items() if kinds}


def comparisons(numeric: Collection[str]) -> dict[str, tuple[str, list[list[str]]]]:
    """Return the part of COMPARED that there are numbers for: the title of what predictions are
    compared with, and the series.
    """
    titled = {}
    for name, series in COMPARED.items():
        sources = [source for source in series if {*source[1:]} <= set(numeric)]
        kinds = {
            "published" if measured.startswith("published/") else "measured"
            for _, measured, _ in sources
        }
        if sources:
            titled[name] = (f"{' or '.join(sorted(kinds))} {name}", sources)
    return titled


def picks_of(rows: Sequence[Row], settings: Sequence[str]) -> dict[str, str]:
    """Return the settings that have a menu of values, with the first choice: what must not mix is
    apart.
    """
    picks = {}
    for key in dict.fromkeys([*NEVER_MIXED[::-1], *settings, "device"]):
        values = Counter(_typed(row[key]) for row in rows if key in row)
        if 1 < len(values) <= MAX_VALUES:
            usual = next(
                (value for value in ("measured", "compare") if value in values),
                values.most_common(1)[0][0],
            )
            picks[key] = usual if key in NEVER_MIXED else ""
    return dict(islice(picks.items(), MAX_PICKS))


def menus_of(
    rows: Sequence[Row],
    settings: Sequence[str],
    measures: Collection[str],
    picks: Collection[str],
) -> dict[str, list[str]]:
    """Return all menus: those of the charts, and the values of the settings that have one."""
    axes = [key for key in settings if len({row.get(key) for row in rows}) <= MAX_VALUES]
    menus = _menus(axes, measures)
    for key in picks:
        values = sorted({row[key] for row in rows if key in row}, key=rank)
        menus[f"pick:{key}"] = ["", *map(_typed, values)]
    return menus


def _matches(row: Row, key: str, value: str) -> bool:
    """Return whether the page shows a run where `value` is picked, as its script does: a run that
    failed or is predicted has no source of acceptance, and stays.
    """
    held = row.get(key, value if key == "acceptance/source" else None)
    return not value or _typed(held) == value


def _typed(value: Any) -> str:
    """Return a value as it is typed on the command line; the page compares numbers as numbers."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _menus(axes: Sequence[str], measures: Collection[str]) -> dict[str, list[str]]:
    """Return the menus of the charts: what each shows, over which setting, with a colour for each
    value of which.
    """
    loads = [key for key in LOAD_KEYS if key in axes]
    values = {"1": [*measures], "2": [name for name in ACCEPTANCE if name in measures]}
    values["3"] = (
        [name for name in measures if name in MEASURES and WAYS[0] in MEASURES[name]]
        if loads
        else []
    )
    menus: dict[str, list[str]] = {"as": ["lines", "heat map"], "unit": list(UNITS)}
    menus["statistic"] = ["median", "max", "min"]
    for number, names in values.items():
        menus |= {f"value{number}": names, f"x{number}": loads if number == "3" else [*axes]}
        menus |= {f"series{number}": ["", *axes]}
    return menus | {"colour": ["", *axes], "bars": ["", *axes]}


def first_choices(
    rows: Sequence[Row], menus: dict[str, list[str]], picks: dict[str, str]
) -> dict[str, str]:
    """Return the first choice of each menu: settings in which the runs that are shown first
    differ.
    """
    shown = [row for row in rows if all(_matches(row, key, value) for key, value in picks.items())]
    differ = [key for key in menus["x1"] if len({row.get(key) for row in shown}) > 1]
    numbers = [key for key in differ if all(is_number(row.get(key)) for row in shown)]

    def among(*names: str, but: str = "") -> str:
        return next((key for key in (*names, *differ) if key in differ and key != but), "")

    x1 = among("batch.size", "draft.gamma", "cache.budget", *numbers)
    x2 = among("cache.budget", "draft.gamma", *numbers)
    first = {key: names[0] if names else "" for key, names in menus.items()} | {
        "where": "",
        "sort": "-speedup",
    }
    first |= {
        "x1": x1,
        "series1": among("batch.context_len", "cache.policy", "cache.budget", but=x1),
        "bars": x1,
    }
    first |= {"x2": x2, "series2": among("draft.name", "cache.policy", "draft.gamma", but=x2)}
    first |= {"colour": among("cache.policy", "draft.name")}
    return first | {f"pick:{key}": value for key, value in picks.items()}
