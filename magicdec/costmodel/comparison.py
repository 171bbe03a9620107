"""The prediction for a run: a warning before it; predicted values, their errors and published
values after it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from magicdec.config.groups import Efficiency
from magicdec.config.omega import omega
from magicdec.config.options import values_of
from magicdec.costmodel.acceptance import Curves, published_points
from magicdec.costmodel.kernel_costs import KernelCosts
from magicdec.costmodel.prediction import predict, predict_generation
from magicdec.costmodel.round import Setup, prefill_s, round_times
from magicdec.costmodel.tables import Row, first_version, read_table
from magicdec.costmodel.targets import architecture
from magicdec.costmodel.verdict_words import verdict

STEPS = ("target_decode", "draft", "verify")
# Predicted values that a run measures under another name.
MEASURED = {name: name for name in ("speedup", "speedup_wall")} | {
    f"{step}_ms": f"time/{step}_ms" for step in (*STEPS, "round")
}

PERFECT = Efficiency(
    bandwidth_fraction=1.0,
    matmul_fraction=1.0,
    matmul_half_rows=0.0,
    attention_fraction=1.0,
    overlap=1.0,
    layer_overhead_us=0.0,
    step_overhead_us=0.0,
    round_overhead_us=0.0,
    allreduce_hop_us=0.0,
    allreduce_bandwidth_fraction=1.0,
)


def warning(
    prompts: Setup,
    gammas: Sequence[int],
    curves: Curves,
    alpha: float | None = None,
    generate_len: int = 0,
) -> str | None:
    """Return a warning if a run is predicted below 1x at its best gamma, or never to pay; else
    None.
    """
    prediction = predict_generation(prompts, gammas, alpha, curves, generate_len)
    best = prediction.best
    pays = best.break_even_alpha is not None if best.speedup is None else best.speedup >= 1.0
    return None if pays else verdict(prediction)


def predicted_metrics(
    setup: Setup, gamma: int, measured: Mapping[str, Any], generate_len: int = 0
) -> dict[str, float | int | str | None]:
    """Return `predicted/*` at the gamma that ran and, if it is known, the measured alpha.

    Add a relative error, predicted over measured minus 1, for every value that `measured` (a
    result.json) has too. `predicted/step_error` is the largest error of a step: in a speedup they
    may cancel out.
    """
    predicted = predict(
        setup, (gamma,), alpha=measured.get("alpha"), generate_len=generate_len
    ).metrics()
    for name, counterpart in MEASURED.items():
        ours = predicted.get(f"predicted/{name}")
        theirs = measured.get(counterpart)
        # A lookup's steps are predicted to be free, which says nothing of what they take.
        if (
            isinstance(ours, int | float)
            and isinstance(theirs, int | float)
            and min(ours, theirs) > 0
        ):
            predicted[f"predicted/{name.removesuffix('_ms')}_error"] = ours / theirs - 1
    given = [predicted.get(f"predicted/{step}_error") for step in STEPS]
    errors = [float(error) for error in given if error is not None]
    return predicted | ({"predicted/step_error": max(errors, key=abs)} if errors else {})


def limit_metrics(setup: Setup, gamma: int, measured: Mapping[str, Any]) -> dict[str, float]:
    """Return `limit/*`: the share of its limit that each measured step reaches, and the prefill.

    The limit is the sum over operators of the larger of bytes over bandwidth and FLOPs over the
    rate of matmuls.
    """
    perfect = replace(setup.hardware, efficiency=PERFECT, kernels=KernelCosts())
    ideal = setup.at(hardware=perfect)
    steps = round_times(ideal, gamma).steps(ideal.cache)
    times_ms = {
        step: (1e3 * time.total, measured.get(f"time/{step}_ms")) for step, time in steps.items()
    }
    prompts_s = prefill_s(ideal, ideal.target, ideal.ranks, round(ideal.context), rows=ideal.batch)
    times_ms["prefill"] = 1e3 * prompts_s, measured.get("autoregressive/time_to_first_token_ms")
    return {f"limit/{name}": least / time for name, (least, time) in times_ms.items() if time}


def published(
    setup: Setup, task: str, gamma: int | str | None = None
) -> dict[str, float | int | str | None]:
    """Return what the MagicDec paper measured for a configuration and a task, under `published/`,
    or {}.

    Where both versions of the paper have it, the row at `gamma` comes first, then the ICLR
    version's. `published/predicted_speedup` is the cost model's prediction at the paper's gamma and
    acceptance. Times are in milliseconds.
    """
    usual = values_of("cache", setup.cache.policy)
    settings = zip(setup.cache.own_keys(), setup.cache.settings, strict=True)
    if setup.draft.quantization != "none" or any(
        usual.get(key, value) != value for key, value in settings
    ):
        return {}
    machine = f"{setup.ranks}x{setup.hardware.device.name}".lower()
    wanted = (setup.target_name, setup.draft_label, setup.cache.policy, setup.context, setup.batch)
    candidates = []
    for row in (*read_table(), *first_version()):
        of_row = (row.target, row.draft, row.policy, row.context_len, row.batch_size)
        is_same = of_row == wanted and row.kv_budget == setup.cache.budget
        if is_same and row.hardware.lower() == machine and row.task.startswith(task):
            candidates.append(row)
    if not candidates:
        return {}
    row = min(candidates, key=lambda row: row.gamma != gamma)
    length = acceptance_length(row)
    return {
        "published/table": row.table,
        "published/gamma": row.gamma,
        "published/acceptance_length": row.omega,
        "published/target_decode_ms": row.autoregressive_ms,
        "published/draft_ms": row.draft_ms and row.draft_ms / row.gamma,
        "published/verify_ms": row.verify_ms,
        "published/speedup": row.speedup,
        "published/predicted_speedup": length
        and round_times(row.setup(architecture), row.gamma).speedup(length),
    }


def acceptance_length(row: Row) -> float | None:
    """Return a row's own Omega or, if it gives none, that which follows from the alpha of the
    paper's other rows.
    """
    if row.omega is not None:
        return row.omega
    estimate = Curves(published_points(), row.task).estimate(row.setup(architecture))
    return None if estimate is None else omega(row.gamma, estimate.alpha)
