"""The scenarios predict and plan, the predictions of a run, and calibration from a run."""

import io
import json
import re
import sys
from dataclasses import replace
from tempfile import TemporaryDirectory

import pytest
import torch
import yaml
from rich.console import Console

from magicdec import cli
from magicdec.cache.streaming import Streaming
from magicdec.config.load import compose
from magicdec.costmodel.acceptance import Curves, published_points
from magicdec.costmodel.comparison import limit_metrics, predicted_metrics, warning
from magicdec.costmodel.comparison import published as published_values
from magicdec.costmodel.kernel_costs import KernelCosts
from magicdec.costmodel.prediction import predict
from magicdec.costmodel.round import round_times
from magicdec.errors import UserError
from magicdec.planning.acceptances import cache_named, draft_named
from magicdec.planning.fits import fitting
from magicdec.planning.resolve import resolve
from magicdec.planning.resolved import Plan, PlannedModel
from magicdec.planning.setup import held, setup_of
from magicdec.scenarios import Job, run
from magicdec.scenarios import plan as plan_scenario
from magicdec.scenarios import predict as predict_scenario
from magicdec.tracking.progress import progress
from magicdec.tracking.store import Run

LLAMA = ("target=llama-3.1-8b", "batch.context_len=32000", "cache.budget=512", "batch.size=64")


def outcome(scenario, *overrides):
    with TemporaryDirectory() as runs, progress() as bars:
        return scenario(resolve(compose(overrides)), Run.open(runs, "abc", {}), bars)


def as_run(device_name, device, *overrides):
    """The plan of a run on a device that is not here."""
    config, dtype = compose(overrides), torch.float32 if device == "cpu" else torch.bfloat16
    target = PlannedModel("target", None, config.target.architecture)
    return Plan(config, torch.device(device), dtype, target, None, device_name)


LLAMA_1B = ("draft=model", "target@draft.model=llama-3.2-1b")
QWEN3 = ("draft=model", "target@draft.model=qwen3-1.7b")
PLAN = ("scenario=plan", "scenario.save_as=of-a-test", "hardware=8xh100", *LLAMA)
QWEN = ("draft=model", "scenario.drafts=[qwen2.5-7b]")


def planned(*overrides):
    return outcome(plan_scenario.run, *PLAN, *overrides)


def predicted(*overrides):
    return outcome(
        predict_scenario.run, "scenario=predict", "hardware=8xa100", *LLAMA, *overrides
    ).metrics


def test_predict_from_the_command_line_leaves_a_run(tmp_path, monkeypatch, capfd, hydra_logging):
    """It finds the paper's critical context."""
    keys = [
        "scenario=predict",
        "hardware=8xa100",
        "scenario.gammas=[3]",
        f"runs_dir={tmp_path}",
        "wandb.mode=disabled",
    ]
    monkeypatch.setattr(sys, "argv", ["launch.py", *keys, *LLAMA])
    assert cli.main() == 0
    said = capfd.readouterr().out
    for words in (
        "pays from",
        "what bounds the steps",
        "of 80 GiB",
        "calibrated on 8xA100",
        "S* is",
    ):
        assert words in said
    (path,) = tmp_path.glob("*/result.json")
    result = json.loads(path.read_text())
    assert result["status"] == "done"
    assert result["predicted/speedup"] > 1
    assert 3000 <= result["predicted/critical_context"] <= 5000


def test_the_table_of_a_prediction_marks_the_gamma_asked_for():
    console = Console(file=io.StringIO(), width=100)
    keys = ("scenario=predict", "hardware=8xa100", *LLAMA, "draft.gamma=5")
    console.print(outcome(predict_scenario.run, *keys).view)
    shown = console.file.getvalue()
    assert re.findall(r"^ *(\d+)\*", shown, re.MULTILINE) == ["5"]
    assert "* draft.gamma; bold: the best per row" in shown


def test_an_acceptance_that_a_run_would_draw_is_the_predicted_one():
    drawn, given = predicted("draft.synthetic_acceptance=0.6"), predicted("scenario.alpha=0.6")
    both = predicted("draft.synthetic_acceptance=0.3", "scenario.alpha=0.6")
    assert drawn == given == both
    assert given["predicted/alpha"] == 0.6


