"""Matmuls by codes, as a draft with quantized weights does them on a GPU: counted and compiled."""

import pytest
import torch

pytest.importorskip("torchao")
pytest.importorskip("triton", reason="needs Triton (Linux only)")

from magicdec.config.choices import CODE_ROWS
from magicdec.models import code_matmul, quantize
from tests.gpu_rehearsal.compile import GPUS, compiled
from tests.gpu_rehearsal.fake import fake_cuda
from tests.gpu_rehearsal.sass import cycles, loops


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize(
    ("rows", "outputs", "capabilities"),
    [(24, 6144, (90,)), pytest.param(CODE_ROWS, 28672, (80, 90, 100, 120), marks=pytest.mark.slow)],
)
def test_compiled(name, rows, outputs, capabilities):
    """No weight is written out: what is read is codes and scales. Tensor cores multiply, nothing is
    spilled.
    """
    with fake_cuda() as recording:
        linear = torch.nn.Linear(4096, outputs, bias=False, dtype=torch.bfloat16, device="cuda")
        layer = quantize.coded(linear, name)
        x = torch.empty(rows, 1, 4096, dtype=torch.bfloat16, device="cuda")
        with recording.of() as seen:
            layer(x)
        assert [op.name for op in seen.ops] == ["magicdec::code_matmul"]
        with recording.of() as seen:
            code_matmul.launch(x, layer.codes, layer.scales, layer.bits)
    assert [launch.name for launch in seen.launches] == ["multiply_codes"]
    held = sum(parameter.nbytes for parameter in layer.parameters())
    assert held == 4096 * outputs * (int(name[3:]) / 8 + 2 / quantize.CODE_GROUP)
    for capability in capabilities:
        made = compiled(seen.launches[0], capability)
        assert made.spilled == 0
        assert made.shared <= GPUS[capability].program_shared
        assert "mma" in made.ptx


@pytest.mark.parametrize("outputs", [6144, 28672])
@pytest.mark.parametrize("rows", [14, 24])
def test_instructions_for_four_bits_take_less_than_half_of_the_time_of_full_weights(outputs, rows):
    """At most 200 cycles for 4,096 weights on an H200, which reads them in bf16 in 451."""
    with fake_cuda() as recording, recording.of() as seen:
        x = torch.empty(rows, 4096, dtype=torch.bfloat16, device="cuda")
        codes = torch.empty(outputs, 2048, dtype=torch.uint8, device="cuda")
        scales = torch.empty(outputs, 128, dtype=torch.bfloat16, device="cuda")
        code_matmul.launch(x, codes, scales, 4)
    (launch,) = seen.launches
    made = compiled(launch, 90)
    turn = max(loops(made)[1:], key=lambda loop: loop["HMMA"])
    weights = launch.arguments["BLOCK_N"] * 2 * launch.arguments["GROUP"]
    assert made.spilled == 0
    assert cycles(made, [turn]) * 4096 / weights <= 200
