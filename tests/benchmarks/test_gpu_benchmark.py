"""The benchmark for a GPU: rehearsed on the CPU, and with every fault that a GPU machine has in
store.
"""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import gpu
import gpu_authors
import gpu_bench
import gpu_drafts
import gpu_kernels
import gpu_profile
import gpu_publish
import gpu_store
import pytest
import torch
import yaml
from render import read_csv

from magicdec.cache.streaming import Streaming
from magicdec.config.registry import POLICIES
from magicdec.costmodel.hardware import hardware_named
from magicdec.costmodel.round import Setup, round_times
from magicdec.costmodel.targets import architecture
from magicdec.drafts.self import SelfSpeculation
from magicdec.errors import UserError
from tests.programs import ROOT, Program

POINTS = str(ROOT / "tests/benchmarks/faulty_points.py")


def rehearse(out, *options: str) -> subprocess.CompletedProcess:
    return Program("benchmarks/gpu.py", "--rehearse", "--out", out, *options).finish(timeout=250)


def check(out, done: subprocess.CompletedProcess, *parts: str) -> dict[str, dict]:
    """Measurements in which nothing is missing."""
    assert done.returncode == 0, done.stderr
    found = {part: json.loads((out / f"{part}.json").read_text()) for part in parts}
    points = [point for points in found.values() for point in points.values()]
    assert not [point for point in points if {"skipped", "failed"} & point.keys()]
    return found


@pytest.mark.soak
def test_a_rehearsal_goes_on_where_it_stood(tmp_path):
    first = rehearse(tmp_path, "--parts", "ceilings")
    assert first.returncode == 0, first.stderr
    assert "Not yet measured." in (tmp_path / "page.md").read_text()
    ceilings = (tmp_path / "ceilings.json").read_text()
    parts = (
        "ceilings",
        "cells",
        "policies",
        "profile",
        "variants",
        "prefill",
        "steps",
        "rounds",
        "sampling",
    )
    parts += ("attention",)
    found = check(tmp_path, rehearse(tmp_path, "--parts", ",".join(parts)), *parts)
    assert (tmp_path / "ceilings.json").read_text() == ceilings
    assert all(found[part] for part in parts)
    assert all(point["of_copy"] > 0 for point in found["attention"].values())
    assert all(
        point["round_ms"] > 0 and point["predicted_round_ms"] > 0
        for point in found["steps"].values()
    )
    assert all(
        point["speedup"] > 0 and point["of_formula"] > 0 for point in found["rounds"].values()
    )
    assert all(
        point["sampled_round_ms"] > 0 and point["truncation_ms"] > 0
        for point in found["sampling"].values()
    )
    assert found["cells"]["rows"]["cells"] == [[2, 256]]
    assert [point["policy"] for point in found["profile"].values()] == [
        "streaming",
        *gpu_drafts.PROFILED,
    ]
    for profile in found["profile"].values():
        assert profile["round_ms"] >= profile["rest_ms"] > 0
        assert len(profile["text"].splitlines()) == 2 + gpu_profile.LONGEST
    assert {point["policy"] for point in found["policies"].values()} == {
        *POLICIES,
        *gpu_drafts.DRAFTS,
    }
    assert [point["compiled"] for point in found["variants"].values()] == list(gpu_drafts.COMPILERS)


@pytest.mark.soak
def test_a_rehearsal_runs_programs(tmp_path):
    parts = ("doctor", "correct", "ranks", "serving")
    found = check(tmp_path, rehearse(tmp_path, "--parts", ",".join(parts)), *parts)
    assert all(
        point["identical"] for key, point in found["correct"].items() if key.startswith("lossless")
    )
    assert next(iter(found["ranks"].values()))["speedup"] > 0
    assert next(iter(found["serving"].values()))["lossless/identical"]
    assert "| ok | round |" in (tmp_path / "page.md").read_text()


@pytest.mark.soak
def test_a_rehearsal_runs_the_bundled_pair(tmp_path):
    found = check(tmp_path, rehearse(tmp_path, "--parts", "pair,peers"), "pair", "peers")
    for point in found["pair"].values():
        assert point["lossless/identical"]
        assert point["predicted/speedup"] > 0
    assert len([point for point in found["peers"].values() if "ms" in point]) == 3


@pytest.fixture(autouse=True)
def short_teardown(monkeypatch):
    monkeypatch.setattr(gpu_store, "TEARDOWN_S", 1)


def tried(folder) -> list[str]:
    return (folder / "tried").read_text().split("\n")[:-1]


