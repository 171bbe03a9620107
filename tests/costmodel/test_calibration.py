import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from magicdec.calibrate.steps import profile_rows
from magicdec.config.registry import POLICIES
from magicdec.costmodel import hardware
from magicdec.costmodel.calibration import calibrate, errors_of, to_yaml, uncalibrated
from magicdec.costmodel.hardware import hardware_named
from magicdec.costmodel.round import Setup, round_times
from magicdec.costmodel.tables import Row
from magicdec.errors import UserError

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tools"), str(ROOT / "benchmarks")]
from costmodel_scores import compare, cross_validate, score  # noqa: E402

pytest.importorskip("scipy")
MACHINES = {name: uncalibrated(name, "magicdec") for name in ("8xH100", "1xH200")}


def profiled(model, machine, **changes):
    """Rows as a machine with known efficiencies would give them."""
    grid = [(b, s, g) for b in (16, 64, 256) for s in (4000, 32_000) for g in (1, 4)]
    rows = []
    for batch, context, gamma in grid:
        row = Row(
            "llama-3.1-8b",
            "self",
            "streaming",
            machine.name,
            context,
            batch,
            gamma,
            kv_budget=512,
            omega=2.0,
        )
        times = round_times(row.setup(model).at(hardware=machine), gamma)
        steps = {
            "autoregressive": times.target.total,
            "draft": gamma * times.draft.total,
            "verify": times.verify.total,
        }
        steps |= {"speculative": times.round_s / 2.0}
        rows.append(
            replace(
                row, **{f"{name}_ms": 1e3 * seconds for name, seconds in steps.items()} | changes
            )
        )
    return rows


TRUTH = {
    "bandwidth_fraction": 0.85,
    "matmul_fraction": 0.66,
    "matmul_half_rows": 16.0,
    "layer_overhead_us": 80.0,
}
TRUTH |= {
    "round_overhead_us": 1200.0,
    "allreduce_hop_us": 5.0,
    "allreduce_bandwidth_fraction": 0.35,
}


@pytest.fixture
def machine(ideal):
    return lambda count, device: ideal(count, device, **TRUTH)


def test_a_known_machine_is_recovered(model, machine):
    calibration = calibrate(profiled(model, machine(8, "H100")), model, MACHINES)
    truth = vars(machine(8, "H100").efficiency)
    for key, value in vars(calibration.machines["8xH100"].efficiency).items():
        assert value == pytest.approx(truth[key], rel=0.1), key  # priors still pull
    assert calibration.residual < 0.01


def test_machines_share_what_belongs_to_kernels(model, machine):
    slow = machine(1, "H200")
    slow = replace(slow, efficiency=replace(slow.efficiency, layer_overhead_us=300.0))
    rows = profiled(model, machine(8, "H100")) + profiled(model, slow)
    found = calibrate(rows, model, MACHINES).machines
    assert found["8xH100"].efficiency.matmul_fraction == found["1xH200"].efficiency.matmul_fraction
    assert found["1xH200"].efficiency.layer_overhead_us == pytest.approx(300, rel=0.05)
    assert found["8xH100"].efficiency.layer_overhead_us == pytest.approx(80, rel=0.1)


def test_what_rows_do_not_show_stays_at_its_prior(model, machine):
    # One GPU never communicates, and no round was timed.
    rows = profiled(model, machine(1, "H200"), speculative_ms=None)
    efficiency = calibrate(rows, model, MACHINES).machines["1xH200"].efficiency
    assert efficiency.allreduce_bandwidth_fraction == pytest.approx(0.25)
    assert efficiency.round_overhead_us == pytest.approx(700)


def test_an_outlier_does_not_decide(model, machine):
    rows = profiled(model, machine(8, "H100"))
    rows[3] = replace(rows[3], draft_ms=5 * rows[3].draft_ms)
    efficiency = calibrate(rows, model, MACHINES).machines["8xH100"].efficiency
    assert efficiency.bandwidth_fraction == pytest.approx(0.85, rel=0.05)
    assert efficiency.layer_overhead_us == pytest.approx(80, rel=0.1)


def test_rows_without_times_are_refused(model, machine):
    times = dict.fromkeys(("autoregressive_ms", "draft_ms", "verify_ms", "speculative_ms"))
    with pytest.raises(UserError, match="hardware=8xH100 has a time"):
        calibrate(profiled(model, machine(8, "H100"), **times), model, MACHINES)


