"""The table that a run ends with: what ran, both ways side by side, the verdict, and where the
results are.

Its values are the flat metrics, under their names in result.json. Missing ones are not shown.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from magicdec.measure.trust import gpu_trouble, is_impossible, noise, remedy
from magicdec.tracking.cells import new_table, three_digits
from magicdec.tracking.console import Console
from magicdec.tracking.descriptions import (
    described_context,
    described_data,
    described_models,
    described_place,
)
from magicdec.tracking.store import counted, shown
from magicdec.tracking.trackers import Logged
from magicdec.units import WAYS, both_speedups, is_number

SPEEDS = {
    "tokens_per_second": "tokens/s",
    "time_per_output_token_ms": "time per output token (TPOT), ms",
    "time_to_first_token_ms": "time to first token (TTFT), ms",
    "decode_s": "decoding the batch, s",
    "wall_s": "the same with its prefill, s",
    "accuracy": "accuracy, answers in the output",
}
STEPS = {"target_decode": "T_T", "draft": "T_D", "verify": "T_V", "round": "round"}
BY_CATEGORY = {
    "rows": "rows",
    "tokens": "tokens",
    "acceptance_rate": "acceptance rate",
    "acceptance_length": "length",
    "speculative/time_to_first_token_ms_p50": "TTFT, ms",
    "autoregressive/time_per_output_token_ms_p50": "AR TPOT, ms",
    "speculative/time_per_output_token_ms_p50": "TPOT, ms",
}
LABEL_WIDTH = 18
# Of a speedup: both colours are given, because a notebook has its own for text.
FASTER, SLOWER = "bold bright_white on dark_green", "bold bright_white on dark_red"

Metrics = Mapping[str, Any]


def show(
    console: Console,
    config: Mapping[str, Any],
    metrics: Metrics,
    folder: Path,
    logged: Sequence[Logged] = (),
    history: Sequence[Mapping[str, Any]] = (),
    view: RenderableType | None = None,
) -> None:
    """Print the end of a run. `history` holds the points of scenario=profile. A scenario's own
    `view` replaces the tables.
    """
    parts = [view, Text()] if view is not None else list(_results(config, metrics, history))
    # Crop would cut long commands.
    console.print(Group(Text(), *parts, *_whereabouts(folder, logged)), crop=False)


def _results(
    config: Mapping[str, Any], metrics: Metrics, history: Sequence[Mapping[str, Any]]
) -> Iterator[RenderableType]:
    """Describe what ran, then show both ways side by side, then what the figures mean."""
    yield from _header(config, metrics)
    yield Text()
    if config["scenario"]["name"] == "profile":
        yield Group(_grid(history), Text())
    elif (speeds := _speeds(metrics)).row_count:
        yield Group(speeds, Text())
    if by_category := categories(metrics):
        yield Group(by_category, Text())
    meaning = [*_verdict(config, metrics), *_steps(metrics), *_memory(metrics)]
    if "diagnosis/sentence" in metrics:
        meaning.append(("diagnosis", Text(metrics["diagnosis/sentence"])))
    if meaning:
        table = Table.grid(padding=(0, 1, 0, 0))
        table.add_column(width=LABEL_WIDTH - 1, style="dim")
        table.add_column(overflow="fold")
        for label, text in meaning:
            table.add_row(label, text)
        yield Group(table, Text())


def _header(config: Mapping[str, Any], metrics: Metrics) -> Iterator[Text]:
    """Describe what ran."""
    batch, scenario = config["batch"], config["scenario"]
    hardware = config["hardware"]
    yield Text(f"{scenario['name']}: {described_models(config)}", style="bold")
    where = described_place(
        config, metrics.get("device") or hardware["device"], metrics.get("engine/version")
    )
    if scenario["name"] == "profile":
        yield Text(f"times over caches filled with noise, {where}")
    else:
        temperature = config["sampling"]["temperature"]
        how = f"sampled at temperature {temperature:g}" if temperature else "greedy"
        batches = f"{batch['num_batches']} batches of " if batch["num_batches"] > 1 else ""
        size = (
            f"{batches}{counted(int(batch['size']), 'row')} x {described_context(config, metrics)}"
        )
        yield Text(f"{size}, {batch['generate_len']:,} new tokens each, {how}")
        yield Text(f"{described_data(config)}; {where}")
    if metrics.get("weights/source") == "random":
        yield Text(" RANDOM weights: only the times are real ", style="bold black on yellow")
    if metrics.get("acceptance/source") == "synthetic":
        rate = config["draft"].get("synthetic_acceptance")
        warning = f" SYNTHETIC acceptance ({rate}): drawn, not measured; only the times are real "
        yield Text(warning, style="bold black on yellow")


def _speeds(metrics: Metrics) -> Table:
    """Return a table of the two ways side by side."""
    speeds = {way: [metrics.get(f"{way}/{key}") for key in SPEEDS] for way in WAYS}
    ways = [way for way in WAYS if any(map(three_digits, speeds[way]))]
    table = new_table("", *ways)
    for key, label in SPEEDS.items():
        figures = [three_digits(metrics.get(f"{way}/{key}")) for way in ways]
        if any(figures):
            table.add_row(label, *figures)
    return table


def categories(metrics: Metrics) -> Table | None:
    """Return a table with a line per category of prompts; None if they have none."""
    names = [key[:-5] for key in metrics if key.startswith("category/") and key.endswith("/rows")]
    present = [
        key
        for key in BY_CATEGORY
        if any(metrics.get(f"{name}/{key}") is not None for name in names)
    ]
    table = new_table("category", *(BY_CATEGORY[key] for key in present))
    for name in names:
        values = [metrics.get(f"{name}/{key}") for key in present]
        figures = (
            f"{value:,}" if isinstance(value, int) else three_digits(value) for value in values
        )
        table.add_row(name.removeprefix("category/"), *figures)
    return table if names else None


def _verdict(config: Mapping[str, Any], metrics: Metrics) -> Iterator[tuple[str, Text]]:
    """Describe speedup, acceptance and losslessness."""
    mark = ["synthetic"] if metrics.get("acceptance/source") == "synthetic" else []
    if speedup := _number(metrics.get("speedup")):
        wall = _number(metrics.get("speedup_wall"))
        spread = _number(metrics.get("speedup_spread"))
        both = (_interval(metrics, key, "{:.2f}") for key in ("speedup", "speedup_wall"))
        text = Text(both_speedups(speedup, wall, *both))
        for ratio in filter(None, (speedup, wall)):
            text.highlight_regex(f"{ratio:.2f}x", FASTER if ratio > 1 else SLOWER)
        details = [*mark, *([] if speedup > 1 else ["slower than autoregressive"])]
        details += [f"spread {spread:.0%} over repeats"] if spread is not None else []
        details += ["NOISY"] if noise(metrics) else []
        details += _uncounted(metrics)
        yield "speedup", text.append("".join(f", {detail}" for detail in details))
    places = [key for key in metrics if key.startswith("acceptance_rate/position_")]
    if (rate := _number(metrics.get("acceptance_rate"))) is not None:
        positions = [f"{metrics[key]:.0%}" for key in places]
        by_position = [f"by position {' '.join(positions)}"] if len(positions) > 1 else []
        share = f"{rate:.1%}{_interval(metrics, 'acceptance_rate', '{:.1%}')} of proposals"
        yield "acceptance rate", Text(", ".join([share, *mark, *by_position]))
    if length := three_digits(metrics.get("acceptance_length")):
        # An engine may not say at which positions it accepts.
        most = max(len(places), int(metrics.get("gamma", 0))) + 1
        ends = _interval(metrics, "acceptance_length", "{:.2f}")
        yield "acceptance length", Text(f"{length}{ends} tokens per round, of at most {most}")
    if any(key.endswith("_ci95") for key in metrics):
        yield (
            "in brackets",
            Text("95% intervals over rows and repeats, of the speedup per batch over repeats"),
        )
    if "lossless/identical" in metrics:
        yield "lossless", losslessness(config, metrics)


def _interval(metrics: Metrics, key: str, form: str) -> str:
    """Return the interval of a figure as it is printed, after a blank; "" if there is none."""
    ends = metrics.get(f"{key}_ci95")
    return f" [{', '.join(map(form.format, ends))}]" if ends else ""


def losslessness(config: Mapping[str, Any], metrics: Metrics) -> Text:
    """Return the verdict of the audit with its evidence, next to that of the autoregressive
    output.
    """
    passed = metrics.get("lossless/passed")
    dtype = config["hardware"]["dtype"]
    is_sampled = bool(config["sampling"]["temperature"])
    verdict = ("undecided", "bold yellow")
    if passed is not None:
        verdict = ("yes", "bold green") if passed else ("NO", "bold red")
    reason = f"; {metrics['lossless/reason']}" if "lossless/reason" in metrics else ""
    if is_sampled and _number(metrics.get("lossless/z_score")) is not None:
        z, control = metrics["lossless/z_score"], metrics["lossless/baseline_z_score"]
        outside = metrics["lossless/outside_tokens"]
        of = (
            f"{outside} tokens that the target would not draw"
            if outside
            else "all tokens within the target's choice"
        )
        scores = f", sampled from the target: z {z:+.1f} (autoregressive {control:+.1f}), {of}"
        return Text.assemble(verdict, scores, reason)
    if metrics["lossless/identical"] is None:
        return Text("n/a (sampling)" if is_sampled else "n/a (synthetic)")
    gap = three_digits(metrics.get("lossless/max_logit_gap"))
    control = three_digits(metrics.get("lossless/baseline_max_logit_gap"))
    if metrics["lossless/identical"]:
        return Text.assemble(
            verdict,
            ", identical to autoregressive",
            f"; max logit gap {gap}" if gap else "",
            reason,
        )
    gaps = f"; max logit gap {gap} (autoregressive {control})" if gap else ""
    if passed:
        return Text.assemble(
            verdict, f", identical but for {metrics['lossless/excused_rows']} rows in a tie{gaps}"
        )
    return Text.assemble(verdict, f", not identical to autoregressive in {dtype}{gaps}", reason)


def _uncounted(metrics: Metrics) -> list[str]:
    """Return how many repeats do not count, and why."""
    lines = []
    for key, why in (
        ("repeats_disturbed", "disturbed by other programs"),
        ("repeats_left_out", "with other tokens"),
    ):
        if number := _number(metrics.get(key)):
            lines.append(f"{number:.0f} more {why} not counted")
    return lines


def _steps(metrics: Metrics) -> Iterator[tuple[str, Text]]:
    """Describe the times of the parts, and the speedups that follow from them."""
    names = {
        "target_decode": "target T_T",
        "draft": "draft T_D",
        "verify": "verify T_V",
        "round": "round",
    }
    times = {sign: three_digits(metrics.get(f"time/{name}_ms")) for name, sign in names.items()}
    parts = [f"{sign} {ms}" for sign, ms in times.items() if ms]
    if parts:
        yield "step times, ms", Text(", ".join(parts))
    if is_impossible(metrics):
        why = "impossible, the parts of the round took longer than the whole: measure it again"
        yield (
            "overhead, ms",
            Text(f"{three_digits(metrics.get('time/overhead_ms'))}: {why}", style="yellow"),
        )
    for name, source in (
        ("formula", "from step times and acceptance"),
        ("predicted", "by the cost model"),
    ):
        if speedup := _number(metrics.get(f"{name}/speedup")):
            error = _number(metrics.get(f"{name}/speedup_error"))
            off = f", {error:+.0%} off" if error is not None else ""
            wall = _number(metrics.get(f"{name}/speedup_wall"))
            errors = {
                sign: _number(metrics.get(f"{name}/{step}_error")) for step, sign in STEPS.items()
            }
            steps = ", ".join(
                f"{sign} {error:+.0%}" for sign, error in errors.items() if error is not None
            )
            both = both_speedups(speedup, wall)
            yield (
                f"{name} speedup",
                Text(f"{both}, {source}{off}{steps and f'; steps off: {steps}'}"),
            )


def _memory(metrics: Metrics) -> Iterator[tuple[str, Text]]:
    names = {"peak": "peak", "target_kv": "target's KV cache", "draft_kv": "draft's"}
    sizes = {label: metrics.get(f"memory/{name}_gib") for name, label in names.items()}
    parts = [f"{label} {three_digits(size)}" for label, size in sizes.items() if size]
    if parts:
        yield "memory, GiB", Text(", ".join(parts))
    signs = {"NOISY": (noise(metrics), remedy(metrics))}
    signs["GPU"] = (gpu_trouble(metrics), "measure it again")
    for label, (reasons, what_to_do) in signs.items():
        if reasons:
            yield label, Text(f"{', '.join(reasons)}: {what_to_do}", style="yellow")


def _grid(history: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with a line per point of a profile."""
    columns = {"batch_size": "batch", "context_len": "context", "gamma": "gamma"}
    columns |= {f"time/{name}_ms": f"{sign}, ms" for name, sign in STEPS.items()}
    present = [key for key in columns if any(key in point for point in history)]
    table = new_table(*(columns[key] for key in present), num_words=0)
    for point in history:
        values = [point.get(key) for key in present]
        table.add_row(
            *(f"{value:,}" if isinstance(value, int) else three_digits(value) for value in values)
        )
    return table


def _whereabouts(folder: Path, logged: Sequence[Logged]) -> Iterator[Text]:
    """Say where the results are: the run's folder, and what each tracker has of it."""
    lines: list[tuple[str, str | None, str]] = [("results", shown(folder), "")]
    for place in logged:
        lines += [(place.tracker, place.warning, "yellow"), (place.tracker, place.url, "")]
        lines += [(place.command_label or f"send to {place.tracker}", place.command, "")]
    for label, value, style in lines:
        if value:
            text = Text(f"{label:{LABEL_WIDTH}}", style="dim", no_wrap=True, overflow="ignore")
            yield text.append(value, style=style or "not dim")


def _number(value: Any) -> float | None:
    """Return the value as a float, or None if it is missing or not a number."""
    return float(value) if is_number(value) else None