def test_what_the_paper_measured_stands_beside_what_is_predicted():
    found = outcome(
        predict_scenario.run, "experiment=paper/table6_snapkv", "batch.size=128"
    ).metrics
    assert [found[f"published/{key}"] for key in ("table", "gamma", "speedup")] == ["6", 6, 2.01]
    assert found["published/draft_ms"] == pytest.approx(33.33 / 6)
    assert found["published/predicted_speedup"] == pytest.approx(2.01, rel=0.1)
    ruler = outcome(
        predict_scenario.run, "experiment=paper/table2", "data=ruler", "data.task=cwe"
    ).metrics
    assert ruler["published/speedup"] == 2.51
    own = setup_of(as_run("NVIDIA A100-SXM4-80GB", "cuda", "experiment=paper/table3c"))
    assert published_values(own, "pg19")["published/speedup"] == 1.64, "of a run on that machine"
    first = outcome(predict_scenario.run, "experiment=paper/first_version").metrics
    assert [first[f"published/{key}"] for key in ("gamma", "speedup")] == [5, 1.84], (
        "of the version with that gamma"
    )
    assert first["published/predicted_speedup"] == pytest.approx(1.84, rel=0.15), (
        "at the ICLR version's acceptance"
    )
    for other in ("batch.size=42", "draft.quantization=int4", "cache.num_sink=16"):
        elsewhere = outcome(predict_scenario.run, "experiment=paper/table3c", other).metrics
        assert not [key for key in elsewhere if key.startswith("published/")], other