def test_without_scipy_it_says_what_to_install(model, machine, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(UserError, match="pip install"):
        calibrate(profiled(model, machine(8, "H100")), model, MACHINES)


def test_the_file_it_writes_is_read_back(model, machine):
    text = to_yaml(machine(8, "H100"), ["Where it comes from."])
    assert text.startswith("# Where it comes from.\n")
    content = yaml.safe_load(text)
    assert hardware.Efficiency(**content["efficiency"]) == machine(8, "H100").efficiency
    assert (content["hardware"], content["stack"]) == ("8xH100", "magicdec")


def test_left_out_rows_are_predicted_by_the_others(model, machine):
    rows = profiled(model, machine(8, "H100"))
    rows = [replace(row, speedup=row.autoregressive_ms / row.speculative_ms) for row in rows]
    compared = cross_validate(
        rows, model, lambda known: calibrate(known, model, MACHINES).machines, folds=3
    )
    assert len(compared) == len(rows)
    assert score(compared).p90_error < 0.02


def test_rows_on_the_wrong_side_of_one_are_those_with_a_clear_side(model):
    row = Row(
        "llama-3.1-8b",
        "self",
        "streaming",
        "8xA100",
        4000,
        32,
        2,
        kv_budget=512,
        omega=2.54,
        speedup=1.06,
    )
    assert compare(row, model).wrong_side
    assert not compare(replace(row, speedup=1.05), model).wrong_side
    with pytest.raises(UserError, match="omega"):
        compare(replace(row, omega=None), model)


def test_a_profile_run_becomes_rows(model):
    config = {
        "target": {"name": "llama-3.1-8b"},
        "draft": {"name": "self", "model": None, "quantization": "none"},
    }
    config |= {
        "cache": {"policy": "streaming", "budget": 512},
        "hardware": {"name": "h200", "dtype": "float32"},
    }
    point = {
        "batch_size": 8,
        "context_len": 4096,
        "gamma": 3,
        "time/target_decode_ms": 10.0,
        "time/draft_ms": 4.0,
    }
    point |= {"time/verify_ms": 11.0, "time/round_ms": 23.5}
    (row,) = profile_rows(config, [point])
    assert (row.draft_ms, row.verify_ms, row.autoregressive_ms, row.round_ms) == (
        12.0,
        11.0,
        10.0,
        23.5,
    )
    assert row.setup(model).hardware.device.name == "H200"
    assert (row.setup(model).element_bytes, row.setup(model).weight_bytes) == (4, 4)
    (row,) = profile_rows(config, [point], weight_bytes=2)  # as stored
    assert (row.setup(model).element_bytes, row.setup(model).weight_bytes) == (4, 2)
    for draft in ({"name": "ngram"}, {"quantization": "int8"}):
        with pytest.raises(
            UserError, match="a calibration needs draft=self or draft=model, unquantized"
        ):
            profile_rows(config | {"draft": config["draft"] | draft}, [point])


@pytest.mark.parametrize(
    ("policy", "changes"), [("quest", {"page_size": 64}), ("verify_guided", {"refresh": 4})]
)
def test_a_profile_of_a_policy_is_fitted_as_it_was_timed(model, policy, changes):
    """With the keys of its policy, and a draft step with the selection that the step makes."""
    cache = POLICIES[policy].facts(budget=512, **changes)
    at = Setup(model("llama-3.1-8b"), hardware_named("h200"), 8, 4096, cache=cache)
    times = round_times(at, 3)
    steps = times.steps(cache)
    point = {"batch_size": 8, "context_len": 4096, "gamma": 3}
    point |= {f"time/{name}_ms": 1e3 * step.total for name, step in steps.items()}
    point |= {"time/round_ms": 1e3 * times.round_s}
    config = {
        "target": {"name": "llama-3.1-8b"},
        "draft": {"name": "self", "model": None, "quantization": "none"},
        "cache": asdict(cache),
        "hardware": {"name": "h200", "dtype": "bfloat16"},
    }
    (row,) = profile_rows(config, [point])
    errors = errors_of(at.hardware, row, model)
    assert errors == pytest.approx(dict.fromkeys(("target", "draft", "verify", "round"), 0.0))
