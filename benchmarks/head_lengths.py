"""Write magicdec/costmodel/published/head_lengths.csv: acceptance lengths of published heads,
by task and gamma, from the data of SpecBundle.

    git clone https://github.com/sgl-project/SpecForge CHECKOUT   # MIT
    python benchmarks/head_lengths.py CHECKOUT

Chains alone: what `topk` proposes as a tree is left out. Engines measured them at temperature 0.
"""

import argparse
import json
import re
import subprocess
from collections.abc import Iterator

from page import ROOT
from render import Row, write_csv

COMMIT = "a6b6b0230009d15ec2a97a57384e6f53f0f96946"
DATA = "docs/spec_bundle/public/raw_data/data.json"
OUT = ROOT / "magicdec/costmodel/published/head_lengths.csv"


def lengths(checkout: str) -> Iterator[Row]:
    """Yield an acceptance length for each head, task and gamma."""
    show = ["git", "-C", checkout, "show", f"{COMMIT}:{DATA}"]
    for target, tasks in json.loads(subprocess.check_output(show)).items():
        for task, measured in tasks.items():
            for result in measured["results"]:
                for metric in result["metrics"]:
                    if result["topk"] != 1 or "/" not in metric["Name"]:
                        continue
                    yield {
                        "name": slug(metric["Name"]),
                        "target": target,
                        "head": metric["Name"],
                        "task": task,
                        "gamma": result["steps"],
                        "length": round(metric["accept_length"], 3),
                        "source": f"SpecBundle (sgl-project/SpecForge at {COMMIT[:7]}, {DATA})",
                        "licence": "MIT",
                        "date": "2025-12-23",
                    }


def slug(head: str) -> str:
    """Return the name of a head without its owner, as it is typed."""
    return re.sub(r"[^a-z0-9.]+", "-", head.rpartition("/")[2].strip().lower())


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("checkout", help="of SpecForge, or its git directory")
    rows = sorted(
        lengths(parser.parse_args().checkout),
        key=lambda row: (row["name"], row["task"], row["gamma"]),
    )
    write_csv(OUT, rows)


if __name__ == "__main__":
    main()
