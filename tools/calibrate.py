"""Calibrate the cost model on a machine of one's own, from a run of scenario=profile.

    python launch.py scenario=profile target=llama-3.1-8b target.weights=random hardware=h200 ...
    python tools/calibrate.py runs/RUN_ID > my-hardware.yaml

The file can be committed and shared: as magicdec/costmodel/calibrated/NAME.yaml it serves every prediction for that
device, and its `efficiency` section can be copied into a file of conf/hardware.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from calibration import calibrate, to_yaml

from magicdec.architectures import ModelConfig
from magicdec.config.schema import Efficiency
from magicdec.costmodel.hardware import configured
from magicdec.costmodel.roofline import BF16
from magicdec.costmodel.tables import Row
from magicdec.costmodel.targets import from_values
from magicdec.errors import UserError

ELEMENT_BYTES = {"float32": 4.0, "bfloat16": BF16, "float16": 2.0}


def calibrated(folder: Path) -> str:
    """Return the YAML of the machine that a run of scenario=profile was measured on."""
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text())
        history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: not a finished run of scenario=profile ({error})") from None
    if config["scenario"]["name"] != "profile" or not history:
        raise UserError(f"{folder}: not a finished run of scenario=profile")
    hardware, draft = config["hardware"], config["draft"]
    models = {choice["name"]: _architecture(choice) for choice in (config["target"], draft.get("model")) if choice}
    machine = configured(
        hardware["name"],
        hardware["tensor_parallel"],
        hardware["bandwidth_gbs"],
        hardware["tflops"],
        hardware["memory_gib"],
        Efficiency(),
    )
    calibration = calibrate(profile_rows(config, history), models.__getitem__, {machine.name: machine})
    provenance = [
        f"{machine.name}, from run {folder.name}: {config['target']['name']}, {calibration.num_rows} points,",
        f"root mean square error of a time {calibration.residual:.1%}. Written by tools/calibrate.py.",
    ]
    return to_yaml(calibration.machines[machine.name], provenance)


def profile_rows(config: Mapping[str, Any], history: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Return a row for every point of a run of scenario=profile, from its parsed config.yaml and history.jsonl.

    A profile accepts no proposals, so a round counts as one token (omega 1). Raise UserError for a draft that a row
    cannot describe.
    """
    draft, cache = config["draft"], config["cache"]
    if draft["name"] not in ("self", "model") or draft["quantization"] != "none":
        raise UserError(
            f"draft={draft['name']} with draft.quantization={draft['quantization']}: a calibration needs draft=self or "
            "draft=model, unquantized"
        )
    return [
        Row(
            target=config["target"]["name"],
            draft=draft["model"]["name"] if draft["name"] == "model" else draft["name"],
            policy=cache["policy"],
            hardware=config["hardware"]["name"],
            context_len=point["context_len"],
            batch_size=point["batch_size"],
            gamma=point["gamma"],
            table="profile",
            kv_budget=cache["budget"],
            draft_ms=point["gamma"] * point["time/draft_ms"],
            verify_ms=point["time/verify_ms"],
            omega=1.0,
            autoregressive_ms=point["time/target_decode_ms"],
            speculative_ms=point["time/round_ms"],
            element_bytes=ELEMENT_BYTES[config["hardware"]["dtype"]],
        )
        for point in history
    ]


def _architecture(choice: dict) -> ModelConfig:
    if not choice.get("architecture"):
        raise UserError(f"target={choice['name']} has no architecture in its configuration; take one that names it")
    return from_values(choice["architecture"])


def main() -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a run of scenario=profile")
    try:
        print(calibrated(parser.parse_args().run), end="")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
