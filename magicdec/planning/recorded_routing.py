"""The routing that a run has recorded, for predictions of others: scenario.routing=RUN."""

from pathlib import Path

import numpy as np

from magicdec.architectures.model_config import ModelConfig
from magicdec.costmodel.routing import Routing, explaining
from magicdec.errors import UserError
from magicdec.tracking.reader import find_run
from magicdec.tracking.run_files import ROUTING, read_lines


def routing_of(run: str, runs_dir: str, target: ModelConfig) -> Routing:
    """Return the routing of a run, on average over its layers; of another model's, popularity is
    stretched over the target's experts.

    Raise UserError for a run that has recorded none, and for a target without experts.
    """
    key = f"scenario.routing={run}"
    if not any(matrices.experts for matrices in target.matrices):
        raise UserError(f"{key}: the target has no experts; set it to null")
    folder = find_run(run, Path(runs_dir))["folder"]
    layers = [
        line
        for line in read_lines(Path(folder, "routing.jsonl"), ROUTING)
        if len(line["distinct"]) > 1
    ]
    if not layers:
        raise UserError(f"{key}: this run has recorded none; name one of a model with experts")
    popularity = np.mean([np.sort(layer["popularity"]) for layer in layers], axis=0)
    distinct = float(np.mean([layer["distinct"][1] for layer in layers]))
    return explaining(popularity, layers[0]["experts_per_token"], distinct)
