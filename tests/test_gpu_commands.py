"""Documented commands for GPUs: what they take fits the GPU that they name, and gated weights are
not needed to try.
"""

import re

import pytest
import torch

from magicdec.config.folders import option_file
from magicdec.config.load import compose
from magicdec.costmodel.hardware import parse_name
from magicdec.planning import fits
from magicdec.planning.resolve import resolve
from tests.test_docs import COMMANDS, FIRST
from tools.check_docs import Command, jobs

NAMES_ONE = re.compile(r"\bhardware=\d*x?[a-z]+\d|\bexperiment=(llama|study)")
# A search, and a table of predictions, also show what does not fit.
SURVEYS = re.compile(r"scenario=plan|-m .*(scenario=predict|experiment=paper|sweeps=hardware)")
OTHERS = re.compile(r"\bengine=(?!native)")  # engines that look after their own memory
# The tools around them take what fits.
RUNS = [c for c in COMMANDS if c.kind not in ("skip", "parse")]
ON_GPUS = [
    c
    for c in RUNS
    if NAMES_ONE.search(c.text) and not (SURVEYS.search(c.text) or OTHERS.search(c.text))
]
SHARE = 0.95  # of the memory in the datasheet, which has to hold kernels and graphs, too
# What has its weights, or needs none.
NEEDS_OWN = re.compile(r"target\.path=|weights=random|scenario=predict")
NO_WEIGHTS = ["target.weights=random", "data=random", "draft.synthetic_acceptance=0.8"]


@pytest.fixture
def cuda(monkeypatch) -> None:
    """Eight H100s that are not there, for plans and estimates."""
    pytest.importorskip("triton")
    from magicdec.attention.cuda import triton_grid

    answers = {
        "is_available": True,
        "device_count": 8,
        "get_device_name": "H100",
        "get_device_capability": (9, 0),
    }
    answers["mem_get_info"] = (80 << 30, 80 << 30)
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(triton_grid, "gpu", lambda: triton_grid.NO_GPU)


def without_weights(job: list[str]) -> list[str]:
    """The same run, of random weights and prompts."""
    kept = [
        key
        for key in job
        if not re.match(r"(target\.|draft\.model\.)?(path|weights)=|data[.=]", key)
    ]
    more = ["draft.model.weights=random"] if re.search("draft=model|study/", " ".join(job)) else []
    return [*kept, *NO_WEIGHTS, *more]


@pytest.mark.parametrize(
    "command",
    [pytest.param(c, id=c.text, marks=() if c in FIRST else pytest.mark.slow) for c in ON_GPUS],
)
def test_it_fits_the_gpu_that_it_names(command, cuda):
    """By the estimate that a run is refused by, or the predicted one; of a grid, the last job,
    which is the largest.
    """
    job = jobs(command.arguments)[-1]
    plan = resolve(compose(job if "scenario=predict" in job else without_weights(job)))
    needed = fits.num_bytes(plan)
    _, device = parse_name(plan.config.hardware.name)
    print(f"{needed / device.memory:.0%} of the memory of {device.name}")
    assert needed < SHARE * device.memory


def is_gated(command: Command) -> bool:
    """Return whether the hub asks for a login before it hands out the weights that a run reads."""
    experiments = [
        option_file("experiment", name) for name in re.findall(r"experiment=(\S+)", command.text)
    ]
    texts = [command.text, *(file.read_text(encoding="utf-8") for file in experiments if file)]
    targets = [
        name for text in texts for name in re.findall(r"target(?:@draft\.model)?[=:] ?(\S+)", text)
    ]
    files = [option_file("target", name) for name in targets]
    return any("gated" in file.read_text(encoding="utf-8") for file in files if file)


@pytest.mark.parametrize(
    "command",
    [c for c in ON_GPUS if is_gated(c) and not NEEDS_OWN.search(c.text)],
    ids=lambda command: command.text,
)
def test_the_next_command_needs_no_gated_weights(command):
    following = COMMANDS[COMMANDS.index(command) + 1]
    same = {*command.text.split()} & {*following.text.split()}
    assert (following.page, NO_WEIGHTS[0] in following.text) == (command.page, True)
    assert {
        word for word in command.text.split() if re.match("target|hardware|experiment", word)
    } <= same