def store_measured(folder):
    """Write a run that has measured an acceptance of 0.95."""
    folder.mkdir()
    result = {"status": "done", "acceptance/source": "measured", "alpha": 0.95}
    (folder / "result.json").write_text(json.dumps(result))
    config = {
        "target": {"name": "llama-3.1-8b"},
        "draft": {"name": "self", "model": None},
        "data": {"name": "pg19"},
    }
    config |= {
        "cache": {"policy": "streaming", "budget": 512, "num_sink": 4},
        "batch": {"context_len": 32_000},
    }
    config |= {"scenario": {"name": "compare"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


def test_predict_takes_acceptance_from_the_run_store_first(tmp_path):
    store_measured(tmp_path / "abc")
    for runs_dir, alpha in ((tmp_path, 0.95), (tmp_path / "empty", 0.81)):
        assert predicted(f"runs_dir={runs_dir}")["predicted/alpha"] == alpha


def test_a_repeated_sweep_predicts_with_what_was_measured_since(tmp_path, capsys):
    keys = ["scenario=predict", "hardware=8xa100", *LLAMA, "tracker=[]"]
    config = compose([*keys, f"runs_dir={tmp_path}/runs"])
    first = run(config, Job((), tmp_path / "first sweep"))
    store_measured(tmp_path / "runs" / "abc")
    again = run(config, Job((), tmp_path / "second sweep"))
    assert (first["predicted/alpha"], again["predicted/alpha"]) == (0.81, 0.95)
    assert again["id"] == f"{first['id']}-2"
    run(replace(config, sweep=replace(config.sweep, dry_run=True)), Job((), tmp_path / "third"))
    assert f"{first['id']}  predicted " in capsys.readouterr().out


def test_the_planned_experiment_composes_and_predicts_what_it_said(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_scenario, "EXPERIMENTS", tmp_path)
    keys = (
        "scenario.drafts=[llama-3.2-1b]",
        "scenario.policies=[streaming]",
        "scenario.batch_sizes=[16,32]",
    )
    planned(*keys, "scenario.save_as=found")
    # Once more: it may replace what it wrote itself.
    result = planned(*keys, "scenario.save_as=found")
    assert result.history[0]["draft"] == "llama-3.2-1b"
    # Hydra finds experiments on its search path: conf/, and this folder next to it.
    (tmp_path / "experiment").mkdir()
    (tmp_path / "found.yaml").rename(tmp_path / "experiment" / "found.yaml")
    found = compose(
        [f"hydra.searchpath=[file://{tmp_path}]", "experiment=found", "scenario=predict"]
    )
    assert (found.target.name, found.draft.model.name) == ("llama-3.1-8b", "llama-3.2-1b")
    assert (found.batch.size, found.batch.context_len) == (32, 32_000)
    assert (found.cache.budget, found.hardware.name) == (512, "8xh100")
    middle = found.batch.context_len + found.batch.generate_len // 2
    times = round_times(setup_of(resolve(found)).at(context=middle), found.draft.gamma)
    assert result.metrics["predicted/round_ms"] == pytest.approx(1e3 * times.round_s)


@pytest.mark.parametrize(
    ("keys", "part", "kept"),
    [
        (["draft=eagle3", "draft.model.path=null"], "draft", {"model": {"path": None}}),
        (["draft=layer_skip", "draft.num_layers=12"], "draft", {"num_layers": 12}),
        (["draft.quantization=int4"], "draft", {"quantization": "int4"}),
        ([*LLAMA_1B, "draft.tensor_parallel=2"], "draft", {"tensor_parallel": 2}),
        (["hardware=h100", "hardware.tensor_parallel=4"], "hardware", {"tensor_parallel": 4}),
        (["hardware.memory_gib=94"], "hardware", {"memory_gib": 94.0}),
    ],
)
def test_a_planned_experiment_has_what_differs_from_its_options(
    tmp_path, monkeypatch, keys, part, kept
):
    monkeypatch.setattr(plan_scenario, "EXPERIMENTS", tmp_path)
    result = planned("scenario.alpha=0.95", *keys)
    assert result.history[0]["draft"] != "none"
    (tmp_path / "experiment").mkdir()
    text = (tmp_path / "of-a-test.yaml").read_text()
    content = yaml.safe_load(text)
    assert {key: content[part][key] for key in kept} == kept
    (tmp_path / "experiment" / "found.yaml").write_text(text)
    found = compose(
        [f"hydra.searchpath=[file://{tmp_path}]", "experiment=found", "scenario=predict"]
    )
    middle = found.batch.context_len + found.batch.generate_len // 2
    times = round_times(setup_of(resolve(found)).at(context=middle), found.draft.gamma)
    assert result.metrics["predicted/round_ms"] == pytest.approx(1e3 * times.round_s)


def test_a_plan_takes_each_policy_with_its_own_settings(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_scenario, "EXPERIMENTS", tmp_path)
    keys = ("cache=snapkv", "cache.kernel=7", "scenario.policies=[snapkv,streaming]")
    config = compose([*PLAN, *keys])
    assert cache_named(config, "snapkv").kernel == 7
    assert cache_named(config, "streaming") == Streaming(budget=256, num_sink=4)
    result = planned(*keys)
    found = yaml.safe_load((tmp_path / "of-a-test.yaml").read_text())["cache"]
    expected = {"snapkv": {"observation_window": 32, "kernel": 7}, "streaming": {"num_sink": 4}}
    assert found == {"budget": result.history[0]["budget"]} | expected[result.history[0]["policy"]]


def test_a_plan_shows_what_is_not_known_at_every_batch():
    keys = (
        "scenario.drafts=[self,llama-3.2-1b,ngram]",
        "scenario.policies=[streaming,window,snapkv]",
    )
    console = Console(file=io.StringIO(), width=80)
    console.print(planned(*keys, "scenario.batch_sizes=[16,32,128]", "scenario.save_as=null").view)
    shown = console.file.getvalue()
    assert re.search(
        r"32 +llama-3.2-1b +streaming 512 +3 +[\d,]+ +[\d.]+ +1\.44x \| 1\.\d\dx", shown
    )
    heading, _, *rows = shown[shown.index("by batch") :].splitlines()[2:10]
    assert heading.split() == ["draft", "cache", "16", "32", "128"]
    for small, medium, large in [map(float, row.split()[-3:]) for row in rows]:
        assert 0 < large < medium < small
    assert sum("ngram" in row for row in rows) == 1


def test_a_plan_of_an_automatic_batch_gives_each_configuration_its_own(tmp_path, monkeypatch):
    """On one GPU, streaming 512 fits with fewer rows than decoding without a draft, and wins."""
    monkeypatch.setattr(plan_scenario, "EXPERIMENTS", tmp_path)
    keys = ["scenario=plan", "target=llama-3.1-8b", "hardware=h200", "batch.context_len=32768"]
    keys += [f"runs_dir={tmp_path}", "scenario.save_as=found"]

    def planned_of(*more):
        config = compose([*keys, *more])
        plan = fitting(plan_scenario.prepare(config), config.batch)
        with progress() as bars:
            return plan_scenario.run(plan, Run.open(tmp_path, "abc", {}), bars)

    found = planned_of()
    best, *_, alone = found.history
    assert (best["draft"], best["budget"], alone["draft"]) == ("self", 512, "none")
    assert best["batch_size"] < alone["batch_size"]
    assert found.metrics["predicted/batch_size"] == best["batch_size"]
    assert (
        yaml.safe_load((tmp_path / "found.yaml").read_text())["batch"]["size"]
        == (best["batch_size"])
    )
    for line in (best, alone):
        at_this = planned_of(f"batch.size={line['batch_size']}").history
        assert line in at_this, "as at that batch alone"
        more = planned_of(f"batch.size={line['batch_size'] + 1}") if line is best else None
        assert more is None or "streaming" not in {other["policy"] for other in more.history}
    console = Console(file=io.StringIO(), width=200)
    console.print(found.view)
    assert f"without speculation (batch {alone['batch_size']})" in console.file.getvalue()
    assert "left out" not in console.file.getvalue()


def test_a_plan_replaces_no_other_experiment(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_scenario, "EXPERIMENTS", tmp_path)
    (tmp_path / "mine.yaml").write_text("# @package _global_\n")
    with pytest.raises(UserError, match=r"save_as=mine: .* is there already; choose another name"):
        plan_scenario.prepare(compose([*PLAN, "scenario.save_as=mine"]))
    assert (tmp_path / "mine.yaml").read_text() == "# @package _global_\n"


def test_a_schedule_is_no_experiment(tmp_path, monkeypatch):
    """Its name may be that of one, which it does not touch."""
    monkeypatch.setattr(plan_scenario, "EXPERIMENTS", tmp_path)
    (tmp_path / "mine.yaml").write_bytes(b"caf\xe9")
    keys = [*PLAN, "scenario.save_as=mine", "scenario.schedule=vllm", "draft.acceptance=null"]
    assert plan_scenario.prepare(compose(keys)).predicts
    with pytest.raises(UserError, match=r"mine\.yaml is there already"):
        plan_scenario.prepare(compose([*PLAN, "scenario.save_as=mine"]))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["draft=none", "scenario.alpha=0.8"], "draft=none: a given acceptance and a schedule are"),
        (["scenario.workload=[[200000,500]]"], "scenario.workload: 200000 [+] 500 tokens exceed"),
        (
            ["scenario.schedule=vllm", "scenario.context_lens=[1000,200000]"],
            "scenario.context_lens: 200000 [+] .* new tokens exceed",
        ),
    ],
)
def test_a_plan_that_no_run_could_follow_is_refused(keys, said):
    with pytest.raises(UserError, match=said):
        plan_scenario.prepare(compose([*PLAN, "scenario.save_as=null", *keys]))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("scenario.drafts=[eagle3]", "scenario.drafts: eagle3 has a model of its own"),
        ("scenario.drafts=[nosuch]", "scenario.drafts: target=nosuch is no option; choose one of"),
        (
            "scenario.drafts=[gpt-oss-20b]",
            "scenario.drafts: target=gpt-oss-20b leaves its architecture to another file",
        ),
        ("scenario.policies=[foo]", "scenario.policies: cache.policy=foo: must be one of"),
    ],
)
def test_names_of_a_plan_that_cannot_be_searched_are_refused(keys, said):
    with pytest.raises(UserError, match=re.escape(said)):
        planned("scenario.save_as=null", keys)


