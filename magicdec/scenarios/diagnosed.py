"""The diagnosis of a profile: its lines next to the limits of the model on the machine."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from magicdec.config.omega import omega
from magicdec.config.registry import DRAFTS
from magicdec.config.scenario_settings import Profile
from magicdec.costmodel.diagnosis import Diagnosis, diagnose
from magicdec.costmodel.hardware import CPU, configured
from magicdec.costmodel.limits import draft_depth, limits
from magicdec.costmodel.roofline import BF16
from magicdec.costmodel.round import Setup
from magicdec.costmodel.step_fit import CellSteps
from magicdec.measure.metrics import Metrics
from magicdec.planning.resolved import Plan
from magicdec.planning.setup import measured_rates, setup_of
from magicdec.tracking.cells import new_table, three_digits

Length = Callable[[int, int], float | None]  # tokens of a round, by context and gamma
Line = Mapping[str, Any]  # of a profile's history
# Of its limit: a step that takes less was not timed rightly. Small models may be read from a cache
# that is several times as fast as the memory.
IMPOSSIBLE = 0.1
WIDEST = 4.0  # bytes of an element of a model that is served on a CPU


def nothing_known(context: int, gamma: int) -> float | None:
    """Return no acceptance."""
    return None


def length_at(alpha: float | None) -> Length:
    """Return the tokens of a round at an alpha that is the same everywhere; None: it is unknown."""
    return nothing_known if alpha is None else lambda context, gamma: omega(gamma, alpha)


def setup_of_profile(plan: Plan, is_here: bool = True) -> Setup | None:
    """Return the models on the machine that was profiled; None for a machine that is not known.

    A machine without a datasheet is measured, if it is this one.
    """
    config, h = plan.config, plan.config.hardware
    draft = config.draft if config.speculates else DRAFTS["ngram"].facts(gamma=1)
    plan = replace(plan, config=replace(config, draft=draft))
    if config.engine.is_remote and h.name not in ("auto", CPU):
        figures = (h.bandwidth_gbs, h.tflops, h.memory_gib)
        return Setup(
            plan.target.config,
            configured(h.name, h.tensor_parallel, *figures),
            1,
            config.batch.context_len,
            draft,
            element_bytes=WIDEST if h.dtype == "float32" else BF16,
        )
    if not is_here:
        return None
    if config.engine.is_remote:
        plan = replace(plan, config=replace(plan.config, hardware=replace(h, device="cpu")))
    return setup_of(plan, *measured_rates(plan))


def cells_of(
    lines: Iterable[Line],
    setup: Setup,
    length_of: Length = nothing_known,
    expected_of: Length = nothing_known,
    knows_draft: bool = True,
) -> list[CellSteps]:
    """Return the cells of a profile, from outside or of our own engine, that have a round with a
    draft.

    `length_of` gives the acceptance of a profile that accepts nothing, `expected_of` what is known
    from elsewhere. `knows_draft`: the setup's draft is the one that was timed.
    """
    cells = []
    for line in lines:
        gamma = line.get("gamma")
        context = line["context_len"]
        if not gamma or not {"time/target_decode_ms", "time/round_ms"} <= line.keys():
            continue
        length = line.get("acceptance_length") or length_of(context, gamma)
        if length is None:
            continue
        at = setup.at(batch=line["batch_size"], context=_middle(line))
        limit = limits(at, gamma)
        verify_ms = line.get("time/verify_ms")
        cells.append(
            CellSteps(
                batch=line["batch_size"],
                context=context,
                gamma=gamma,
                target_s=line["time/target_decode_ms"] / 1e3,
                round_s=line["time/round_ms"] / 1e3,
                length=length,
                target_limit=limit.target,
                verify_limit=limit.verify,
                entries=limit.entries,
                verify_s=None if verify_ms is None else verify_ms / 1e3,
                draft_limit=limit.draft if knows_draft else None,
                draft_depth=draft_depth(at, gamma),
                expected_length=expected_of(context, gamma),
                overhead_s=line.get("time/overhead_ms", 0.0) / 1e3,
            )
        )
    return cells


def _middle(line: Line) -> int:
    """Return the tokens of a row in the middle of what was timed."""
    return round(line["context_len"] + line.get("decoded", 0.0))


def with_limits(lines: Iterable[Line], setup: Setup, knows_draft: bool) -> list[dict[str, Any]]:
    """Return the lines of a profile with the limit of each step, in milliseconds."""
    limited = []
    for line in lines:
        at = setup.at(batch=line["batch_size"], context=_middle(line))
        limit = limits(at, line.get("gamma") or 1)
        steps = {"target_decode": limit.target, "verify": limit.verify}
        steps |= {"draft": limit.draft} if knows_draft else {}
        of_timed = {
            f"limit/{name}_ms": 1e3 * step.seconds
            for name, step in steps.items()
            if f"time/{name}_ms" in line
        }
        limited.append({**line, **of_timed})
    return limited


def possible(history: Iterable[Line]) -> list[dict[str, Any]]:
    """Return the lines of a profile without times that no step can take: below 0, or far below the
    limit. A round takes no less than its verification. Without either, the draft's time, which is
    their difference, says nothing.
    """
    kept = []
    for line in history:
        limits_ms = {
            key: line.get(f"limit/{key}_ms", 0.0) for key in ("target_decode", "verify", "draft")
        }
        limits_ms["round"] = limits_ms["verify"]
        wrong = {
            key
            for key, limit_ms in limits_ms.items()
            if line.get(f"time/{key}_ms", inf) < max(0.0, IMPOSSIBLE * limit_ms)
        }
        if wrong & {"verify", "round"}:
            wrong.add("draft")
        names = {f"time/{key}_ms{end}" for key in wrong for end in ("", "_ci95")}
        names |= {f"limit/{key}_ms" for key in wrong}
        kept.append({name: value for name, value in line.items() if name not in names})
    return kept


def diagnosis_of(
    lines: Sequence[Line], setup: Setup, plan: Plan, knows_draft: bool = True
) -> Diagnosis | None:
    """Return the diagnosis of a profile; None where no round of speculation or no acceptance is
    known.
    """
    config = plan.config
    expected = length_at(config.settings(Profile).expected_alpha)
    drawn = config.draft.drawn_alpha if config.engine.name == "native" else None
    length_of = expected if drawn is None else length_at(drawn)
    cells = cells_of(lines, setup, length_of, expected, knows_draft)
    return diagnose(cells, config.batch.generate_len) if cells else None


def diagnosis_metrics(diagnosis: Diagnosis | None) -> Metrics:
    """Return a diagnosis as a run stores it."""
    if diagnosis is None:
        return {}
    metrics: Metrics = {
        "diagnosis/cause": diagnosis.cause,
        "diagnosis/sentence": diagnosis.sentence,
        "diagnosis/paying_cells": len(diagnosis.paying),
        "diagnosis/cells": len(diagnosis.cells),
        "diagnosis/residual": diagnosis.engine.residual,
    }
    for loss in diagnosis.losses:
        metrics[f"diagnosis/{loss.cause}_share"] = loss.share
        metrics[f"diagnosis/{loss.cause}_gain_rps"] = loss.gain_rps
    return metrics


def view(lines: Sequence[Line], diagnosis: Diagnosis | None, tokens: int) -> RenderableType:
    """Return each step next to its limit, and the diagnosis with its figures. `tokens` are those of
    a request.
    """
    signs = {"target_decode": "T_T", "verify": "T_V", "draft": "T_D"}
    present = [name for name in signs if any(f"limit/{name}_ms" in line for line in lines)]
    columns = [f"{signs[name]}, ms (x limit)" for name in present]
    forward = [name for name in signs if any(f"forward/{name}_ms" in line for line in lines)]
    columns += [f"{signs[name]} of the model alone, ms" for name in forward]
    table = new_table("batch", "context", "gamma", *columns, "round, ms", num_words=0)
    for line in lines:
        table.add_row(
            f"{line['batch_size']:,}",
            f"{line['context_len']:,}",
            str(line.get("gamma", "")),
            *(_next_to_limit(line, name) for name in present),
            *(three_digits(line.get(f"forward/{name}_ms")) for name in forward),
            three_digits(line.get("time/round_ms")),
        )
    parts: list[RenderableType] = [table]
    if diagnosis is not None:
        parts += [Text(), _speeds(diagnosis, tokens), Text(), _losses(diagnosis)]
        parts += [Text(), Text(f"diagnosis: {diagnosis.sentence}", style="bold")]
    return Group(*parts)


def _next_to_limit(line: Line, name: str) -> str:
    time = line.get(f"time/{name}_ms")
    limit = line.get(f"limit/{name}_ms")
    if time is None:
        return ""
    return f"{three_digits(time)} ({time / limit:.1f}x)" if limit else three_digits(time)


def _speeds(diagnosis: Diagnosis, tokens: int) -> RenderableType:
    table = new_table("batch", "context", "gamma", "tokens a round", "speedup", "requests/s")
    for cell in diagnosis.cells:
        table.add_row(
            f"{cell.batch:,}",
            f"{cell.context:,}",
            str(cell.gamma),
            f"{cell.length:.2f}",
            f"{cell.speedup:.2f}x" + (" pays" if cell.speedup > 1 else ""),
            f"{cell.requests_per_second(tokens):.3g}",
        )
    return table


def _losses(diagnosis: Diagnosis) -> RenderableType:
    """Return what each cause costs where it costs most; the fit leaves a residual unexplained."""
    title = f"what is lost, at most; the fit leaves {diagnosis.engine.residual:.0%} unexplained"
    table = new_table("cause", "of a round", "where", "without it", "requests/s", title=title)
    for loss in diagnosis.losses:
        table.add_row(
            loss.cause + ("*" if loss.cause in diagnosis.named else ""),
            f"{loss.share:.0%}",
            loss.cell.label,
            f"{loss.speedup:.2f}x",
            f"+{loss.gain_rps:.3g}",
        )
    return table
