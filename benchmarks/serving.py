"""Concurrent users on a CPU: what the bundled target gives 1 to 32 of them, autoregressively and speculatively.

    python benchmarks/serving.py          # writes docs/results/serving-cpu.md; 12 minutes, on an otherwise idle machine
    python benchmarks/serving.py --quick  # two small levels, to try it out; writes nothing

The figures are those of one `scenario=serve`: both ways at each level, one after the other, on the same requests.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import render
from omegaconf import DictConfig, OmegaConf
from page import RESULTS, ROOT, setting
from render import rounded, write_csv

Level = Mapping[str, Any]

WAYS = ("autoregressive", "speculative")
LOAD = (
    *("scenario.concurrencies=[1,4,8,16,32]", "scenario.num_requests=48", "batch.size=32"),
    *("batch.context_len=4096", "batch.generate_len=128"),
)
QUICK = ("scenario.concurrencies=[1,2]", "scenario.num_requests=4", "batch.context_len=256", "batch.generate_len=16")
SECONDS = ("time_to_first_token", "request_latency")
MILLISECONDS = ("time_per_output_token", "inter_chunk_latency")
PERCENTILES = (50, 90, 99)


def measure(overrides: Sequence[str]) -> tuple[list[Level], DictConfig]:
    """Do one run. Return its levels, and its configuration with every `auto` resolved."""
    with TemporaryDirectory() as store:
        command = [sys.executable, "launch.py", "scenario=serve", "wandb.mode=disabled", f"runs_dir={store}"]
        subprocess.run([*command, *overrides], cwd=ROOT, check=True)
        (result,) = Path(store).glob("*/result.json")
        levels = [json.loads(line) for line in (result.parent / "history.jsonl").read_text().splitlines()]
        config = OmegaConf.load(result.parent / "config.yaml")
        assert isinstance(config, DictConfig)
        return levels, config


def row_of(level: Level, way: str, attention: str) -> dict[str, Any]:
    """Return a line of the CSV file."""
    row = {"users": level["concurrency"], "way": way}
    row |= {key: level[f"{way}/{key}"] for key in ("tokens_per_second", "tokens_per_second_per_user")}
    for metric in (*SECONDS, *MILLISECONDS):
        factor, unit = (1e-3, "s") if metric in SECONDS else (1.0, "ms")
        row |= {f"{metric}_{unit}_p{p}": factor * level[f"{way}/{metric}_ms_p{p}"] for p in PERCENTILES}
    fast = {key: level[key] for key in ("speedup", "speedup_duration", "acceptance_rate", "acceptance_length")}
    row |= {key: value if way == "speculative" else None for key, value in fast.items()}
    row |= {"lossless": level["lossless/identical"], "measured_by": f"{setting()}, attention={attention}"}
    return rounded(row)


def main() -> None:
    """Measure the levels, and write the CSV file and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two small levels; write nothing")
    quick = parser.parse_args().quick
    levels, config = measure(QUICK if quick else LOAD)
    rows = [row_of(level, way, config.attention) for level in levels for way in WAYS]
    if quick:
        print(*rows, sep="\n")
        return
    write_csv(RESULTS / "serving-cpu.csv", rows)
    render.write("serving-cpu")


if __name__ == "__main__":
    main()
