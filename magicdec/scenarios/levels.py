"""Levels of load, for every engine: what is sent, the metrics of each level, and how they are
shown.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from statistics import median
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from magicdec.config.load import to_dict
from magicdec.config.registry import CORPORA
from magicdec.config.scenario_settings import Serve
from magicdec.data import Prompts
from magicdec.measure.metrics import Metrics, by_category
from magicdec.planning import build
from magicdec.planning.resolved import Plan
from magicdec.scenarios.level_units import LevelUnit, answered_pairs
from magicdec.serving.load_generator import Load, RequestSpec, latency_metrics, load_metrics
from magicdec.serving.request import Params
from magicdec.tracking.cells import new_table, three_digits
from magicdec.tracking.descriptions import (
    described_context,
    described_data,
    described_models,
    described_place,
)
from magicdec.tracking.run_table import categories, losslessness
from magicdec.units import WAYS
from magicdec.verification.sampling import Sampling

WARMUP_TOKENS = 8  # of a request before each measurement, which is not counted
# On the terminal; a latency is shown as its median and its 99th percentile.
LATENCIES = {
    "time_to_first_token_ms": ("TTFT, ms", 1.0),
    "time_per_output_token_ms": ("TPOT, ms", 1.0),
    "request_latency_ms": ("request, s", 1e-3),
    "goodput_rps": ("good/s", 1.0),
}


def levels_of(scenario: Serve) -> list[Load]:
    """Return the levels of load in their order."""
    users = [Load("concurrency", users) for users in scenario.concurrencies]
    rates = [Load("rate", rate) for rate in scenario.rates]
    return users + rates + [Load("replay", speed) for speed in scenario.replays]


def prompts_of(plan: Plan, tokenizer: object | None) -> Prompts:
    """Return a prompt per request: those of a trace in its order, otherwise all lengths in turn,
    shuffled.
    """
    config = plan.config
    scenario = plan.config.settings(Serve)
    count = scenario.num_requests
    if CORPORA[config.data.name].facts.own_lengths:
        prompts = build.prompts(plan, tokenizer, count)
    else:
        lengths = [
            max(1, round(share * config.batch.context_len)) for share in scenario.length_shares
        ][:count]
        numbers = [len(range(index, count, len(lengths))) for index in range(len(lengths))]
        parts = [
            build.prompts(plan, tokenizer, *part) for part in zip(numbers, lengths, strict=True)
        ]
        prompts = Prompts(
            list(chain(*(part.tokens for part in parts))),
            list(chain(*(part.sources for part in parts))),
        )
    if prompts.arrivals_s:
        return prompts
    order = list(range(count))
    random.Random(config.data.seed).shuffle(order)
    return prompts.take(order)


def jobs_of(plan: Plan, prompts: Prompts) -> list[RequestSpec]:
    """Return a request for each prompt, with random numbers of its own."""
    config = plan.config
    rows = range(len(prompts))
    lengths = prompts.output_lens or [config.batch.generate_len for _ in rows]
    arrivals = prompts.arrivals_s or [0.0 for _ in rows]
    return [
        RequestSpec(
            prompts.tokens[row],
            Params(lengths[row], Sampling.of(config.sampling, row)),
            arrivals[row],
        )
        for row in rows
    ]


def warm_up_of(jobs: Sequence[RequestSpec]) -> RequestSpec:
    """Return the short request before a measurement."""
    params = jobs[0].params
    return RequestSpec(
        jobs[0].prompt, replace(params, max_tokens=min(WARMUP_TOKENS, params.max_tokens))
    )


def level_metrics(
    units: Mapping[str, LevelUnit], scenario: Serve, categories: Sequence[str] = ()
) -> Metrics:
    """Return the speed of each way, named as in scenario=compare, and its latencies by category, of
    the requests that it has answered; and the speedups.

    `speedup` is over the requests that both ways have answered. Where a request has failed, there
    is no speedup_duration: the two ways have not done the same work.
    """
    result: Metrics = {}
    for way, unit in units.items():
        bounds = (scenario.latency_ms, scenario.first_token_ms)
        stats = [request.stats for request in unit.answered]
        figures = load_metrics(stats, unit.seconds, *bounds)
        result |= {f"{way}/{name}": value for name, value in figures.items()}
    result |= by_category(categories, partial(_of_category, units))
    if len(units) < len(WAYS):
        return result
    pairs = answered_pairs(units)
    times = [
        plain.stats.time_per_output_token_s / fast.stats.time_per_output_token_s
        for plain, fast in pairs
        if plain.stats.time_per_output_token_s and fast.stats.time_per_output_token_s
    ]
    if times:
        result["speedup"] = median(times)
    plain_unit, fast_unit = [units[way] for way in WAYS]
    if len(pairs) == len(plain_unit.requests):
        result["speedup_duration"] = plain_unit.seconds / fast_unit.seconds
    return result


def _of_category(units: Mapping[str, LevelUnit], rows: Sequence[int]) -> Metrics:
    """Return how many requests of a category the last way has answered, their new tokens, and the
    latencies in each way.
    """
    result: Metrics = {}
    for way, unit in units.items():
        requests = [unit.requests[row] for row in rows]
        stats = [request.stats for request in requests if request.error is None]
        result |= {"rows": len(stats), "tokens": sum(request.tokens for request in stats)}
        if stats:
            latencies = latency_metrics(stats)
            result |= {f"{way}/{name}": value for name, value in latencies.items()}
    return result


def view(
    plan: Plan, results: Metrics, history: Sequence[Mapping[str, Any]], server: str = ""
) -> RenderableType:
    """Return what the terminal shows: both ways at each level of load. `server` describes one that
    is not ours.
    """
    config = plan.config
    scenario = plan.config.settings(Serve)
    described = to_dict(config)
    most = "up to " if described["data"].get("output_len") else ""
    lengths = (
        f"{described_context(described, results)}, {most}{config.batch.generate_len} new tokens"
        " each"
    )
    place = [] if server else [described_place(described, plan.device_name)]
    lines = [
        Text(f"serve: {server or described_models(described)}", style="bold"),
        Text(f"{scenario.num_requests} requests a level, {lengths}"),
        Text("; ".join([described_data(described), *place])),
    ]
    if config.draft.synthetic_acceptance is not None:
        lines.append(
            Text(
                "SYNTHETIC acceptance: drawn, not measured; only the times are real",
                style="bold yellow",
            )
        )
    ways = [way for way in WAYS if any(f"{way}/tokens_per_second" in row for row in history)]
    parts: list[RenderableType] = [
        *lines,
        Text(),
        speeds(history, ways),
        Text(),
        latencies(history, ways),
    ]
    if by_category := categories(results):
        parts += [Text(), by_category]
    if line := accepted(history):
        parts.append(Text(f"\n{line}"))
    if contexts := by_context(results):
        parts += [Text(), contexts]
    if compared := [row for row in history if "lossless/identical" in row]:
        worst = min(compared, key=lambda row: row["lossless/identical"] is not False)
        parts.append(Text.assemble("\nlossless          ", losslessness(described, worst)))
    highest = {way: results.get(f"{way}/slo_{scenario.slo}") for way in WAYS}
    limits = [f"{way} {load:g}" for way, load in highest.items() if load is not None]
    if limits:
        parts.append(Text(f"\nhighest {scenario.slo} within the bounds: {', '.join(limits)}"))
    return Group(*parts)


def speeds(history: Sequence[Mapping[str, Any]], ways: Sequence[str]) -> Table:
    """Return a table with a line per level: the throughput of each way, and both speedups."""
    speedups = (
        {"speedup": "speedup per request", "speedup_duration": "per level"} if len(ways) > 1 else {}
    )
    table = new_table("tokens/s", *ways, *speedups.values())
    for row in history:
        rates = (three_digits(row.get(f"{way}/tokens_per_second")) for way in ways)
        table.add_row(
            _load(row), *rates, *(f"{row[key]:.2f}x" if key in row else "" for key in speedups)
        )
    return table


def accepted(history: Sequence[Mapping[str, Any]]) -> str:
    """Return a line with the acceptance, from the level with the least to that with the most; "" if
    it is unknown.
    """

    def span(key: str, form: str) -> str:
        values = sorted(row[key] for row in history if row.get(key) is not None)
        ends = dict.fromkeys(format(value, form) for value in values[:1] + values[-1:])
        return " to ".join(ends)

    parts = {
        "of proposals": span("acceptance_rate", ".1%"),
        "tokens per round": span("acceptance_length", ".2f"),
    }
    phrases = [f"{figures} {what}" for what, figures in parts.items() if figures]
    return f"acceptance        {', '.join(phrases)}" if phrases else ""


def by_context(results: Mapping[str, Any]) -> RenderableType | None:
    """Return the acceptance length of each bucket of contexts; None where all are alike."""
    names = [key.split("/")[1] for key in results if re.fullmatch(r"context/\d+/requests", key)]
    if len(names) < 2:
        return None
    table = new_table("context from", "requests", "tokens per round", "95% interval")
    for name in names:
        ends = results.get(f"context/{name}/acceptance_length_ci95")
        table.add_row(
            f"{int(name):,}",
            f"{results[f'context/{name}/requests']:,}",
            f"{results[f'context/{name}/acceptance_length']:.2f}",
            "{:.2f} to {:.2f}".format(*ends) if ends else "",
        )
    return Group(table, Text(_shortest_for_longest(results, names[0], names[-1])))


def _shortest_for_longest(results: Mapping[str, Any], shortest: str, longest: str) -> str:
    """Return by how much the acceptance length of the shortest contexts is wrong for the longest
    ones, where both have an interval.
    """
    ends = (shortest, longest)
    if any(f"context/{name}/acceptance_length_ci95" not in results for name in ends):
        few = results[f"context/{shortest}/requests"]
        many = results[f"context/{longest}/requests"]
        counted = f"{few} requests each" if few == many else f"{few} and {many} requests"
        return f"({counted}: too few to compare)"
    error = results["context/error_of_shortest"]
    high = "high" if error >= 0 else "low"
    return (
        f"a length measured on the shortest contexts is {abs(error):.0%} too {high} for the longest"
    )


def latencies(history: Sequence[Mapping[str, Any]], ways: Sequence[str]) -> Table:
    """Return a table with a line per level and way. A latency is its median and its 99th
    percentile.
    """
    present = {
        key: column
        for key, column in LATENCIES.items()
        if any(f"{way}/{key}" in history[0] for way in ways)
    }
    table = new_table("median | 99%", *(label for label, _ in present.values()))
    table.padding = (0, 1, 0, 0)
    for row in history:
        table.add_row(Text(_load(row), style="bold"))
        for way in ways:
            figures = (
                _percentiles(row, f"{way}/{key}", scale) for key, (_, scale) in present.items()
            )
            if f"{way}/tokens_per_second" in row:
                table.add_row(f"  {way}", *figures)
    return table


def _load(row: Mapping[str, Any]) -> str:
    words = {"concurrency": "{:g} at once", "rate": "{:g} a second", "replay": "trace at {:g}x"}
    return next(form.format(row[kind]) for kind, form in words.items() if kind in row)


def _percentiles(row: Mapping[str, Any], name: str, scale: float) -> str:
    has_percentiles = f"{name}_p50" in row
    values = [row[f"{name}_p50"], row[f"{name}_p99"]] if has_percentiles else [row.get(name)]
    return " | ".join(three_digits(value if value is None else scale * value) for value in values)
