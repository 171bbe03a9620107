"""Calibrate the cost model on a machine of one's own, from a run of scenario=profile.

    python launch.py scenario=profile target=llama-3.1-8b target.weights=random hardware=h200 ...
    python tools/calibrate.py runs/RUN_ID > my-hardware.yaml

The file can be committed and shared: as magicdec/costmodel/calibrated/NAME.yaml it serves every prediction for that
device, and its `efficiency` section can stand in a file of conf/hardware.
"""

import argparse
import json
import sys
from pathlib import Path

import yaml

from magicdec.architectures import Efficiency, ModelConfig
from magicdec.costmodel.calibrate import calibrate, to_yaml
from magicdec.costmodel.hardware import configured
from magicdec.costmodel.tables import profile_rows
from magicdec.costmodel.targets import from_values
from magicdec.errors import UserError


def calibrated(folder: Path) -> str:
    """The YAML of the machine that a run of scenario=profile was measured on."""
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


def _architecture(choice: dict) -> ModelConfig:
    if not choice.get("architecture"):
        raise UserError(f"target={choice['name']} has no architecture in its configuration; take one that names it")
    return from_values(choice["architecture"])


def main() -> int:
    """Run the command line; returns the exit code."""
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
