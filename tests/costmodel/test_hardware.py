from dataclasses import replace

import pytest
import yaml

from magicdec.config.folders import CONF
from magicdec.costmodel import hardware
from magicdec.errors import UserError
from magicdec.inputs.rules import parse


@pytest.mark.parametrize(
    ("name", "count", "device"),
    [("8xA100", 8, "A100"), ("4xl40", 4, "L40"), ("h200", 1, "H200"), ("1xH100", 1, "H100")],
)
def test_names_are_counts_and_devices(name, count, device):
    machine = hardware.hardware_named(name)
    assert (machine.count, machine.device.name) == (count, device)


@pytest.mark.parametrize("name", ["8xB300", "0xA100", "xA100", "", "eightA100"])
def test_unknown_hardware_is_named_with_what_is_valid(name):
    with pytest.raises(
        UserError, match=f"hardware={name} is not known.*a100_pcie.*h100, h100_pcie.*h200_nvl, l40"
    ):
        hardware.hardware_named(name)


def test_a_calibrated_device_in_another_count_keeps_its_calibration_and_another_stack_may_be_named():  # noqa: E501
    assert (
        hardware.hardware_named("2xA100").efficiency == hardware.hardware_named("8xA100").efficiency
    )
    assert hardware.hardware_named("2xA100").note == "calibrated on 8xA100"
    assert hardware.hardware_named("8xA100").stack.name == "reference-2024-08"
    assert hardware.hardware_named("8xA100", stack="magicdec").stack.name == "magicdec"


def test_an_uncalibrated_device_takes_its_datasheet_and_the_nearest_fractions():
    l40, a100 = hardware.hardware_named("8xL40"), hardware.hardware_named("8xA100")
    assert l40.device.bandwidth == 864e9
    assert l40.efficiency.bandwidth_fraction == a100.efficiency.bandwidth_fraction
    # It has no NVLink, so its all-reduces are not the A100's.
    assert (
        l40.efficiency.allreduce_hop_us == l40.device.link.hop_us > a100.efficiency.allreduce_hop_us
    )
    assert l40.efficiency.allreduce_bandwidth_fraction == l40.device.link.fraction
    assert "no calibration for L40" in l40.note
    nvl, h100 = hardware.hardware_named("h100_nvl"), hardware.hardware_named("h100")
    assert nvl.efficiency.matmul_fraction == h100.efficiency.matmul_fraction


def test_a_gpu_without_a_datasheet_here_has_tiles_as_others_have():
    """A matmul of few rows leaves them half empty; a CPU's kernels have none."""
    b200 = hardware.configured("b200", bandwidth_gbs=8000, tflops=2250)
    assert (
        b200.efficiency.matmul_half_rows
        == hardware.hardware_named("h100").efficiency.matmul_half_rows
        > 0
    )
    assert not b200.is_cpu


FRACTIONS = ("bandwidth_fraction", "matmul_fraction", "allreduce_bandwidth_fraction")
WRONG = [(field, value) for field in FRACTIONS for value in (0.0, 1.01, -0.5, float("nan"))]


@pytest.mark.parametrize(("field", "value"), [*WRONG, ("layer_overhead_us", -1)])
def test_fractions_are_fractions_and_overheads_not_negative(field, value):
    with pytest.raises(UserError, match=f"efficiency.{field}={value}"):
        parse(hardware.Efficiency, {field: value}, "efficiency")


def test_matmuls_saturate(ideal):
    machine = ideal(matmul_fraction=0.5, matmul_half_rows=16)
    assert machine.matmul_rate(16) == pytest.approx(0.25 * 989e12)
    assert machine.matmul_rate(1e9) == pytest.approx(0.5 * 989e12)


def test_all_reduce_moves_2n_minus_2_nths_in_log2_hops(ideal):
    machine = ideal(8, allreduce_hop_us=5.0)
    assert machine.allreduce_time(1e6, 1) == 0.0
    assert machine.allreduce_time(0, 8) == pytest.approx(15e-6)
    assert machine.allreduce_time(1e9, 8) - 15e-6 == pytest.approx(1.75e9 / 450e9)
    slower = replace(machine, efficiency=hardware.Efficiency(allreduce_bandwidth_fraction=0.1))
    assert slower.allreduce_time(1e9, 8) > machine.allreduce_time(1e9, 8)


