"""Write magicdec/costmodel/published/head_lengths.csv: acceptance lengths of published drafts, by
task and gamma, from the data of SpecBundle and InferenceX, and from what is cited in
cited_lengths.yaml.

    git clone https://github.com/sgl-project/SpecForge SPECFORGE             # MIT
    git clone https://github.com/SemiAnalysisAI/InferenceX INFERENCEX        # Apache-2.0
    python benchmarks/head_lengths.py SPECFORGE INFERENCEX

Chains and blocks alone: what `topk` proposes as a tree is left out. Engines measured SpecBundle's
at temperature 0, and InferenceX's with each model's own sampling.
"""

import argparse
import json
import re
import subprocess
from collections.abc import Iterator

import yaml
from page import ROOT
from render import Row, write_csv

COMMIT = "a6b6b0230009d15ec2a97a57384e6f53f0f96946"
DATA = "docs/spec_bundle/public/raw_data/data.json"
CURVES_COMMIT = "843c6254ff69b567f772f6a5fd97675af3d04431"
CURVES = "golden_al_distribution"
MODULES, HEADS = ("dsv4_mtp", "glm5.2_mtp", "qwen3.5_mtp"), ("kimik2.5_eagle3", "minimaxm3_eagle3")
CITED = ROOT / "benchmarks/cited_lengths.yaml"
OUT = ROOT / "magicdec/costmodel/published/head_lengths.csv"
COLUMNS = (
    "name",
    "draft",
    "target",
    "head",
    "task",
    "gamma",
    "length",
    "source",
    "licence",
    "date",
)


def spec_bundle(checkout: str) -> Iterator[Row]:
    """Yield an acceptance length for each head, task and gamma of SpecBundle."""
    for target, tasks in json.loads(shown(checkout, COMMIT, DATA)).items():
        for task, measured in tasks.items():
            for result in measured["results"]:
                for metric in result["metrics"]:
                    if result["topk"] != 1 or "/" not in metric["Name"]:
                        continue
                    yield {
                        "name": slug(metric["Name"]),
                        "draft": "eagle3",
                        "target": target,
                        "head": metric["Name"],
                        "task": task,
                        "gamma": result["steps"],
                        "length": round(metric["accept_length"], 3),
                        "source": f"SpecBundle (sgl-project/SpecForge at {COMMIT[:7]}, {DATA})",
                        "licence": "MIT",
                        "date": "2025-12-23",
                    }


def inference_x(checkout: str) -> Iterator[Row]:
    """Yield an acceptance length for each draft of InferenceX, with and without thinking, and
    gamma.
    """
    for name in (*MODULES, *HEADS):
        draft = name.rpartition("_")[2]
        path = f"{CURVES}/{name}.yaml"
        for target, modes in yaml.safe_load(shown(checkout, CURVES_COMMIT, path)).items():
            for mode, lengths in modes.items():
                for gamma, length in lengths.items():
                    source = f"SemiAnalysisAI/InferenceX at {CURVES_COMMIT[:7]}, {path}"
                    yield {
                        "name": f"{target}-{draft}",
                        "draft": draft,
                        "target": target,
                        "head": f"{draft} of {target}",
                        "task": f"speed-bench-coding-{mode.replace('_', '-')}",
                        "gamma": gamma,
                        "length": length,
                        "source": f"{source}, vLLM on a B300",
                        "licence": "Apache-2.0",
                        "date": "2026-08-21",
                    }


def cited() -> Iterator[Row]:
    """Yield the acceptance lengths that are cited one by one."""
    for draft in yaml.safe_load(CITED.read_text()):
        lengths = draft.pop("lengths")
        for gamma, tasks in lengths.items():
            for task, length in tasks.items():
                yield draft | {"task": task, "gamma": gamma, "length": length}


def shown(checkout: str, commit: str, path: str) -> str:
    """Return a file of a commit."""
    show = ["git", "-C", checkout, "show", f"{commit}:{path}"]
    return subprocess.check_output(show, text=True)


def slug(head: str) -> str:
    """Return the name of a head without its owner, as it is typed."""
    return re.sub(r"[^a-z0-9.]+", "-", head.rpartition("/")[2].strip().lower())


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("specforge", help="checkout of SpecForge, or its git directory")
    parser.add_argument("inferencex", help="checkout of InferenceX, or its git directory")
    args = parser.parse_args()
    rows = [*spec_bundle(args.specforge), *inference_x(args.inferencex), *cited()]
    rows.sort(key=lambda row: (row["name"], row["task"], row["gamma"]))
    write_csv(OUT, [{name: row[name] for name in COLUMNS} for row in rows])


if __name__ == "__main__":
    main()