def test_a_search_for_the_runs_own_draft_keeps_what_was_set_of_it():
    config = compose([*PLAN, "draft.quantization=int4"])
    assert draft_named(config, "self") == config.draft
    assert draft_named(config, "ngram").quantization == "none"


@pytest.mark.parametrize(
    ("dtype", "element_bytes"), [("auto", 2), ("bfloat16", 2), ("float16", 2), ("float32", 4)]
)
def test_a_prediction_has_the_runs_dtype(dtype, element_bytes):
    keys = ("scenario=predict", "hardware=8xa100", *LLAMA, f"hardware.dtype={dtype}")
    assert setup_of(resolve(compose(keys))).element_bytes == element_bytes
    on_cpu = (*keys, "hardware.device=cpu")
    assert setup_of(resolve(compose(on_cpu))).element_bytes == (
        4 if dtype == "auto" else element_bytes
    )


def test_a_plan_is_not_written_where_another_option_takes_precedence(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_scenario, "EXPERIMENTS", tmp_path)
    with pytest.raises(UserError, match=r"save_as=quick: experiment=quick is an option already \("):
        plan_scenario.prepare(compose([*PLAN, "scenario.save_as=quick"]))


@pytest.mark.parametrize(
    ("target", "keys", "named"),
    [
        ("llama-3.1-8b", ["scenario.alpha=0.7", *QWEN3], "draft.model: its vocabulary has 151936"),
        (
            "llama-3.1-8b",
            ["scenario.drafts=[self,qwen3-1.7b]"],
            r"scenario.drafts: qwen3-1.7b: its vocabulary",
        ),
        (
            "llama-3.1-8b",
            ["scenario.schedule=vllm", *QWEN3],
            "draft.model: its vocabulary has 151936",
        ),
        ("llama-3.1-8b", ["scenario=predict", *QWEN3], "draft.model: its vocabulary has 151936"),
        # The search does not read its model.
        ("llama-3.1-8b", ["draft=model", "draft.tensor_parallel=4"], None),
        ("qwen2.5-32b", ["scenario.alpha=0.7", *QWEN3], None),  # the same tokens, padded otherwise
        ("qwen2.5-32b", ["scenario.drafts=[self,qwen3-1.7b]"], None),
    ],
)
def test_a_plan_takes_no_draft_of_another_vocabulary(target, keys, named):
    config = compose([*PLAN, f"target={target}", *keys])
    prepare = resolve if "scenario=predict" in keys else plan_scenario.prepare
    if named is None:
        prepare(config)
        return
    with pytest.raises(UserError, match=named):
        prepare(config)


