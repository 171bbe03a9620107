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

from omegaconf import DictConfig, OmegaConf
from page import RESULTS, ROOT, provenance

from magicdec.tracking.cells import markdown_table

Level = Mapping[str, Any]

WAYS = {"autoregressive": "o--", "speculative": "o-"}
LOAD = (
    *("scenario.concurrencies=[1,4,8,16,32]", "scenario.num_requests=48", "batch.size=32"),
    *("batch.context_len=4096", "batch.generate_len=128"),
)
QUICK = ("scenario.concurrencies=[1,2]", "scenario.num_requests=4", "batch.context_len=256", "batch.generate_len=16")
# Label of a panel, metric, factor.
PANELS = (
    ("tokens/s", "tokens_per_second", 1.0),
    ("time per output token, ms, median", "time_per_output_token_ms_p50", 1.0),
    ("time to first token, s, median", "time_to_first_token_ms_p50", 1e-3),
    ("request, s, median", "request_latency_ms_p50", 1e-3),
)


def measure(overrides: Sequence[str]) -> tuple[list[Level], Mapping[str, Any], DictConfig]:
    """Do one run. Return its levels, its result, and its configuration with every `auto` resolved."""
    with TemporaryDirectory() as store:
        command = [sys.executable, "launch.py", "scenario=serve", "wandb.mode=disabled", f"runs_dir={store}"]
        subprocess.run([*command, *overrides], cwd=ROOT, check=True)
        (result,) = Path(store).glob("*/result.json")
        levels = [json.loads(line) for line in (result.parent / "history.jsonl").read_text().splitlines()]
        config = OmegaConf.load(result.parent / "config.yaml")
        assert isinstance(config, DictConfig)
        return levels, json.loads(result.read_text()), config


def draw(levels: Sequence[Level], path: Path) -> None:
    """Draw a panel per metric by the number of users, with a line per way of decoding."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    users = [level["concurrency"] for level in levels]
    for number, (label, metric, factor) in enumerate(PANELS, 1):
        axes = figure.add_subplot(2, 2, number)
        for way, style in WAYS.items():
            axes.plot(users, [factor * level[f"{way}/{metric}"] for level in levels], style, label=way)
        axes.set(xscale="log", xlabel="users at once", ylabel=label, ylim=(0, None))
        axes.set_xticks(users, [f"{n:g}" for n in users])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=110)


def page(levels: Sequence[Level], result: Mapping[str, Any], config: DictConfig) -> str:
    """Return the page: throughput and latencies, and where speculation wins and loses."""
    rows = [_row(level, way) for level in levels for way in WAYS]
    gains, losses = (
        ", ".join(f"{n['concurrency']:g}" for n in levels if (n["speedup_duration"] >= 1) == wins)
        for wins in (True, False)
    )
    verdict = " and ".join(
        f"{verb} with {users} at once" for verb, users in (("gains", gains), ("loses", losses)) if users
    )
    return PAGE.format(
        provenance=provenance("python benchmarks/serving.py"),
        attention=config.attention,
        budget=config.cache.budget,
        gamma=config.draft.gamma,
        chunk=config.batch.prefill_chunk,
        rate=levels[-1]["acceptance_rate"],
        length=levels[-1]["acceptance_length"],
        lossless="yes, every request" if all(level["lossless/identical"] for level in levels) else "NO",
        memory=result["memory/peak_gib"],
        verdict=verdict,
        levels=markdown_table(HEADER, rows),
    )


HEADER = ("users", "way", "tokens/s", "tokens/s per user", "TTFT, s", "TPOT, ms", "ITL, ms", "request, s", "speedup")


def _row(level: Level, way: str) -> list[str]:
    def percentiles(metric: str, factor: float = 1.0) -> str:
        return " / ".join(f"{factor * level[f'{way}/{metric}_p{p}']:.3g}" for p in (50, 90, 99))

    cells = [f"{level['concurrency']:g}", way]
    cells += [f"{level[f'{way}/{metric}']:.3g}" for metric in ("tokens_per_second", "tokens_per_second_per_user")]
    cells += [percentiles("time_to_first_token_ms", 1e-3), percentiles("time_per_output_token_ms")]
    cells += [percentiles("inter_chunk_latency_ms"), percentiles("request_latency_ms", 1e-3)]
    is_plain = way == "autoregressive"
    return [*cells, "" if is_plain else f"{level['speedup']:.2f} ({level['speedup_duration']:.2f} in all)"]


def main() -> None:
    """Measure the levels and write the page and its picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two small levels; write nothing")
    quick = parser.parse_args().quick
    levels, result, config = measure(QUICK if quick else LOAD)
    written = page(levels, result, config)
    if quick:
        print(written)
        return
    (RESULTS / "serving-cpu.md").write_text(written)
    draw(levels, RESULTS / "serving-cpu.png")


PAGE = """# Concurrent users on a CPU

In tokens/s over a whole level of load, speculation {verdict}. Tokens equal to the autoregressive ones: {lossless}.

{provenance}, attention by {attention}, fp32, greedy. The bundled target, speculating over a streaming cache of {budget}
entries with gamma {gamma}. Closed loop: each user sends the next request when the last one is answered. 48 requests,
the same at each level and for both ways, with prompts of 1,024, 2,048 and 4,096 tokens of source code, prefilled in
chunks of {chunk:,}, and 128 new tokens each; as many slots as users. Latencies are p50 / p90 / p99; ITL is the time
from one chunk of new tokens to the next, and a round of speculation yields several at once. `speedup` is the median
over requests of the ratio of TPOTs, next to it that of the whole level's duration, prefill included. The machine is a
shared one, and a level is measured one way after the other: what neighbours do is in the ratios, too.

![Throughput and latencies against the number of users](serving-cpu.png)

{levels}
At the last level {rate:.0%} of proposals were accepted, {length:.2f} tokens a round. Peak memory {memory:.2f} GiB.

What chunks change, and how they are chosen: [../serving.md](../serving.md).
"""


if __name__ == "__main__":
    main()
