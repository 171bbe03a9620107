"""Calibration: the few numbers of `Efficiency`, from measured times.

Fitted are, for each machine, its bandwidth fraction and its overheads per layer and per round, and
for all machines together the fractions that belong to kernels rather than chips: of the matmul rate
and of the link's bandwidth. The rest is read from datasheets and code. Weighted least squares of
log times, with priors, so that what the rows cannot tell apart stays at what is known of it;
robust, because published rows hold outliers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import Any, NamedTuple

import numpy as np
import yaml
from numpy.typing import NDArray

from magicdec.architectures.model_config import ModelConfig
from magicdec.config.groups import Efficiency
from magicdec.costmodel.hardware import NVLINK4, Hardware, configured, parse_name
from magicdec.costmodel.round import Setup, prefill_s, round_times
from magicdec.costmodel.tables import Row
from magicdec.errors import UserError

NOISE = 0.02  # relative error of a measured time, one standard deviation
# Standard deviations beyond which a residual counts by its size, no longer by its square.
OUTLIER = 1.5


class Prior(NamedTuple):
    """A parameter's range, and its mean and standard deviation before any row is seen."""

    low: float
    high: float
    mean: float | None = None
    deviation: float = 1.0
    start: float | None = None


SHARED = {
    # Matmuls of LLM shapes reach 0.73 of an H100's rate (SemiAnalysis, December 2024), the best
    # shapes 0.80, and 0.86 on an A100 (stas00/ml-engineering); a decode step's are smaller.
    "matmul_fraction": Prior(0.2, 1.0, 0.7, 0.05),
    # By what a further byte costs from 256 KB to 4 MB on 8 H100s: 0.14 and 0.17 (vLLM's and
    # SGLang's kernels, measured in sgl-project/sglang#2904), 0.43 (NCCL, in
    # ByteDance-Seed/Triton-distributed#57).
    "allreduce_bandwidth_fraction": Prior(0.05, 1.0, NVLINK4.fraction, 0.1),
}
OWN = {
    "bandwidth_fraction": Prior(0.3, 1.0, 0.9, 0.05),  # a plain copy reaches about as much
    "layer_overhead_us": Prior(0.0, 1e5, start=60.0),
    "round_overhead_us": Prior(0.0, 1e6, start=700.0),
}
# Of our engine on CPUs, whose kernels hide little of their arithmetic.
ON_CPUS = {
    "bandwidth_fraction": Prior(0.3, 1.0, 0.8, 0.2),
    "matmul_fraction": Prior(0.1, 1.0, 0.6, 0.3),
    "attention_fraction": Prior(0.05, 1.0, 0.5, 0.3),
    "overlap": Prior(0.01, 1.0, 0.5, 0.3),
    "step_overhead_us": Prior(0.0, 1e5, start=500.0),
}
# Of experts that run one after the other, as transformers' modules run them on a CPU.
OF_EXPERTS = ON_CPUS | {
    "expert_overhead_us": Prior(0.0, 1e4, start=20.0),
    "layer_overhead_us": Prior(0.0, 1e5, start=300.0),
}
# Of a server, whatever its engine. Its scheduler takes a part of every step. One model does not
# tell this apart from what its layers take, for which the prior is that of launches that are
# replayed as a CUDA graph.
SERVED = {
    "layer_overhead_us": Prior(0.0, 1e5, 10.0, 10.0),
    "step_overhead_us": Prior(0.0, 1e6, start=1000.0),
}


@dataclass(frozen=True)
class Calibration:
    """Fitted machines by hardware name."""

    machines: Mapping[str, Hardware]
    num_rows: int
    residual: float  # root mean square of the log errors of all times fitted


def calibrate(
    rows: Sequence[Row],
    model: Callable[[str], ModelConfig],
    machines: Mapping[str, Hardware],
    priors: Mapping[str, Prior] | None = None,
) -> Calibration:
    """Fit the machines that `rows` name; `machines` gives their devices and the software that was
    measured.

    Every time that a row gives is used. `priors` replace those of SHARED and OWN, and name what
    else to fit for each machine. Raise UserError if a machine has no time to fit.
    """
    machines = {name: machines[name] for name in sorted({row.hardware for row in rows})}
    times = [(row, row.setup(model, machines[row.hardware]), _measured(row)) for row in rows]
    for name in machines:
        if not any(measured for row, _, measured in times if row.hardware == name):
            raise UserError(f"no row of hardware={name} has a time to calibrate with")
    keys: list[tuple[str | None, str]] = [(None, key) for key in SHARED]
    given = SHARED | OWN | dict(priors or {})
    keys += [(name, key) for name in machines for key in given if key not in SHARED]
    of_keys = [given[key] for _, key in keys]
    scales = np.array(
        [prior.deviation if prior.mean is not None else prior.start or 1.0 for prior in of_keys]
    )

    def fitted(x: NDArray[np.float64]) -> dict[str, Hardware]:
        return {name: _with(start, keys, x * scales) for name, start in machines.items()}

    def errors(x: NDArray[np.float64]) -> list[float]:
        now = fitted(x)
        return [
            error
            for row, setup, measured in times
            for error in _errors(now[row.hardware], row, setup, measured).values()
        ]

    def residuals(x: NDArray[np.float64]) -> NDArray[np.float64]:
        expected = [
            (value * s - p.mean) / p.deviation
            for value, s, p in zip(x, scales, of_keys, strict=True)
            if p.mean
        ]
        return np.array([error / NOISE for error in errors(x)] + expected)

    solution = _least_squares()(
        residuals,
        np.array([prior.mean or prior.start or 0.0 for prior in of_keys]) / scales,
        bounds=([p.low for p in of_keys] / scales, [p.high for p in of_keys] / scales),
        loss="soft_l1",
        f_scale=OUTLIER,
    )
    return Calibration(
        fitted(solution.x), len(rows), float(np.sqrt(np.mean(np.square(errors(solution.x)))))
    )