def test_an_automatic_batch_is_what_fits():
    keys = [
        "scenario=predict",
        "target=llama-3.1-8b",
        "hardware=h100",
        "cache.budget=512",
        "batch.context_len=16000",
    ]

    def planned(*more):
        config = compose([*keys, *more])
        return fitting(resolve(config), config.batch)

    plan = planned()
    rows = int(plan.config.batch.size)
    memory = setup_of(plan).hardware.device.memory
    assert 8 < rows < 64
    assert held(plan, rows, 16000).total <= memory < held(plan, rows + 1, 16000).total
    assert planned("batch.context_len=1000").config.batch.size == 64
    assert planned("target=llama-3.1-70b").config.batch.size == 1


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        (["hardware=auto"], r"hardware\.bandwidth_gbs=null: predicting for hardware=auto"),
        (["draft=none"], "draft=none: there is no speculation to predict"),
        (["scenario.gammas=[]"], r"scenario\.gammas=\[\]: must hold at least one"),
        (["scenario.critical_batches=[64]"], "must be a smaller and a larger batch"),
        (["target=qwen3-8b", "batch.context_len=50000"], r"batch\.context_len=40896 would fit"),
        (["scenario.alpha=1.5"], r"scenario\.alpha=1\.5: must be between 0 and 1"),
        (
            ["hardware=h100", "hardware.tensor_parallel=3"],
            r"hardware\.tensor_parallel=3: 32 query heads",
        ),
        (
            ["draft=model", "target@draft.model=llama-3.2-1b", "draft.tensor_parallel=3"],
            r"draft\.tensor_parallel=3: must divide",
        ),
        (
            ["draft=model", "target@draft.model=llama-3.2-1b", "cache=quantized"],
            r"cache\.policy=quantized reads the target's own",
        ),
    ],
)
def test_mistakes_in_a_prediction_are_named(keys, names):
    with pytest.raises(UserError, match=names):
        predicted(*keys)


