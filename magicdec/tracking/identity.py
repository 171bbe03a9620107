"""The id of a run: a hash of everything that affects its results, in a form that ids have had from the beginning."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from magicdec.costmodel.targets import option
from magicdec.tracking.store import plain

# Keys that do not change what a run does.
NOT_IN_ID = frozenset({"wandb", "tracker", "hydra", "runs_dir", "resume", "sweep", "plugins"})
# Keys that used to be a group with nothing but a name: a run's id still counts them so.
FORMER_GROUPS = ("attention",)
# Configurations used to hold the keys of all options, and a run's id still counts them: with these values where its own
# options do not have them.
FORMER_KEYS: dict[str, dict[str, Any]] = {
    "cache": {"num_sink": 0, "observation_window": 32, "kernel": 5, "beta": 20, "page_size": 16, "refresh": 1}
    | {"bits": 4, "group_size": 32},
    "draft": {"max_ngram": 8, "num_layers": 0, "inner_gamma": 0, "cache": None},
    "engine": {"cache": "static", "python": None, "time_limit_s": 1800, "method": "draft_model", "kv_type": "f32"},
    "scenario": {"repeats": 1, "profile_repeats": 1, "num_requests": 1, "batch_sizes": [], "context_lens": []}
    | {"gammas": [], "critical_batches": [], "drafts": [], "policies": [], "concurrencies": [], "rates": []}
    | {"length_shares": [], "alpha": None, "latency_ms": None, "experiment": None, "first_token_ms": None},
}
# Keys of a group, by the name that ids know.
RENAMED = {"scenario": {"save_as": "experiment"}, "engine": {"kv_cache": "cache"}}
ONLY_AUTO = ("precision", "max_minutes")  # keys of the group scenario that count only with repeats=auto
# Keys of the group scenario that are newer than the oldest ids, which do not count them at these values.
LATER_KEYS: dict[str, Any] = {"acceptance_rate": None, "acceptance_length": None, "acceptance_gamma": None}
LATER_KEYS |= {"workload": [], "schedule": None, "tolerance": 0.03}
LATER_KEYS |= {"slo": None, "slo_percentile": 99, "slo_most": 64, "replays": []}
ID_LENGTH = 12  # hex digits: among 10,000 runs, two share an id with a probability of 2e-7


def run_id(config: Mapping[str, Any], fingerprints: Mapping[str, str], device: str) -> str:
    """Return a run's id: a hash of everything but `software` that affects its result.

    `fingerprints` are those of the checkpoints, the data and an engine that is not ours. The order of keys does not
    matter, nor how a number is written: 1 and 1.0 are the same. Nor does the folder in which a model lies.
    """
    decisive = {key: value for key, value in config.items() if key not in NOT_IN_ID}
    decisive |= {key: {"name": decisive[key]} for key in decisive.keys() & FORMER_GROUPS}
    if target := decisive.get("target"):
        decisive["target"] = _without_folder(target, fingerprints.get("target"))
    if model := decisive.get("draft", {}).get("model"):
        decisive["draft"] = decisive["draft"] | {"model": _without_folder(model, fingerprints.get("draft.model"))}
    if scenario := decisive.get("scenario"):
        unread = () if scenario.get("repeats") == "auto" else ONLY_AUTO
        counted = {key: value for key, value in scenario.items() if LATER_KEYS.get(key, ...) != value}
        decisive["scenario"] = {key: value for key, value in counted.items() if key not in unread}
    for group in RENAMED.keys() & decisive.keys():
        decisive[group] = {RENAMED[group].get(key, key): value for key, value in decisive[group].items()}
    for group in FORMER_KEYS.keys() & decisive.keys():
        decisive[group] = FORMER_KEYS[group] | decisive[group]
    if inner := decisive.get("draft", {}).get("cache"):
        decisive["draft"] |= {"cache": FORMER_KEYS["cache"] | inner}
    identity = {"config": decisive, "fingerprints": fingerprints, "device": device}
    text = json.dumps(plain(identity, whole_numbers=True), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:ID_LENGTH]


def _without_folder(model: Mapping[str, Any], fingerprint: str | None) -> Mapping[str, Any]:
    """Return a model with the path of its option instead of its own. A model that is no option's is named after its
    folder: where its weights have a fingerprint, the name does not count either.
    """
    own = option(model["name"])
    is_read = fingerprint not in (None, "random")
    return {**model, "path": own.get("path"), "name": model["name"] if own or not is_read else None}
