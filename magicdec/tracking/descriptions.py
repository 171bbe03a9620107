"""Describe a run in words: its models, its data and its place."""

from collections.abc import Mapping
from typing import Any

from magicdec.config.registry import POLICIES, facts_of_draft
from magicdec.costmodel.targets import model_label


def described_place(config: Mapping[str, Any], device: Any, engine: str | None = None) -> str:
    """Describe the device, the data type, and the attention or the `engine` if it is not the native
    one.
    """
    hardware = config["hardware"]
    ranks = (
        f"{hardware['tensor_parallel']} ranks of " if hardware.get("tensor_parallel", 1) > 1 else ""
    )
    means = f"by {engine}" if engine else f"attention by {config['attention']}"
    return f"{hardware['dtype']} on {ranks}{device}, {means}"


def described_data(config: Mapping[str, Any]) -> str:
    """Describe where the prompts come from."""
    return f"data: {' '.join(filter(None, (config['data']['name'], config['data'].get('task'))))}"


def described_context(config: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
    """Return how long the prompts are: all the same, or from the shortest to the longest."""
    low = metrics.get("data/context_len_min")
    high = metrics.get("data/context_len_max")
    mean = metrics.get("data/context_len_mean")
    if low == high:
        return f"{high or int(config['batch']['context_len']):,} tokens of context"
    return f"{low:,} to {high:,} tokens of context ({mean:,.0f} on average)"


def described_models(config: Mapping[str, Any]) -> str:
    """Describe the target, the draft and its cache, in a title."""
    draft, cache = config["draft"], config["cache"]
    target = config["target"]
    parts = [model_label(target["name"], target.get("path"))]
    if draft["name"] == "none":
        return ", ".join([*parts, "autoregressive alone"])
    facts = facts_of_draft(draft["name"])
    parts += [facts.described(facts.title, draft)]
    parts += [draft["quantization"]] if draft.get("quantization", "none") != "none" else []
    parts += (
        [f"gamma {draft['gamma']}"]
        if "gamma" in draft and config["scenario"]["name"] != "profile"
        else []
    )
    if not facts.is_model:  # and so has no cache
        return ", ".join(parts)
    parts += [f"{cache['policy']} cache"]
    if cache["policy"] not in POLICIES or POLICIES[cache["policy"]].facts.has_budget:
        parts.append(f"budget {cache.get('budget')}")
        if sinks := cache.get("num_sink"):
            parts.append(f"{sinks} sinks")
    return ", ".join(parts)