def test_ranks_that_cannot_divide_a_model_are_refused_by_a_plan():
    common = ("scenario.save_as=null", "scenario.policies=[streaming,quantized]")
    with pytest.raises(
        UserError, match=r"hardware\.tensor_parallel=3: 32 query heads.*valid: 1, 2, 4"
    ):
        planned(*common, "hardware.tensor_parallel=3")
    with pytest.raises(
        UserError, match=r"draft\.tensor_parallel=8: 28 query heads.*valid: 1, 2, 4"
    ):
        planned(*common, *QWEN, "target=qwen2.5-32b", "draft.tensor_parallel=8")
    found = planned(*common, *QWEN, "target=qwen2.5-32b", "draft.tensor_parallel=4")
    assert {"none"} == {line["draft"] for line in found.history}, (
        "no acceptance is known of that draft"
    )


@pytest.mark.parametrize(
    ("fraction", "error"), [(0.5, None), (1.2, r"efficiency\.matmul_fraction=1\.2")]
)
def test_a_hardware_file_can_hold_its_calibration(tmp_path, fraction, error):
    (tmp_path / "hardware").mkdir()
    own = f"defaults: [h200, _self_]\nname: h200\nefficiency:\n  matmul_fraction: {fraction}\n"
    (tmp_path / "hardware" / "own.yaml").write_text(own)
    keys = (f"hydra.searchpath=[file://{tmp_path}]", "scenario=predict", "hardware=own", *LLAMA)
    if error:
        with pytest.raises(UserError, match=error):
            compose(keys)
    else:
        machine = setup_of(resolve(compose(keys))).hardware
        assert (machine.efficiency.matmul_fraction, machine.stack.name) == (0.5, "magicdec")


def test_a_run_is_predicted_for_its_device_and_this_software(model):
    found = setup_of(as_run("NVIDIA H200", "cuda", "hardware=h200", *LLAMA))
    assert (found.hardware.device.name, found.hardware.stack.name) == ("H200", "magicdec")
    # A device without a datasheet takes measured figures, and other sizes of numbers.
    run = as_run("Some CPU", "cpu", "hardware=cpu", *LLAMA)
    found = setup_of(run, bandwidth_gbs=60.0, tflops=0.5)
    assert found.hardware.device.bandwidth == 60e9
    assert found.target_time.total > 8e9 * 4 / 60e9
    with pytest.raises(UserError, match="bandwidth_gbs=null"):
        setup_of(run)


def test_a_run_that_cannot_pay_is_warned_about(setup):
    assert "0.8" in warning(setup(context=4000), (2,), Curves(published_points()))
    assert "never to pay" in warning(setup(context=1000, batch=1), (2,), Curves([]))
    assert warning(setup(), (3,), Curves(published_points())) is None
    assert (
        warning(setup(budget=777), (3,), Curves(published_points())) is None
    )  # unknown, but it could


def test_beside_a_run_stand_predictions_and_their_errors(setup):
    times = round_times(setup(), 3)
    measured = {
        "alpha": 0.8,
        "speedup": 1.0,
        "time/draft_ms": 1e3 * times.draft.total,
        "time/verify_ms": None,
    }
    measured |= {"time/target_decode_ms": 2e3 * times.target.total}
    result = predicted_metrics(setup(), 3, measured | {"speedup_wall": 0.5}, 64)
    assert result["predicted/speedup_wall_error"] == pytest.approx(
        2 * result["predicted/speedup_wall"] - 1
    )
    assert result["predicted/gamma"] == 3
    assert result["predicted/target_decode_error"] == pytest.approx(-0.5)
    assert result["predicted/draft_error"] == pytest.approx(0.0)
    assert result["predicted/speedup_error"] == pytest.approx(result["predicted/speedup"] - 1)
    assert "predicted/verify_error" not in result
    assert result["predicted/step_error"] == pytest.approx(-0.5), "the largest of the steps' errors"
    # Nothing was proposed, or nothing measured.
    unknown = predicted_metrics(setup(), 3, measured | {"alpha": None})
    assert unknown["predicted/speedup"] is None
    assert "predicted/speedup_error" not in unknown


