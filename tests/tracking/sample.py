"""A run's configuration, metrics and rows, as plain as the tracking gets them."""

import json

from magicdec.tracking.store import Run
from magicdec.tracking.unit_files import by_round
from magicdec.units import WAYS

CONFIG = {
    "target": {"name": "tiny", "path": "models/tiny"},
    "draft": {"name": "self", "gamma": 4, "synthetic_acceptance": None, "model": None},
    "cache": {"policy": "streaming", "budget": 128, "num_sink": 4},
    "attention": "sdpa",
    "engine": {"name": "native"},
    "hardware": {"name": "auto", "device": "cpu", "dtype": "float32"},
    "batch": {"size": 8, "context_len": 4096, "generate_len": 64, "num_batches": 1},
    "data": {"name": "stdlib", "seed": 0},
    "sampling": {"temperature": 0.0, "top_p": None},
    "scenario": {"name": "compare", "repeats": 3},
    "wandb": {
        "mode": "offline",
        "project": "magicdec",
        "entity": None,
        "group": "a group",
        "tags": ["mine"],
    },
    "runs_dir": "runs",
    "resume": True,
}

BOTH_WAYS = {"tokens_per_second": (433.21, 812.9), "time_per_output_token_ms": (18.43, 9.81)}
BOTH_WAYS |= {
    "time_to_first_token_ms": (4213.2, 4219.9),
    "decode_s": (1.167, 0.6824),
    "wall_s": (5.38, 4.902),
}
METRICS = {
    f"{way}/{name}": values[i] for i, way in enumerate(WAYS) for name, values in BOTH_WAYS.items()
}
METRICS |= {
    "device": "Some CPU @ 2.90GHz",
    "speedup": 1.879,
    "speedup_wall": 1.71,
    "speedup_spread": 0.031,
}
METRICS |= {f"acceptance_rate/position_{i}": rate for i, rate in enumerate((0.85, 0.76, 0.68, 0.6))}
METRICS |= {"acceptance_rate": 0.7231, "acceptance_length": 3.8924, "acceptance/source": "measured"}
METRICS |= {"lossless/identical": True, "lossless/passed": True}
METRICS |= {"lossless/different_rows": 0, "lossless/excused_rows": 0}
METRICS |= {"lossless/max_logit_gap": 1.2e-6, "lossless/baseline_max_logit_gap": 9e-7}
METRICS |= {
    "time/target_decode_ms": 18.1,
    "time/draft_ms": 3.21,
    "time/verify_ms": 21.0,
    "time/round_ms": 34.0,
}
METRICS |= {"formula/speedup": 2.08, "formula/speedup_error": 0.107, "formula/speedup_wall": 1.75}
METRICS |= {"memory/peak_gib": 1.234, "memory/target_kv_gib": 0.2, "memory/draft_kv_gib": 0.0061}

GENERATIONS = [{"row": 0, "context_len": 4, "autoregressive": [1, 2, 3], "speculative": [1, 2, 3]}]
HISTORY = [
    {"round": i, "accepted": i % 5 + 0.5, "rows": 8, "seconds": 0.01, "batch": 0} for i in range(6)
]
SAMPLES = [{"row": 0, "prompt_end": "def f(", "autoregressive": "x): pass", "speculative": None}]
# Text of a row with rounds of two proposals each, as it is stored in samples.jsonl.
ROUNDS = [(2, 2), (2, 0), (2, 1)]  # proposed, accepted
TOKENS = ["the", " c", "at", " s", "at", "\n", "\x1b[31m"]
SAMPLE = {
    "row": 0,
    "context_len": 9,
    "prompt_end": "once\u202e",
    "autoregressive": "x",
    "speculative": "y",
}
SAMPLE |= {"rounds": by_round(TOKENS, ROUNDS)}
SYSTEM = [{"system/seconds": 5.0 * i, "system/cpu": 0.5, "system/memory_gib": 3.25} for i in (1, 2)]


def with_changes(**groups):
    """CONFIG with some keys of some groups replaced."""
    return CONFIG | {name: CONFIG[name] | changes for name, changes in groups.items()}


def finished_run(runs_dir):
    run = Run.open(runs_dir, "abc", CONFIG)
    run.finish({"speedup": 1.5}, GENERATIONS, HISTORY)
    return run


def lines(path):
    """The rows of a .jsonl file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def result_of(run):
    return json.loads((run.folder / "result.json").read_text())