def test_each_fault_costs_its_point_and_no_other(tmp_path):
    """None is tried again by the next call, unless it is asked to."""
    store = gpu_store.Store(tmp_path, "abc")
    for _ in range(2):
        assert gpu_store.supervise([POINTS, str(tmp_path)], store) == gpu_store.DONE
    found = {
        key: point.get("failed", point.get("skipped", ""))
        for key, point in store.points("x").items()
    }
    assert found == {
        "first": "",
        "killed": "the process ended by SIGKILL",
        "hangs": "no end within 1 s",
        "out of memory": "out of memory (CUDA out of memory. Tried to allocate 2 GiB)",
        "segfault": "the process ended by SIGSEGV",
        "exits": "the process ended with code 7",
        "wrong": "ZeroDivisionError: division by zero",
        "loses the device": "",
        "last": "",
    }
    assert tried(tmp_path) == list(found)
    assert all(point["commit"] == "abc" for point in store.points("x").values())
    store.retry(["x"])
    assert list(store.points("x")) == ["first", "loses the device", "last"]


def test_when_the_time_is_over_the_point_under_way_is_left_to_the_next_call(tmp_path):
    store = gpu_store.Store(tmp_path)
    began = time.time()
    assert (
        gpu_store.supervise([POINTS, str(tmp_path), "hangs", "last"], store, began)
        == gpu_store.OUT_OF_TIME
    )
    assert time.time() - began < 10
    assert (store.points("x"), store.noted()) == ({}, {})


def test_one_file_holds_all_points_and_is_resumed_from(tmp_path):
    store = gpu_store.Store(tmp_path, "abc", tmp_path / "out/gpu.tar")
    store.put("x", "first", {"ms": 1.0})
    store.note(part="x", key="second")
    store.put("y", "only", {"ms": 2.0})
    other = gpu_store.Store(tmp_path / "other")
    other.folder.mkdir()
    other.put("x", "first", {"ms": 3.0})
    other.resume(store.tar)
    assert {part: list(other.points(part)) for part in ("x", "y")} == {
        "x": ["first"],
        "y": ["only"],
    }
    assert other.points("x")["first"]["ms"] == 3.0, "what this folder has measured stays"
    assert other.noted() == {}
    assert gpu._opened(store.tar).points("y")["only"]["ms"] == 2.0


def test_what_is_worth_most_takes_half_an_hour():
    """Three calls of ten minutes; the rest is behind it."""
    names, minutes = list(gpu.PARTS), [part.minutes for part in gpu.PARTS.values()]
    assert sum(minutes[: names.index("attention")]) <= 30
    assert gpu.plan().count("\n") == 1 + len(names)


@pytest.mark.soak
def test_kernels_are_checked_in_the_interpreter():
    pytest.importorskip("triton")
    # Triton is imported anew.
    command = [sys.executable, "benchmarks/gpu_kernels.py", "--check", "--rehearse"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.partition(": ")[0] for line in done.stdout.splitlines()] == list(
        gpu_kernels.KERNELS
    )


def test_a_kernel_that_is_wrong_is_said_to_be(monkeypatch):
    right = torch.arange(6.0)
    layer = gpu_kernels.Layer(torch.device("cpu"), torch.float32)
    versions = {"old": lambda: right, "new": lambda: right + 0.1}
    case = gpu_kernels.Case(
        versions, lambda: right, 1.0, {"slow": lambda: lambda: None, "absent": _absent}
    )
    monkeypatch.setitem(gpu_kernels.KERNELS, "mine", lambda layer: case)
    assert gpu_kernels.checked("mine", layer) == {"failed": "new is off by 0.02"}
    found = gpu_kernels.timed("mine", layer, 1, copy_bandwidth=1e9)
    assert min(found["old_us"], found["new_us"], found["slow_us"], found["of_copy"]) > 0
    assert found["absent_us"] == "No module named 'rival'"


def _absent():
    raise ModuleNotFoundError("No module named 'rival'")


def test_selections_are_compared_as_sets():
    """In any order; -1 is no slot."""
    right = torch.tensor([[3, 1, -1], [0, 2, 5]])
    assert gpu_kernels.missed(torch.tensor([[1, 3, -1], [5, 0, 2]]), right) == 0.0
    assert gpu_kernels.missed(torch.tensor([[1, 4, -1], [5, 0, 2]]), right) == pytest.approx(1 / 5)