NAMED = {
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H100 NVL": "H100 NVL",
}
NAMED |= {
    "NVIDIA H200": "H200",
    "NVIDIA H200 NVL": "H200 NVL",
    "NVIDIA L40": "L40",
    "NVIDIA L40S": "L40S",
}
NAMED |= {"NVIDIA A100-SXM4-80GB": "A100", "NVIDIA A100-SXM4-40GB": "A100 40GB"}
NAMED |= {"NVIDIA A100 80GB PCIe": "A100 PCIe", "A100-PCIE-40GB": "A100 PCIe 40GB"}
OTHERS = ["NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GH200 480GB", "NVIDIA A10"]
OTHERS += ["AMD EPYC 9A100", "AMD EPYC 9554 64-Core Processor"]


@pytest.mark.parametrize(("text", "name"), (NAMED | dict.fromkeys(OTHERS)).items())
def test_devices_are_found_in_what_drivers_call_them(text, name):
    found = hardware.device_in(text)
    assert (found and found.name) == name


def test_the_h200_is_calibrated_on_this_software():
    machine = hardware.hardware_named("h200")
    assert (machine.stack.name, machine.note) == ("magicdec", "calibrated on h200")


def test_a_card_is_predicted_with_its_own_link():
    for name, link in (
        ("2xh100_pcie", hardware.PCIE5),
        ("2xa100_pcie", hardware.PCIE4),
        ("2xh100", hardware.NVLINK4),
    ):
        machine = hardware.hardware_named(name)
        assert (machine.device.link, machine.efficiency.allreduce_hop_us) == (link, link.hop_us)


def test_a_hardware_group_gives_its_own_figures():
    assert hardware.configured("8xa100", 4).count == 4
    assert hardware.configured("8xa100", 8, 2039, 312, 80) == hardware.hardware_named("8xa100")
    slower = hardware.configured("l40", 1, bandwidth_gbs=800)
    assert (slower.device.bandwidth, slower.device.flops) == (800e9, 181e12)
    assert "no calibration for L40" in slower.note


@pytest.mark.parametrize("path", sorted(CONF.glob("hardware/*.yaml")), ids=lambda path: path.stem)
def test_the_groups_figures_are_the_datasheets(path):
    given = yaml.safe_load(path.read_text())
    if given.get("bandwidth_gbs") is None:  # a CPU, or several of one that has its own
        return
    own = hardware.configured(
        path.stem, 1, given["bandwidth_gbs"], given["tflops"], given["memory_gib"]
    )
    assert own.device == hardware.parse_name(path.stem)[1]


def test_a_device_without_a_datasheet_needs_its_figures():
    cpu = hardware.configured("cpu", bandwidth_gbs=60, tflops=0.5, memory_gib=16)
    assert cpu.device.memory == 16 * hardware.GIB
    with pytest.raises(
        UserError, match=r"hardware\.tflops=null: predicting for hardware=cpu"
    ) as error:
        hardware.configured("cpu", bandwidth_gbs=60)
    offered = str(error.value).partition("one of ")[2].split(", ")
    assert (
        {"a100", "8xh100", "l40"}
        <= set(offered)
        <= {path.stem for path in CONF.glob("hardware/*.yaml")}
    )
    assert all(hardware.configured(name) for name in offered)


@pytest.mark.parametrize("stack", ["vllm", "sglang"])
def test_engines_whose_matmuls_are_of_gpus_are_not_predicted_on_a_cpu(stack):
    message = f"scenario.stack={stack}: .* choose one of magicdec, .*llama.cpp, mlx, or null"
    with pytest.raises(UserError, match=message):
        hardware.configured("cpu", bandwidth_gbs=30, tflops=0.15, stack=stack)


def test_any_cpu_takes_the_calibration_for_cpus_and_no_gpu_does(tmp_path, monkeypatch):
    for file in hardware.CALIBRATED.glob("*x*.yaml"):
        (tmp_path / file.name).write_text(file.read_text())
    (tmp_path / "cpu.yaml").write_text(
        "hardware: cpu\nstack: magicdec\nefficiency: {overlap: 0.25}\n"
    )
    monkeypatch.setattr(hardware, "CALIBRATED", tmp_path)
    hardware._calibrations.cache_clear()
    try:
        cpu = hardware.configured("cpu", bandwidth_gbs=60, tflops=0.5)
        gpu = hardware.configured("rtx9", 1, 1000, 100)
    finally:
        hardware._calibrations.cache_clear()
    assert (cpu.efficiency.overlap, cpu.note) == (0.25, "calibrated on cpu")
    assert gpu.efficiency.overlap == 1.0
    assert "no calibration for rtx9" in gpu.note


def test_a_calibration_in_the_configuration_is_taken_and_describes_this_software():
    own = hardware.configured("h200", efficiency=hardware.Efficiency(layer_overhead_us=20.0))
    assert own.efficiency.layer_overhead_us == 20.0
    assert own.stack.name == "magicdec"
    with pytest.raises(UserError, match="stack=tgi"):
        hardware.configured("h200", stack="tgi")
