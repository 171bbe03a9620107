"""Publish the points of benchmarks/gpu.py: CSV files, the page, and a calibration of the card by
its steps.

Comments in the page's template are on the card that it shows: read them again before you publish
another.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import median
from typing import Any

from gpu_store import Record
from page import RESULTS
from render import write, write_csv

from magicdec.calibrate.steps import timed_row
from magicdec.config.registry import DRAFTS, POLICIES
from magicdec.costmodel.calibration import Prior, calibrate, errors_of, to_yaml, uncalibrated
from magicdec.costmodel.hardware import CALIBRATED, Hardware, device_in
from magicdec.costmodel.kernel_costs import CODES, SCORES, SELECTING, WEIGHTS, KernelCosts
from magicdec.costmodel.round import Setup, round_times, scores_time
from magicdec.costmodel.stacks import OWN_STACK
from magicdec.costmodel.tables import Row
from magicdec.costmodel.targets import architecture
from magicdec.errors import UserError

# On the page.
SHOWN = ("ceilings", "profile", "prefill", "steps", "rounds", "policies", "attention", "pair")
# On the page, with any points.
SHOWN_WHERE_MEASURED = ("kernels", "variants", "authors", "sampling")
TARGET = "llama-3.1-8b"
STEPS = {"target": "T_T", "draft": "T_D", "verify": "T_V", "round": "round"}
HELD_BACK = 3  # every so many points
ROUND_SPREAD_US = 100.0  # of what rounds add, which differs with the heat of the card


def publish(points: Callable[[str], dict[str, Record]]) -> None:
    """Write docs/results/gpu-*.csv and gpu.md, about this card alone. Raise UserError if a part has
    no points.
    """
    facts = points("machine")
    device = facts["device"]
    measured_by = f"commit {facts['commit']}, {facts['device']}, PyTorch {facts['torch']}"
    found = {
        part: [
            record for record in points(part).values() if not {"failed", "skipped"} & record.keys()
        ]
        for part in (*SHOWN, *SHOWN_WHERE_MEASURED)
    }
    if missing := [part for part in SHOWN if not found[part]]:
        raise UserError(f"the page needs these parts, too: --parts {','.join(missing)}")
    if device_in(device) is None:
        raise UserError(
            f"{device}: its datasheet is not known (magicdec/costmodel/hardware.py), so nothing was"
            " predicted"
        )
    for part, records in found.items():
        rows = [{"device": device, **record, "measured_by": measured_by} for record in records]
        for row in rows:
            row.pop("text", None)  # the profile's longest kernels, which the points keep
            del row["commit"]
        if not rows:
            (RESULTS / f"gpu-{part}.csv").unlink(missing_ok=True)
            continue
        write_csv(RESULTS / f"gpu-{part}.csv", rows)
    parts = (found["steps"], found["pair"], found["policies"])
    write_csv(RESULTS / "gpu-fit.csv", _calibrated(device, facts["commit"], *parts))
    write("gpu")


def _calibrated(
    device: str, commit: str, steps: list[Record], pairs: list[Record], policies: list[Record]
) -> list[dict[str, Any]]:
    """Write the card's calibration. Return the errors of all steps, and of every third one where
    the others are fitted.

    Steps of the bundled target tell what launches cost from what the weights of a large model do.
    What a round adds to its steps was measured next to them.
    """
    known = device_in(device)
    assert known is not None
    name = known.name.lower().replace(" ", "_")
    start = uncalibrated(name, OWN_STACK)
    rows = [_row(point, name) for point in steps]
    small = [_small_row(point, name) for point in pairs]
    adds_us = 1e3 * median(point["overhead_ms"] for point in steps)
    priors = {"round_overhead_us": Prior(0.0, 1e6, adds_us, ROUND_SPREAD_US)}

    def fitted(some: list[Row]) -> Hardware:
        return calibrate(some + small, architecture, {name: start}, priors).machines[name]

    def errors(machine: Hardware, some: list[Row], case: str) -> list[dict[str, Any]]:
        found = [errors_of(machine, row, architecture) for row in some]
        return [
            {"device": device, "case": case} | {STEPS[step]: error for step, error in one.items()}
            for one in found
        ]

    machine = fitted(rows)
    machine = replace(machine, kernels=kernel_costs(machine, policies, f"{device}, {commit}"))
    source = [
        f"{known.name}, by {len(rows)} points of Llama-3.1-8B and {len(small)} of the bundled"
        " target."
    ]
    source += ["docs/results/gpu.md shows them. Written by `python benchmarks/gpu.py`."]
    (CALIBRATED / f"{name}.yaml").write_text(to_yaml(machine, source))
    unseen = rows[1::HELD_BACK]
    seen = fitted([row for row in rows if row not in unseen])
    return errors(machine, rows, "fitted") + errors(seen, unseen, "held back")


def kernel_costs(machine: Hardware, policies: Iterable[Record], measured_by: str) -> KernelCosts:
    """Return how many times as long as by bytes each policy's own work took: what its steps take
    beyond those of a policy that has none, or beyond what is predicted of the rest of the step.
    """
    points = {point["policy"]: point for point in policies}
    plain = points["streaming"]
    times: dict[str, dict[str, float]] = {}
    for point in points.values():
        setup = _policy_setup(replace(machine, kernels=KernelCosts()), point)
        predicted = round_times(setup, point["gamma"])
        scored, scoring = setup.target_pass._replace(query_tokens=point["gamma"] + 1), "verify_ms"
        if setup.cache.scores == "step":
            scored = setup.target_pass._replace(cached_tokens=setup.tokens_read)
            scoring = "draft_ms"
        by_bytes = {
            SELECTING: predicted.select.total,
            CODES: predicted.draft.kv,
            SCORES: scores_time(setup, scored).total,
            WEIGHTS: predicted.draft.weights,
        }
        more_ms = {
            SELECTING: point["draft_ms"] - plain["draft_ms"],
            SCORES: point[scoring] - plain[scoring],
        }
        if setup.cache.selects == "round":
            more_ms[SELECTING] = point["select_ms"] / point["gamma"]
        for kind, name in setup.work.items():
            bytes_ms = 1e3 * by_bytes[kind]
            rest_ms = 1e3 * predicted.draft.total - bytes_ms
            took_ms = more_ms.get(kind, point["draft_ms"] - rest_ms)
            times.setdefault(kind, {})[name] = float(f"{took_ms / bytes_ms:.3g}")
    cell = f"{plain['batch']} x {plain['context']:,}, budget {plain['budget']}"
    return KernelCosts(times, f"{measured_by}, {cell}, gamma {plain['gamma']}")


def _policy_setup(machine: Hardware, point: Record) -> Setup:
    """Return the setup of a point of gpu_drafts.DRAFTS, whose name says what it reads."""
    policy, _, more = point["policy"].partition(", ")
    keys = {"bits": int(more.split()[0])} if more.endswith(" bits") else {}
    weights = more.removesuffix(" weights") if more.endswith(" weights") else "none"
    cache = POLICIES[policy].facts(budget=point["budget"], **keys)
    draft = DRAFTS["self"].facts(quantization=weights)
    sizes = (point["batch"], point["context"])
    return Setup(architecture(TARGET), machine, *sizes, draft, cache, TARGET)


def _small_row(point: Record, hardware: str) -> Row:
    where = {"context_len": point["context"], "batch_size": point["batch"], "gamma": 1}
    decoded_ms = point["autoregressive/time_per_output_token_ms"]
    return Row(
        "tiny", "self", "full", hardware, **where, autoregressive_ms=decoded_ms, element_bytes=2.0
    )


def _row(point: Record, hardware: str) -> Row:
    values = {
        "context_len": point["context"],
        "batch_size": point["batch"],
        "gamma": point["gamma"],
    }
    values |= {f"time/{name}": value for name, value in point.items()}
    known = {
        "target": TARGET,
        "draft": "self",
        "policy": "streaming",
        "hardware": hardware,
        "element_bytes": 2.0,
    }
    return timed_row(values, **known, kv_budget=point["budget"])
