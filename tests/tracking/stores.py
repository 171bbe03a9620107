"""Synthetic stores: runs that look like a sweep's, of any number, written straight to disk."""

import base64
import gzip
import json
import random
import re
from copy import deepcopy
from itertools import cycle, islice, product
from pathlib import Path

import yaml

from magicdec import __version__
from magicdec.config.omega import omega
from magicdec.units import WAYS
from tests.tracking.sample import CONFIG

OVERHEAD = 0.8  # ms a round
AXES = {"batch.size": (1, 4, 8, 16, 32, 64), "batch.context_len": (1024, 4096, 8192, 16384, 32768)}
AXES |= {"cache.policy": ("streaming", "snapkv", "full"), "cache.budget": (64, 128, 256, 512, 1024)}
AXES |= {"draft.gamma": (1, 2, 4, 8)}


def config_with(values: dict) -> dict:
    config = deepcopy(CONFIG)
    for key, value in values.items():
        group, _, name = key.partition(".")
        config[group][name] = value
    return config


def outcome_of(values: dict, rng: random.Random) -> dict:
    """Figures that follow the paper's formula, with some noise, so that plots look like real
    ones.
    """
    batch, context, policy, budget, gamma = (values[key] for key in AXES)
    kept = context if policy == "full" else budget
    alpha = min(0.97, {"streaming": 0.62, "snapkv": 0.7, "full": 0.97}[policy] + 0.02 * budget**0.4)
    decode = 8 + batch * context / 40_000
    draft, verify = 6 + batch * kept / 40_000, decode * 1.15
    length = omega(gamma, alpha)
    formula = decode * length / (gamma * draft + verify + OVERHEAD)
    speedup = formula * rng.gauss(0.96, 0.03)
    spread = abs(rng.gauss(0.03, 0.03))
    ends = [speedup * (1 - 0.7 * spread), speedup * (1 + 0.3 * spread)]
    source = "synthetic" if batch == 64 else "measured"
    found = {
        "speedup": speedup,
        "speedup_wall": speedup * 0.9,
        "speedup_spread": spread,
        "speedup_ci95": ends,
    }
    found |= {"acceptance_rate": (length - 1) / gamma, "acceptance_length": length, "alpha": alpha}
    found |= {
        "acceptance/source": source,
        "memory/peak_gib": 1 + batch * context / 1e5,
        "device": "Some CPU @ 2.90GHz",
    }
    for way, step in zip(WAYS, (decode, decode / speedup), strict=True):
        found |= {
            f"{way}/tokens_per_second": 1000 * batch / step,
            f"{way}/time_per_output_token_ms": step,
        }
    found |= {"time/target_decode_ms": decode, "time/draft_ms": draft, "time/verify_ms": verify}
    found |= {"time/overhead_ms": OVERHEAD, "time/round_ms": gamma * draft + verify + OVERHEAD}
    found |= {
        "predicted/target_decode_ms": decode * rng.gauss(1, 0.05),
        "predicted/verify_ms": verify * 0.95,
    }
    found |= {
        "predicted/overhead_ms": OVERHEAD,
        "predicted/round_ms": (gamma * draft + verify) * 0.95 + OVERHEAD,
    }
    found |= {"predicted/speedup": formula * rng.gauss(1.05, 0.05)}
    found |= {"formula/speedup": formula, "formula/speedup_error": formula / speedup - 1}
    verdict = None if source == "synthetic" else True
    return found | {"lossless/identical": verdict, "lossless/passed": verdict}


def write_store(runs_dir: Path, number: int, seed: int = 0) -> None:
    """A store of `number` runs over the AXES, over several data seeds where they do not suffice;
    every 50th failed.
    """
    rng = random.Random(seed)
    points = [dict(zip(AXES, point, strict=True)) for point in product(*AXES.values())]
    rng.shuffle(points)
    for index, values in enumerate(islice(cycle(points), number)):
        values = values | {"data.seed": index // len(points)}
        failed = "out_of_memory" if index % 50 == 49 else ""
        write_run(runs_dir, f"{index:012x}", values, outcome_of(values, rng), failed)


def write_run(
    runs_dir: Path,
    run_id: str,
    values: dict | None = None,
    metrics: dict | None = None,
    failed: str = "",
):
    """Store a run with some settings and metrics, or one that has failed in a way of
    clean.KINDS.
    """
    values, folder = values or {}, runs_dir / run_id
    folder.mkdir(parents=True)
    result = {
        "status": "done",
        "id": run_id,
        "attempt": 1,
        "started": f"2026-01-01T00:00:00+00:00#{run_id}",
    }
    result |= {"host": "here", "pid": 1, "version": __version__, "commit": None, "torch": "2.13.0"}
    result["overrides"] = [f"{key}={value}" for key, value in values.items()]
    result |= (
        {"status": "failed", "kind": failed, "reason": "batch.size: too much"}
        if failed
        else metrics or {}
    )
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "config.yaml").write_text(
        yaml.dump(config_with(values), Dumper=yaml.CSafeDumper, sort_keys=False)
    )


def write_load(runs_dir: Path, levels: dict[int, tuple[float, float | None]]) -> None:
    """A run of scenario=serve: tokens per second both ways (None: speculation failed), by the
    number of users.
    """
    values = dict(zip(AXES, (8, 1024, "streaming", 64, 2), strict=True)) | {
        "scenario.name": "serve"
    }
    rows = []
    for users, (plain, fast) in levels.items():
        row = {"concurrency": users, "lossless/passed": None if fast is None else True}
        row |= {
            "speedup": fast and fast / plain,
            "speedup_duration": fast and (fast + plain) / (2 * plain),
        }
        if fast is not None:
            row["speedup_ci95"] = [fast / plain - 0.1, fast / plain + 0.1]
        for way, rate in zip(WAYS, (plain, fast), strict=True):
            row |= {
                f"{way}/tokens_per_second": rate,
                f"{way}/time_per_output_token_ms": 10.0 * users,
            }
        rows.append(row)
    own = {key: value for key, value in rows[-1].items() if key != "concurrency"}
    write_run(
        runs_dir, "10ad", values, own | {"memory/peak_gib": 1.0, "acceptance/source": "synthetic"}
    )
    (runs_dir / "10ad" / "history.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )


def data_of(html):
    """Return the data that the script reads. Raise AssertionError for values that JSON does not
    have.
    """

    def refuse(word):
        raise AssertionError(word)

    packed = re.search(r'<script type="text/plain" id="data">(.*?)</script>', html, re.S)[1]
    return json.loads(gzip.decompress(base64.b64decode(packed)), parse_constant=refuse)