def test_the_authors_names_of_flashinfer_are_those_of_today():
    seen = []

    class Wrapper:
        def plan(self, pages, head_dim_qk):
            seen.append((pages, head_dim_qk))

    def append(k, v, batch_indices, positions, cache, indices, indptr, last_len):
        seen.append((batch_indices, positions, indices, last_len))

    library = SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=Wrapper,
        append_paged_kv_cache=append,
        get_seq_lens=lambda indptr, last_len, page_size: (indptr, last_len, page_size),
        get_batch_indices_positions=lambda append_indptr, lengths, count: (
            (append_indptr, count),
            lengths,
        ),
    )
    gpu_authors.adapt(library)
    Wrapper().plan("pages", head_dim=128)
    library.append_paged_kv_cache(
        [1, 2], [3, 4], "new", torch.zeros(1, 2, 64), "indices", "indptr", "last"
    )
    assert seen == [("pages", 128), (("new", 2), ("indptr", "last", 64), "indices", "last")]


def test_a_process_that_does_not_end_is_ended(tmp_path):
    began = time.monotonic()
    assert (
        gpu_store.supervise([POINTS, str(tmp_path), "stuck", "first"], gpu_store.Store(tmp_path))
        == gpu_store.DONE
    )
    assert time.monotonic() - began < 30
    assert gpu_store.Store(tmp_path).points("x")["first"]["ms"] == 1.0


def test_a_process_that_never_measures_is_not_started_for_ever(tmp_path):
    assert gpu_store.supervise([POINTS, str(tmp_path), "broken"], gpu_store.Store(tmp_path)) == 1


