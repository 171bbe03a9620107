"""A candidate of a search as a file in conf/experiment, which runs it."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import yaml

from magicdec.config.choices import DraftConfig
from magicdec.config.groups import HardwareConfig
from magicdec.config.options import option_file, values_of
from magicdec.costmodel.planner import Candidate
from magicdec.costmodel.targets import is_own_path, option
from magicdec.units import both_speedups

FOUND_BY = "# Found by:"  # in the experiments that it writes
# Of the group hardware, what a prediction depends on.
MACHINE = ("tensor_parallel", "memory_gib", "bandwidth_gbs", "tflops", "efficiency")


def experiment_yaml(
    best: Candidate, command: str, hardware: HardwareConfig, prompt_len: int, generate_len: int
) -> str:
    """Return a candidate as the text of a file in conf/experiment. `hardware` is the group that its
    machine is from.
    """
    setup = best.setup
    cache = best.setup.cache
    options = {"target": setup.target_name if option(setup.target_name) else "custom"}
    options["draft"] = setup.draft.name if best.prediction else "none"
    is_own = is_own_path(setup.target_name, setup.target_path)
    values: dict[str, dict[str, Any]] = {} if is_own else {"target": {"path": setup.target_path}}
    speed = f"{best.tokens_per_second:,.0f} tokens/s"
    summary = f"{speed}; no known draft is faster."
    if best.prediction and best.prediction.estimate:
        alpha, source, _ = best.prediction.estimate
        faster = both_speedups(best.speedup, best.speedup_wall)
        summary = f"{faster} over autoregressive, {speed}; alpha {alpha:.2f} ({source})."
        if setup.draft.model and option(setup.draft.model.name):
            options["target@draft.model"] = setup.draft.model.name
        values["draft"] = {"gamma": best.gamma} | _draft_values(setup.draft)
        if setup.draft.is_model:
            options["cache"] = cache.policy
            values["cache"] = {"budget": cache.budget} if cache.has_budget else {}
            values["cache"] |= dict(zip(cache.own_keys(), cache.settings, strict=True))
    name = setup.hardware.name.lower()
    is_option = option_file("hardware", name) is not None
    options["hardware"] = name if is_option else "auto"
    figures = {
        key: value for key, value in asdict(hardware).items() if key in MACHINE or not is_option
    }
    if changed := _changed(figures, values_of("hardware", options["hardware"])):
        values["hardware"] = changed
    values["batch"] = {
        "size": setup.batch,
        "context_len": prompt_len,
        "generate_len": max(2, generate_len),  # the least that a run takes
    }
    defaults = [{f"override /{group}": name} for group, name in options.items()]
    content = yaml.safe_dump({"defaults": defaults} | values, sort_keys=False)
    command = command.replace("\n", "\n# ")  # a word of it may have several lines
    return f"# @package _global_\n# Predicted: {summary}\n{FOUND_BY} {command}\n{content}"


def _draft_values(draft: DraftConfig) -> dict[str, Any]:
    """Return what a draft sets in another way than the option of its name, but for gamma and what
    its acceptance is taken to be.
    """
    values = asdict(draft)
    for key in ("name", "gamma", "model", "synthetic_acceptance", "acceptance"):
        del values[key]
    usual = values_of("draft", draft.name)
    changed = _changed(values, usual)
    if draft.model:
        name, path = draft.model.name, draft.model.path
        head_path = usual.get("model", {}).get("path")  # of a draft that is no option of targets
        is_usual = is_own_path(name, path) if option(name) else path == head_path
        changed |= {} if is_usual else {"model": {"path": path}}
    return changed


def _changed(values: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that differ from the usual ones, of the keys that these have."""
    changed = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and isinstance(usual.get(key), Mapping):
            if inner := _changed(value, usual[key]):
                changed[key] = inner
        elif key in usual and value != usual[key]:
            changed[key] = value
    return changed
