"""Predictions kernel by kernel: the bytes are those of the cost model, and little is added to
them.
"""

from types import ModuleType

import pytest

from magicdec.cache.streaming import Streaming
from magicdec.costmodel.hardware import hardware_named
from magicdec.costmodel.round import Setup, round_times
from magicdec.drafts.self import SelfSpeculation
from tests.gpu_rehearsal.fake import LLAMA_8B
from tests.programs import ROOT


@pytest.fixture
def gpu_static(monkeypatch) -> ModuleType:
    """The benchmark, imported as where it is run."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import gpu_static

    return gpu_static


@pytest.mark.slow
def test_the_bytes_are_the_cost_models(gpu_static):
    hardware = hardware_named("H200", stack="magicdec")
    kernels = gpu_static.kernels(hardware, 24)
    moving = sum(kernel.seconds(hardware) for kernel in kernels)
    cache = Streaming(budget=gpu_static.BUDGET, num_sink=4)
    model = round_times(
        Setup(LLAMA_8B, hardware, 24, gpu_static.CONTEXT, SelfSpeculation(), cache),
        gpu_static.GAMMA,
    )
    steps = [*[model.draft] * gpu_static.GAMMA, model.verify]
    assert moving == pytest.approx(sum(step.total - step.overhead for step in steps), rel=0.02)
    assert len(kernels) * gpu_static.LAUNCH_S <= 0.08 * moving


def test_a_norm_of_few_rows_is_limited_by_its_programs(gpu_static):
    hardware = hardware_named("H100", stack="magicdec")
    one, many = (next(gpu_static._layer("propose", LLAMA_8B, rows)) for rows in (1, 132))
    assert one.seconds(hardware) == pytest.approx(one.num_bytes / gpu_static.PROGRAM_BANDWIDTH)
    assert many.seconds(hardware) == pytest.approx(many.num_bytes / hardware.bandwidth)


def test_the_page_says_that_nothing_is_measured():
    title = (ROOT / "docs/predictions/gpu.md").read_text().splitlines()[0]
    assert "Predicted, not measured" in title