def _with(
    start: Hardware, keys: Sequence[tuple[str | None, str]], values: NDArray[np.float64]
) -> Hardware:
    """Return a machine with its share of the parameters."""
    changes = {
        key: float(v)
        for (name, key), v in zip(keys, values, strict=True)
        if name in (None, start.name)
    }
    return replace(start, efficiency=replace(start.efficiency, **changes))


def _measured(row: Row) -> dict[str, float]:
    """Return the times that a row gives, in milliseconds."""
    times = {
        "target": row.autoregressive_ms,
        "draft": row.draft_ms,
        "verify": row.verify_ms,
        "round": row.round_ms,
        "prefill": row.prefill_ms,
    }
    return {name: value for name, value in times.items() if value is not None}


def errors_of(machine: Hardware, row: Row, model: Callable[[str], ModelConfig]) -> dict[str, float]:
    """Return the relative error of each time that a row gives: predicted over measured, minus 1."""
    return {
        step: exp(error) - 1
        for step, error in _errors(machine, row, row.setup(model, machine), _measured(row)).items()
    }


def _errors(
    fitted: Hardware, row: Row, setup: Setup, measured: Mapping[str, float]
) -> dict[str, float]:
    """Return the log of predicted over measured, for every measured time."""
    now = setup.at(hardware=fitted)
    times = round_times(now, row.gamma)
    prompt_s = prefill_s(now, now.target, now.ranks, row.prompt_len)
    predicted = {
        "target": times.target.total + row.prefills * prompt_s,
        "draft": row.gamma * times.steps(now.cache)["draft"].total,
        "verify": times.verify.total,
        "round": times.round_s,
        "prefill": prompt_s,
    }
    return {name: log(1e3 * predicted[name] / value) for name, value in measured.items()}


def _least_squares() -> Callable:
    try:
        from scipy.optimize import least_squares
    except ImportError:
        raise UserError("calibrating needs scipy: pip install 'magicdec[calibrate]'") from None
    return least_squares


def uncalibrated(name: str, stack: str) -> Hardware:
    """Return the machine of that name to start a calibration from; `stack` is the software measured
    on it.
    """
    count, device = parse_name(name)
    return configured(
        name, count, efficiency=Efficiency(allreduce_hop_us=device.link.hop_us), stack=stack
    )


def to_yaml(
    calibrated: Hardware, provenance: Sequence[str], fitted: Mapping[str, Prior] = OWN
) -> str:
    """Return a calibrated machine as a file to commit and share; `provenance` becomes its opening
    comment.

    `fitted` names what was fitted for the machine.
    """
    notes = {
        "matmul_half_rows": "not fitted: a tensor core's tile, and nothing on a CPU",
        "overlap": "not fitted",
        "expert_overhead_us": "not fitted: of models with experts",
        "allreduce_hop_us": "not fitted: the link's, see magicdec/costmodel/hardware.py",
    }
    notes = {key: note for key, note in notes.items() if key not in fitted}
    lines = [f"# {line}".rstrip() for line in provenance]
    lines += [f"hardware: {calibrated.name}", f"stack: {calibrated.stack.name}", "efficiency:"]
    for key, value in vars(calibrated.efficiency).items():
        note = f"  # {notes[key]}" if key in notes else ""
        lines.append(f"  {key}: {value:.4g}{note}")
    if calibrated.kernels.times:
        lines += ["# Times as long as by bytes (magicdec/costmodel/kernel_costs.py).", "kernels:"]
        lines += [f"  measured_at: {calibrated.kernels.measured_at}", "  times:"]
    for kind, times in calibrated.kernels.times.items():
        lines.append(f"    {kind}:")
        lines += [f"      {name}: {factor:.3g}" for name, factor in times.items()]
    return "\n".join(lines) + "\n"


def option_yaml(calibrated: Hardware, values: Mapping[str, Any], provenance: Sequence[str]) -> str:
    """Return a calibrated machine as an option of the group hardware; `values` are its other
    keys.
    """
    efficiency = {key: float(f"{value:.4g}") for key, value in vars(calibrated.efficiency).items()}
    content = {"defaults": ["auto", "_self_"], **values, "efficiency": efficiency}
    return "".join(f"# {line}\n" for line in provenance) + yaml.safe_dump(content, sort_keys=False)
