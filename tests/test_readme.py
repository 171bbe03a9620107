"""Every command of the README, run as it stands but for small sizes and folders made here."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from magicdec.tracking.report.__main__ import main
from tests.programs import ROOT, python

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line.strip().replace("\\\n", " ") for line in re.findall(r"^    ((?:.*\\\n)*.*)$", README, flags=re.MULTILINE)
]
LAUNCHES = [c for c in COMMANDS if c.startswith("python launch.py")]
# Small enough for a test; what a command is about is left alone.
SMALL = ["batch.size=2", "batch.context_len=320", "batch.generate_len=8", "scenario.repeats=1", "wandb.mode=offline"]
# What the end of a command must say, by a word of it; the first that fits counts.
SAYS = {
    "scenario=predict": (
        r"is predicted to run at [1-9]\.\d\dx with gamma \d+: .* S\* is [\d,]+ \(alpha 0\.\d\d: ",
        r" memory per GPU: [\d.]+ of 80 GiB ",
    ),
    "scenario=plan": (r"plans .* 64 +self +streaming +512 +\d+ +[\d,]+ +[\d.]+ +[1-9]\.\d\d 64 +none .* 1\.00 ",),
    "": (
        r" autoregressive +speculative ",
        r" speedup +\d+\.\d\dx ",
        r" acceptance rate +[\d.]+% of proposals",
        r" lossless +yes,",
    ),
}


def launch(arguments: list[str], runs: Path) -> subprocess.CompletedProcess:
    arguments = sorted([*arguments, f"runs_dir={runs}"], key=lambda a: not a.startswith("-"))  # flags come first
    return python("launch.py", *arguments)


def test_the_readme_shows_its_commands():
    assert "pip install -e . && python launch.py" in COMMANDS
    assert "pip install -e '.[test]' && python -m pytest" in COMMANDS
    assert len(LAUNCHES) >= 8


@pytest.mark.parametrize("command", [c for c in LAUNCHES if "FOLDER" not in c])
def test_launch_commands(command, tmp_path, capsys):
    """They run, and say what one runs them for; then the report shows the run."""
    arguments = shlex.split(command)[2:]
    small = [s for s in SMALL if not any(a.startswith(s.partition("=")[0] + "=") for a in arguments)]
    if "+sweeps=gamma_x_budget" in arguments:  # twelve runs: composed, not run
        arguments[arguments.index("-m")] = "--cfg=job"
    done = launch(arguments + small, tmp_path)
    assert done.returncode == 0, done.stderr
    if "--cfg=job" in arguments:
        return
    results = [json.loads(path.read_text()) for path in tmp_path.glob("*/result.json")]
    assert results
    assert all(r["status"] == "done" and r.get("lossless/identical", True) for r in results)
    said = " ".join(done.stdout.split())
    for pattern in next(patterns for words, patterns in SAYS.items() if words in command):
        assert re.search(pattern, said), (pattern, done.stdout)
    assert " ? " not in said
    if "python -m magicdec.tracking.report runs" in COMMANDS:
        assert main([str(tmp_path)]) == 0
        assert results[0]["id"] in capsys.readouterr().out


@pytest.mark.parametrize("command", [c for c in LAUNCHES if "FOLDER" in c])
def test_commands_with_a_folder_compose_and_ask_for_it(command, tmp_path):
    """Real checkpoints are not here: the error is the one line that names what is missing."""
    done = launch([*shlex.split(command.replace("FOLDER", str(tmp_path / "nowhere")))[2:], "hardware=cpu"], tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