def test_a_step_is_compared_with_its_limit(setup):
    """A decode step of one row reads the weights but for the embedding, and a long prompt's keys
    and values.
    """
    at = setup(hardware="h100", batch=1, context=4000)
    read = 15.0e9 + 4000 * at.target.kv_elements_per_token * 2
    measured = {
        "time/target_decode_ms": 2e3 * read / at.hardware.device.bandwidth,
        "time/draft_ms": None,
    }
    assert limit_metrics(at, 3, measured) == {"limit/target_decode": pytest.approx(0.5, rel=0.02)}


def test_the_limit_of_a_prefill_reads_weights_once_for_all_rows(setup):
    """A pass over 32 x 128 tokens of Llama-3.1-8B is bound by the FLOPs of 7.0 billion weights in
    its layers; a pass for each row would read them 32 times.
    """
    at = setup(hardware="h100", batch=32, context=128)
    flops_ms = 1e3 * 32 * 128 * 2 * 6.98e9 / at.hardware.device.flops
    limit = limit_metrics(at, 3, {"autoregressive/time_to_first_token_ms": 100.0})
    assert limit["limit/prefill"] * 100.0 == pytest.approx(flops_ms, rel=0.15)
    assert (
        setup_of(as_run("NVIDIA H200", "cuda", "batch.prefill_chunk=96", *LLAMA)).prefill_chunk
        == 96
    )


@pytest.mark.parametrize("policy", ["quest", "topk", "quantized", "verify_guided"])
def test_a_limit_knows_no_slow_kernels(setup, policy):
    """The H200's kernels take up to 15 times as long as their bytes; an H100's are not measured."""
    steps = {"time/draft_ms": 1.0, "time/verify_ms": 1.0}
    h200 = setup(hardware="h200", policy=policy)
    unmeasured = replace(h200.hardware, kernels=KernelCosts())
    assert h200.factor(next(iter(h200.work))) > 1
    assert limit_metrics(h200, 3, steps) == limit_metrics(h200.at(hardware=unmeasured), 3, steps)


@pytest.mark.parametrize("policy", ["quest", "topk", "verify_guided"])
def test_a_draft_step_is_compared_with_the_selection_that_it_makes(setup, policy):
    """A run times a choice of every step within the step (time/draft_ms), and one of a round within
    the round.
    """
    at = setup(policy=policy, **{"refresh": 4} if policy == "verify_guided" else {})
    times = round_times(at, 3)
    is_within = policy != "verify_guided"
    step = times.draft.total + (times.select.total if is_within else 0.0)
    result = predicted_metrics(at, 3, {"alpha": 0.8, "time/draft_ms": 1e3 * step})
    assert times.select.total > 0
    assert result["predicted/draft_error"] == pytest.approx(0.0)
    assert sum(v for k, v in result.items() if k.startswith("predicted/draft/")) == pytest.approx(
        1e3 * step
    )
    choices = 3 if is_within else 1 / 4  # of a round
    assert result["predicted/select_ms"] * choices == pytest.approx(3e3 * times.select.total), (
        "one choice"
    )


def test_an_ideal_card_gives_what_bytes_alone_allow(ideal, setup):
    # 24 x 32k on one H200: 2.15 at alpha 0.80 and budget 512, 2.38 at 0.89 and 2,049, by reading KV
    # and weights alone.
    for alpha, budget, expected in ((0.80, 512, 2.15), (0.89, 2049, 2.38)):
        at = setup(batch=24, budget=budget, hardware="h200").at(hardware=ideal(device="H200"))
        assert predict(at, alpha=alpha).best.speedup == pytest.approx(expected, rel=0.02)
