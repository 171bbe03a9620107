"""The id of a run: a hash of everything that affects its results."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from magicdec.costmodel.targets import option
from magicdec.tracking.whole_files import plain

# Groups and keys that do not change what a run does.
NOT_IN_ID = frozenset({"wandb", "tracker", "hydra", "runs_dir", "resume", "sweep", "plugins"})
# Keys of a scenario that say how often the same work is repeated: repeats are added to a run.
HOW_OFTEN = {"compare": frozenset({"repeats", "precision", "max_minutes"})}
ID_LENGTH = 12  # hex digits: among 10,000 runs, two share an id with a probability of 2e-7


def run_id(config: Mapping[str, Any], fingerprints: Mapping[str, str], device: str) -> str:
    """Return a run's id: a hash of everything but `software` that affects its result.

    `fingerprints` are those of the files that it reads and of an engine that is not ours. The order
    of keys does not matter, nor how a number is written: 1 and 1.0 are the same. Nor does the
    folder in which a model lies, nor how often the work is repeated.
    """
    decisive = {key: value for key, value in config.items() if key not in NOT_IN_ID}
    if target := decisive.get("target"):
        decisive["target"] = _without_folder(target, fingerprints.get("target"))
    if model := decisive.get("draft", {}).get("model"):
        without_folder = _without_folder(model, fingerprints.get("draft.model"))
        decisive["draft"] = decisive["draft"] | {"model": without_folder}
    if scenario := decisive.get("scenario"):
        unread = HOW_OFTEN.get(scenario["name"], frozenset())
        decisive["scenario"] = {key: scenario[key] for key in scenario.keys() - unread}
    identity = {"config": decisive, "fingerprints": fingerprints, "device": device}
    text = json.dumps(plain(identity, whole_numbers=True), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:ID_LENGTH]


def _without_folder(model: Mapping[str, Any], fingerprint: str | None) -> Mapping[str, Any]:
    """Return a model with the path of its option instead of its own. A model that is no option's is
    named after its folder: where its weights have a fingerprint, the name does not count either.
    How it takes back tokens is a part of its architecture.
    """
    named = option(model["name"])
    is_read = fingerprint not in (None, "random")
    return {
        **{key: value for key, value in model.items() if key != "rollback"},
        "path": named.get("path"),
        "name": model["name"] if named or not is_read else None,
    }
