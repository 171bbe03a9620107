"""Whole runs: what they leave, resumed sweeps, several ranks, and mistakes that only a plan
finds.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from magicdec import cli
from magicdec.costmodel.acceptance import measured
from magicdec.errors import UserError
from magicdec.report import page
from magicdec.report.rows import read_rows
from magicdec.scenarios import prediction_errors
from magicdec.tracking.reader import iter_runs
from magicdec.units import WAYS
from tests.checkpoints import load_reference
from tests.programs import python
from tests.runs import SMALL, TINY, lines, one_line, only_run, run_here

SAVED = ["data.save_prompts=true", "wandb.mode=disabled", "tracker=[wandb]"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> dict[str, Any]:
    """A run as a user types it, in a process of its own."""
    runs = tmp_path_factory.mktemp("runs")
    done = python("launch.py", *SMALL, f"runs_dir={runs}", *SAVED, "draft.gamma=3")
    assert done.returncode == 0, done.stderr
    assert "lossless" in done.stdout
    return only_run(runs)


def test_a_run_leaves_everything_that_a_reader_needs(finished):
    result, folder = finished, Path(finished["folder"])
    assert result["status"] == "done"
    assert result["lossless/identical"] is True
    assert result["acceptance/source"] == "measured"
    named = (
        "speedup",
        "speedup_wall",
        "acceptance_length",
        "alpha",
        "time/verify_ms",
        "memory/peak_gib",
    )
    assert all(isinstance(result[name], float) for name in named)
    assert result["time/impossible"] is (
        result["time/overhead_ms"] < -0.05 * result["time/round_ms"]
    )
    rows = lines(folder, "generations")
    assert [row["row"] for row in rows] == [0, 1]
    assert all(len(row["prompt"]) == 128 and len(row["speculative"]) == 12 for row in rows)
    assert all(row["speculative"] == row["autoregressive"] for row in rows)
    rounds = [one for row in rows for one in row["rounds"]]
    assert {proposed for proposed, _ in rounds} == {3}
    assert sum(accepted for _, accepted in rounds) / (3 * len(rounds)) == pytest.approx(
        result["acceptance_rate"]
    )
    for sample in lines(folder, "samples"):
        texts = [
            text
            for one in sample["rounds"]
            for text in [*one["accepted"], one["bonus"]]
            if text is not None
        ]
        assert len(texts) == 12
        assert "".join(texts) == sample["speculative"] == sample["autoregressive"]
    assert (folder / "config.yaml").exists()
    assert lines(folder, "history")


def test_the_stored_output_is_what_transformers_writes(finished):
    """The independent oracle, on the bundled checkpoint and real text."""
    rows = lines(finished["folder"], "generations")
    prompts = torch.tensor([row["prompt"] for row in rows])
    settings = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    model = load_reference(TINY / "target")
    expected = model.generate(prompts, attention_mask=torch.ones_like(prompts), **settings)
    assert [row["speculative"] for row in rows] == expected[:, 128:].tolist()


def test_an_adaptive_gamma_is_lossless_and_logged(tmp_path, capsys):
    run = run_here(tmp_path, "draft.gamma=auto")
    assert "gamma auto" in capsys.readouterr().out
    assert run.metrics["lossless/identical"] is True
    gammas = {row["gamma"] for row in run.history}
    assert {run.metrics["gamma"]} <= gammas <= {0, 1, 2, 3, 5, 8}


def test_a_task_is_scored_both_ways(tmp_path, capsys):
    run = run_here(tmp_path, "data=ruler", "data.task=vt", "batch.context_len=1024")
    assert "accuracy" in capsys.readouterr().out
    assert 0 <= run.metrics["autoregressive/accuracy"] == run.metrics["speculative/accuracy"] <= 1
    assert all(len(row["answers"]) == 5 for row in run.generations)


@pytest.mark.usefixtures("forked_ranks")
def test_two_ranks_leave_what_one_leaves(tmp_path, capfd):
    """Rank 0 alone stores and shows; the draft may have ranks of its own."""
    stored = []
    for number in (1, 2):
        keys = ["draft=model", "draft.tensor_parallel=1", f"hardware.tensor_parallel={number}"]
        stored.append(run_here(tmp_path, *keys).generations)
        assert all(row.pop("decode_s") for row in stored[-1])
        assert capfd.readouterr().out.count("acceptance rate") == 1
    assert stored[0] == stored[1]
    assert len(stored[0]) == 2


def test_a_sweep_skips_a_run_that_another_process_has_done(
    finished, tmp_path, monkeypatch, capfd, hydra_logging
):
    runs = shutil.copytree(Path(finished["folder"]).parent, tmp_path / "runs")
    before = {r["id"]: r["finished"] for r in iter_runs(runs)}
    sweep = ["-m", "hydra/launcher=basic", *SMALL, f"runs_dir={runs}", *SAVED, "draft.gamma=3,1"]
    monkeypatch.setattr(sys, "argv", ["launch.py", *sweep])
    monkeypatch.setattr(page, "vega", lambda: "")  # charts are not drawn here
    assert cli.main() == 0
    assert capfd.readouterr().err.count("done already") == 1
    after = {r["id"]: r["finished"] for r in iter_runs(runs)}
    assert len(before) + 1 == len(after) == 2
    assert before.items() <= after.items()


def test_random_weights_say_what_they_are(tmp_path, capsys):
    random = [
        "target=qwen3-1.7b",
        "target.weights=random",
        "data=random",
        "draft.synthetic_acceptance=0.8",
    ]
    shape = (
        "num_layers=1 hidden_size=64 intermediate_size=64 vocab_size=100 num_heads=2 num_kv_heads=1"
        " head_dim=32"
    )
    result = run_here(
        tmp_path, *random, *(f"target.architecture.{key}" for key in shape.split())
    ).metrics
    shown = capsys.readouterr().out
    assert "synthetic" in shown.lower()
    assert "RANDOM weights" in shown
    assert result["acceptance/source"] == "synthetic"
    assert result["weights/source"] == "random"
    assert result["lossless/identical"] is None


def test_a_sampled_run_is_judged_by_its_distribution(tmp_path):
    result = run_here(tmp_path, "sampling=sample", "draft=model").metrics
    found = (
        result["lossless/identical"],
        result["lossless/passed"],
        result["lossless/outside_tokens"],
    )
    assert found == (None, True, 0)
    assert abs(result["lossless/z_score"]) < 4 > abs(result["lossless/baseline_z_score"])


def prompts(folder: Path, *texts: str) -> list[str]:
    """Keys for these prompts, in a file."""
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return ["data=prompts", f"data.path={file}"]


def test_the_context_of_a_users_own_prompts_is_the_one_they_have(tmp_path, monkeypatch, capsys):
    """batch.context_len is only the most that a prompt may have."""
    setups = []
    errors = prediction_errors.predicted_metrics
    monkeypatch.setattr(
        prediction_errors,
        "predicted_metrics",
        lambda one, *rest: setups.append(one) or errors(one, *rest),
    )
    run = run_here(
        tmp_path / "runs",
        *prompts(tmp_path, "import os", "def add(a, b):\n    return a"),
        "cache.budget=8",
    )
    short, long = (row["context_len"] for row in run.generations)
    assert 2 < short < long < 30
    mean = (short + long) / 2
    assert [run.metrics[f"data/context_len_{name}"] for name in ("min", "max", "mean")] == [
        short,
        long,
        mean,
    ]
    assert (
        f"2 rows x {short} to {long} tokens of context ({mean:.0f} on average)"
        in capsys.readouterr().out
    )
    (setup, halfway), (row,), (point,) = (
        setups,
        read_rows(tmp_path / "runs"),
        measured(iter_runs(tmp_path / "runs")),
    )
    assert {setup.context, row["batch.context_len"], point.context_len} == {round(mean)}
    assert halfway.context == round(mean) + row["batch.generate_len"] // 2


@pytest.mark.parametrize("engine", ["native", "transformers"])
def test_samples_depend_on_the_prompt_and_not_on_the_batch_size(tmp_path, engine):
    """All prompts are the same: the batches of a run draw numbers of their own."""
    keys = [
        *prompts(tmp_path, "import os", "import os"),
        "draft=none",
        "sampling=sample",
        f"engine={engine}",
    ]
    tokens = []
    for rows, batches in ((1, 2), (2, 1)):
        run = run_here(tmp_path, *keys, f"batch.size={rows}", f"batch.num_batches={batches}")
        tokens.append([row["autoregressive"] for row in run.generations])
    assert tokens[0][0] != tokens[0][1]
    if engine == "native":
        assert tokens[0] == tokens[1]


def test_serving_compares_both_ways_at_each_level(tmp_path, capsys):
    load = [
        "scenario.concurrencies=[1,3]",
        "scenario.rates=[50]",
        "scenario.num_requests=5",
        "scenario.latency_ms=1e6",
    ]
    run = run_here(tmp_path, "scenario=serve", *load)
    assert run.metrics["lossless/identical"] is True
    assert run.metrics["acceptance_length"] > 1
    loads = [(level.get("concurrency"), level.get("rate")) for level in run.history]
    assert loads == [(1, None), (3, None), (None, 50)]
    for level in run.history:
        for way in WAYS:
            assert level[f"{way}/tokens_per_second"] > 0
            assert level[f"{way}/goodput_rps"] == level[f"{way}/requests_per_second"]
            assert (
                0
                < level[f"{way}/time_to_first_token_ms_p50"]
                <= level[f"{way}/time_to_first_token_ms_p99"]
            )
    assert sorted(row["context_len"] for row in run.generations) == [32, 32, 64, 64, 128]
    assert all(
        row["speculative"] == row["autoregressive"] and len(row["speculative"]) == 12
        for row in run.generations
    )
    assert "50 a second" in capsys.readouterr().out


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.slow
def test_several_ranks_serve_together(tmp_path):
    """Rank 0 schedules, which no other rank could: slots change hands on all of them at once."""
    load = [
        "scenario=serve",
        "scenario.concurrencies=[2]",
        "scenario.num_requests=4",
        "batch.prefill_chunk=64",
    ]
    run = run_here(tmp_path, *load, "hardware.tensor_parallel=2", "draft=model")
    assert run.metrics["lossless/identical"] is True
    assert [len(row["speculative"]) for row in run.generations] == [12] * 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["batch.context_len=9000"], ["batch.context_len=9000", "8448", "8436"]),
        (["batch.size=3000", "batch.context_len=8000"], ["batch.size=3000", "GiB", "would fit"]),
        (
            ["batch.size=400", "hardware.dtype=bfloat16", "batch.context_len=8000"],
            ["400 rows", "8000", "tokens"],
        ),
        (["hardware.device=cuda"], ["hardware.device=cuda", "hardware=cpu"]),
        (
            ["hardware.tensor_parallel=3"],
            ["hardware.tensor_parallel=3", "4 query heads", "valid: 1, 2, 4"],
        ),
        (
            ["cache=snapkv", "hardware.tensor_parallel=4"],
            ["cache.policy=snapkv", "KV heads (2)", "streaming"],
        ),
        (["cache.policy=nothing"], ["cache.policy=nothing", "streaming"]),
        (
            ["draft=model", "target@draft.model=llama-3.2-1b", "draft.model.weights=random"],
            ["128256", "1024"],
        ),
    ],
)
def test_mistakes_that_the_plan_finds(tmp_path, arguments, said):
    """One line, which has every word that must be in it."""
    if torch.cuda.is_available() and "cuda" in arguments[0]:
        pytest.skip("there is a CUDA device here")
    if "draft=model" in arguments:
        arguments = [*arguments, "draft.synthetic_acceptance=0.5"]
    with pytest.raises(UserError, match=one_line()) as raised:
        run_here(tmp_path, *arguments)
    assert [word for word in said if word not in str(raised.value)] == []
    failed = list(iter_runs(tmp_path))
    # Only the memory that a run takes is found out after its folder is made.
    assert [r["kind"] for r in failed] == (
        ["invalid"] if arguments[0].startswith("batch.size") else []
    )
    assert all(said[0] in r["reason"] for r in failed)