def test_the_end_of_the_machine_costs_one_point(tmp_path):
    """The program that watches is killed, and the one that it has started ends with it."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[3]); import gpu_store as g; from pathlib import"
        " Path\n"
    )
    code += "g.supervise([sys.argv[1], sys.argv[2], 'hangs', 'last'], g.Store(Path(sys.argv[2])))"
    watching = subprocess.Popen(
        [sys.executable, "-c", code, POINTS, str(tmp_path), str(ROOT / "benchmarks")]
    )
    deadline = time.monotonic() + 30
    while not (tmp_path / "tried").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    watching.send_signal(signal.SIGKILL)
    watching.wait()
    time.sleep(1.5)
    store = gpu_store.Store(tmp_path)
    assert store.points("x") == {}
    assert store.noted()["key"] == "hangs"
    assert gpu_store.supervise([POINTS, str(tmp_path), "hangs", "last"], store) == gpu_store.DONE
    assert (
        store.points("x")["hangs"]["failed"]
        == "the machine or this program ended while it was measured"
    )
    assert tried(tmp_path) == ["hangs", "last"]


def test_the_page_of_a_rehearsal_or_of_nothing_is_not_published(tmp_path, capsys):
    (tmp_path / "machine.json").write_text(
        json.dumps({"device": "cpu", "torch": "2", "rehearsal": True})
    )
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert gpu._publish(gpu_store.Store(folder)) == 2
    assert capsys.readouterr().err.count("has no figures of a GPU") == 2


@pytest.mark.parametrize(
    ("memory", "first"),
    [
        pytest.param(139.8, 24, marks=pytest.mark.slow),
        pytest.param(79.1, 14, marks=pytest.mark.soak),
    ],
)
def test_every_cell_fits_the_card(monkeypatch, memory, first):
    """With the draft's cache, at the largest budget and gamma, by the check that a run has to
    pass.
    """
    pytest.importorskip("triton")
    from magicdec.attention.cuda import triton_grid
    from magicdec.planning import fits

    num_bytes = int(memory * (1 << 30))
    answers = {
        "is_available": True,
        "device_count": 1,
        "get_device_name": "H100",
        "get_device_capability": (9, 0),
    }
    answers |= {"mem_get_info": (num_bytes, num_bytes), "memory_reserved": 0, "memory_allocated": 0}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(triton_grid, "gpu", lambda: triton_grid.NO_GPU)
    bench = gpu_bench.Bench(None, gpu_bench.Sizes())
    cells = bench.fitted()
    assert cells[0][0] == first
    for (rows, context), (wanted, _) in zip(cells, bench.sizes.cells, strict=True):
        assert wanted // 3 < rows <= wanted
        fits.check(bench.large(rows, context, 2049, 6), rows, context)


def test_a_round_s_kernels_are_told_apart_as_on_the_page(monkeypatch):
    names = {
        "attend_split": "attention",
        "void flash_fwd_splitkv_combine_kernel<...>": "attention",
        "nvjet_tst_64x8_64x16_4x1_v_bz_TNN": "matmuls",
        "sm90_xmma_gemm_bf16bf16_bf16f32": "matmuls",
        "triton_red_fused__to_copy_add_mean_mul_0": "fused",
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL": "sums over ranks",
        "multimem_all_reduce_kernel": "sums over ranks",
        "void at::native::vectorized_elementwise_kernel": "rest",
    }
    assert {name: gpu_profile.kind_of(name) for name in names} == names
    bench = gpu_bench.Bench(gpu_store.Store(Path("nowhere")), gpu_bench.Sizes())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    cell, milliseconds = gpu_profile.static_cell(bench)
    assert cell == (24, 32768, 512, 4)
    assert milliseconds.keys() == gpu_profile.ON_THE_PAGE.keys()
    assert 20 < milliseconds["attention"] < 30
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA B200")
    assert gpu_profile.static_cell(bench) == ((24, 32768, 512, 4), {})


def test_the_page_says_what_has_not_been_measured():
    known = {"machine": {"device": "NVIDIA H100", "torch": "2.13"}}
    written = gpu.page(lambda part: known.get(part, {}))
    assert written.startswith("# On NVIDIA H100")
    assert written.count("Not yet measured.") == len(gpu.PARTS)


def predicted_steps(machine, architecture_name, policy):
    """Return measurements of steps as the benchmark stores them, with the times that the cost model
    predicts for `machine`.
    """
    points = {}
    for batch, context, gamma in product((8, 24, 96), (4096, 32768), (2, 4)):
        model = architecture(architecture_name)
        predicted = round_times(
            Setup(model, machine, batch, context, SelfSpeculation(), policy), gamma
        )
        points[f"{batch} {context} {gamma}"] = {
            "batch": batch,
            "context": context,
            "budget": policy.budget,
            "gamma": gamma,
            "target_decode_ms": 1e3 * predicted.target.total,
            "draft_ms": 1e3 * predicted.draft.total,
            "verify_ms": 1e3 * predicted.verify.total,
            "round_ms": 1e3 * predicted.round_s,
            "overhead_ms": machine.efficiency.round_overhead_us / 1e3,
            "commit": "abc",
        }
    return points


def predicted_pair(machine, batch, context):
    """Return a measurement of the tiny pair, with the predicted time of a decoded token."""
    tiny = Setup(architecture("tiny"), machine, batch, context, SelfSpeculation())
    point = {
        "batch": batch,
        "context": context,
        "autoregressive/time_per_output_token_ms": 1e3 * round_times(tiny, 1).target.total,
        "commit": "abc",
    }
    return {f"{batch} x {context}": point}


@pytest.fixture
def published(monkeypatch, tmp_path):
    """The folder where `gpu_publish` writes its tables and its calibration."""
    monkeypatch.setattr(gpu_publish, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu_publish, "CALIBRATED", tmp_path)
    monkeypatch.setattr(gpu_publish, "write", lambda name: None)
    return tmp_path


def test_points_become_tables_and_a_calibration(published):
    """Times that the cost model has made give back its numbers. Nothing is written while a part is
    missing.
    """
    pytest.importorskip("scipy")
    machine = hardware_named("h200")
    steps = predicted_steps(machine, "llama-3.1-8b", Streaming(budget=512))
    known = {
        "machine": {"device": "NVIDIA H200", "torch": "2.13", "commit": "abc"},
        "steps": steps | {"lost": {"failed": "no end within 1 s"}},
        "pair": predicted_pair(machine, 8, 8320),
    }
    with pytest.raises(
        UserError, match=r"--parts ceilings,profile,prefill,rounds,policies,attention$"
    ):
        gpu_publish.publish(lambda part: known.get(part, {}))
    assert not list(published.iterdir())

    measured = read_csv(ROOT / "docs" / "results" / "gpu-policies.csv")
    known["policies"] = {row["policy"]: row | {"commit": "abc"} for row in measured}
    known |= {part: {"any": {"commit": "abc"}} for part in gpu_publish.SHOWN if part not in known}
    gpu_publish.publish(lambda part: known.get(part, {}))
    rows = read_csv(published / "gpu-steps.csv")
    assert [row["device"] for row in rows] == ["NVIDIA H200"] * len(steps)
    assert rows[-1]["measured_by"] == "commit abc, NVIDIA H200, PyTorch 2.13"
    written = yaml.safe_load((published / "h200.yaml").read_text())
    assert (written["hardware"], written["stack"]) == ("h200", "magicdec")
    for name in ("bandwidth_fraction", "layer_overhead_us", "round_overhead_us"):
        fitted, true = written["efficiency"][name], getattr(machine.efficiency, name)
        assert fitted == pytest.approx(true, rel=0.05)
    errors = read_csv(published / "gpu-fit.csv")
    assert {row["case"] for row in errors} == {"fitted", "held back"}
    assert all(abs(row[step]) < 0.02 for row in errors for step in ("T_T", "T_D", "T_V", "round"))
