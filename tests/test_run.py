"""Whole runs: what they leave, resumed sweeps, several ranks, and mistakes that only a plan finds."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from magicdec import cli
from magicdec.config.explain import explain
from magicdec.config.load import compose
from magicdec.costmodel.acceptance import measured
from magicdec.errors import UserError
from magicdec.scenarios import Job, compare, run
from magicdec.tracking.files import ROW, read_lines
from magicdec.tracking.reader import iter_runs
from magicdec.tracking.report.rows import read_rows
from tests.checkpoints import load_reference
from tests.programs import ROOT, python

TINY = ROOT / "magicdec" / "models" / "tiny"
SMALL = [
    "batch.size=2",
    "batch.context_len=256",
    "batch.generate_len=12",
    "cache.budget=64",
    "scenario.repeats=1",
    "wandb.mode=disabled",
    "hardware=cpu",
]


def small(runs: Path, *keys: str) -> list[str]:
    """Overrides of a small run in the store `runs`; `keys` win."""
    given = {key.partition("=")[0] for key in keys}
    return [f"runs_dir={runs}", *(text for text in SMALL if text.partition("=")[0] not in given), *keys]


def run_here(runs: Path, *keys: str) -> tuple[dict[str, Any], list[dict], list[dict]]:
    """Run a configuration in this process: its result, its generations and its history, as they are stored."""
    folder = runs / run(compose(small(runs, *keys)), Job())["id"]
    result = json.loads((folder / "result.json").read_text())
    return result, read_lines(folder / "generations.jsonl", ROW), read_lines(folder / "history.jsonl", ROW)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[subprocess.CompletedProcess, Path]:
    """A run as a user types it, in an interpreter that has imported nothing yet, and its store."""
    runs = tmp_path_factory.mktemp("runs")
    command = [sys.executable, "launch.py", *small(runs, "data.save_prompts=true", "draft.gamma=3")]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True), runs


def test_a_run_leaves_everything_that_a_reader_needs(finished):
    done, runs = finished
    assert done.returncode == 0, done.stderr
    assert "lossless" in done.stdout
    (path,) = runs.glob("*/result.json")
    result = json.loads(path.read_text())
    assert result["status"] == "done"
    assert result["lossless/identical"] is True
    assert result["acceptance/source"] == "measured"
    named = ("speedup", "speedup_wall", "acceptance_length", "alpha", "time/verify_ms", "memory/peak_gib")
    assert all(isinstance(result[name], float) for name in named)
    assert result["time/impossible"] is (result["time/overhead_ms"] < -0.05 * result["time/round_ms"])
    folder = runs / result["id"]
    rows = read_lines(folder / "generations.jsonl", ROW)
    assert [row["row"] for row in rows] == [0, 1]
    assert all(len(row["prompt"]) == 256 and len(row["speculative"]) == 12 for row in rows)
    assert all(row["speculative"] == row["autoregressive"] for row in rows)
    rounds = [one for row in rows for one in row["rounds"]]
    assert {proposed for proposed, _ in rounds} == {3}
    assert sum(accepted for _, accepted in rounds) / (3 * len(rounds)) == pytest.approx(result["acceptance_rate"])
    for sample in read_lines(folder / "samples.jsonl", ROW):
        texts = [text for one in sample["rounds"] for text in [*one["accepted"], one["bonus"]] if text is not None]
        assert len(texts) == 12
        assert "".join(texts) == sample["speculative"] == sample["autoregressive"]
    assert (folder / "config.yaml").exists()
    assert (folder / "history.jsonl").read_text()


def test_the_stored_output_is_what_transformers_writes(finished):
    """The independent oracle, on the bundled checkpoint and real text."""
    (path,) = finished[1].glob("*/generations.jsonl")
    rows = read_lines(path, ROW)
    prompts = torch.tensor([row["prompt"] for row in rows])
    settings = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    model = load_reference(TINY / "target")
    expected = model.generate(prompts, attention_mask=torch.ones_like(prompts), **settings)
    assert [row["speculative"] for row in rows] == expected[:, 256:].tolist()


def test_an_adaptive_gamma_is_lossless_and_logged(tmp_path, capsys):
    result, _, history = run_here(tmp_path, "draft.gamma=auto")
    assert "gamma auto" in capsys.readouterr().out
    assert result["lossless/identical"] is True
    gammas = [row["gamma"] for row in history]
    assert result["gamma"] in gammas
    assert set(gammas) <= {0, 1, 2, 3, 5, 8}


def test_a_task_is_scored_both_ways(tmp_path, capsys):
    result, generations, _ = run_here(tmp_path, "data=ruler", "data.task=vt", "batch.context_len=1024")
    assert "accuracy" in capsys.readouterr().out
    assert 0 <= result["autoregressive/accuracy"] == result["speculative/accuracy"] <= 1
    assert all(len(row["answers"]) == 5 for row in generations)


@pytest.mark.usefixtures("forked_ranks")
def test_two_ranks_leave_what_one_leaves(tmp_path, capfd):
    """Rank 0 alone stores and shows; the draft may have ranks of its own."""
    stored = []
    for number in (1, 2):
        keys = ["draft=model", "draft.tensor_parallel=1", f"hardware.tensor_parallel={number}"]
        stored.append(run_here(tmp_path, *keys)[1])
        assert all(row.pop("decode_s") for row in stored[-1])
        assert capfd.readouterr().out.count("acceptance rate") == 1
    assert stored[0] == stored[1]
    assert len(stored[0]) == 2


def test_a_sweep_skips_a_run_that_another_process_has_done(finished, tmp_path, monkeypatch, capfd, hydra_logging):
    runs = shutil.copytree(finished[1], tmp_path / "runs")
    before = {r["id"]: r["finished"] for r in iter_runs(runs)}
    sweep = ["-m", "hydra/launcher=basic", *small(runs, "data.save_prompts=true", "draft.gamma=3,1")]
    monkeypatch.setattr(sys, "argv", ["launch.py", *sweep])
    assert cli.main() == 0
    assert capfd.readouterr().err.count("done already") == 1
    after = {r["id"]: r["finished"] for r in iter_runs(runs)}
    assert len(before) + 1 == len(after) == 2
    assert before.items() <= after.items()


def test_random_weights_say_what_they_are(tmp_path, capsys):
    random = ["target=qwen3-1.7b", "target.weights=random", "data=random", "draft.synthetic_acceptance=0.8"]
    shape = ["num_layers=1", "hidden_size=64", "intermediate_size=64", "vocab_size=100", "num_heads=2"]
    shape += ["num_kv_heads=1", "head_dim=32"]
    result, _, _ = run_here(tmp_path, *random, *(f"target.architecture.{s}" for s in shape))
    shown = capsys.readouterr().out
    assert "synthetic" in shown.lower()
    assert "RANDOM weights" in shown
    assert result["acceptance/source"] == "synthetic"
    assert result["weights/source"] == "random"
    assert result["lossless/identical"] is None


def test_a_sampled_run_is_judged_by_its_distribution(tmp_path):
    result, _, _ = run_here(tmp_path, "sampling=sample", "draft=model")
    found = (result["lossless/identical"], result["lossless/passed"], result["lossless/outside_tokens"])
    assert found == (None, True, 0)
    assert abs(result["lossless/z_score"]) < 4 > abs(result["lossless/baseline_z_score"])


def test_the_context_of_a_users_own_prompts_is_the_one_they_have(tmp_path, monkeypatch, capsys):
    """batch.context_len is only the most that a prompt may have."""
    (tmp_path / "prompts.jsonl").write_text(
        '{"prompt": "import os"}\n{"prompt": "def add(a, b):\\n    return a + b"}\n'
    )
    setups = []
    original = compare.predicted_metrics
    monkeypatch.setattr(
        compare, "predicted_metrics", lambda setup, *rest: setups.append(setup) or original(setup, *rest)
    )
    keys = ["data=prompts", f"data.path={tmp_path}/prompts.jsonl", "cache.budget=8"]
    found, generations, _ = run_here(tmp_path / "runs", *keys)
    short, long = (row["context_len"] for row in generations)
    assert 2 < short < long < 30
    assert [found[f"data/context_len_{name}"] for name in ("min", "max", "mean")] == [short, long, (short + long) / 2]
    assert [setup.context for setup in setups] == [round((short + long) / 2)]
    assert (
        f"2 rows x {short} to {long} tokens of context ({(short + long) / 2:.0f} on average)" in capsys.readouterr().out
    )
    (row,) = read_rows(tmp_path / "runs")
    assert row["batch.context_len"] == round((short + long) / 2)
    (point,) = measured(iter_runs(tmp_path / "runs"))
    assert point.context_len == round((short + long) / 2)


@pytest.mark.parametrize("engine", ["native", "transformers"])
def test_samples_depend_on_the_prompt_and_not_on_the_batch_size(tmp_path, engine):
    """All prompts are the same: the batches of a run draw numbers of their own."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "import os"}\n' * 2)
    data = ["data=prompts", f"data.path={tmp_path}/prompts.jsonl", "draft=none", "sampling=sample"]
    tokens = []
    for rows, batches in ((1, 2), (2, 1)):
        sizes = [f"batch.size={rows}", f"batch.num_batches={batches}", f"engine={engine}"]
        _, generations, _ = run_here(tmp_path / str(rows), *data, *sizes)
        tokens.append([row["autoregressive"] for row in generations])
    assert tokens[0][0] != tokens[0][1]
    if engine == "native":
        assert tokens[0] == tokens[1]


def test_serving_compares_both_ways_at_each_level(tmp_path, capsys):
    load = ["scenario.concurrencies=[1,3]", "scenario.rates=[50]", "scenario.num_requests=5", "scenario.latency_ms=1e6"]
    result, rows, levels = run_here(tmp_path, "scenario=serve", *load)
    assert result["lossless/identical"] is True
    assert result["acceptance_length"] > 1
    assert [(level.get("concurrency"), level.get("rate")) for level in levels] == [(1, None), (3, None), (None, 50)]
    for level in levels:
        for way in ("autoregressive", "speculative"):
            assert level[f"{way}/tokens_per_second"] > 0
            assert level[f"{way}/goodput_rps"] == level[f"{way}/requests_per_second"]
            assert 0 < level[f"{way}/time_to_first_token_ms_p50"] <= level[f"{way}/time_to_first_token_ms_p99"]
    assert sorted(row["context_len"] for row in rows) == [64, 64, 128, 128, 256]
    assert all(row["speculative"] == row["autoregressive"] and len(row["speculative"]) == 12 for row in rows)
    assert "50 a second" in capsys.readouterr().out


@pytest.mark.usefixtures("forked_ranks")
def test_several_ranks_serve_together(tmp_path):
    """Rank 0 schedules, which no other rank could: slots change hands on all of them at once."""
    load = ["scenario=serve", "scenario.concurrencies=[2]", "scenario.num_requests=4", "batch.prefill_chunk=64"]
    result, rows, _ = run_here(tmp_path, *load, "hardware.tensor_parallel=2", "draft=model")
    assert result["lossless/identical"] is True
    assert [len(row["speculative"]) for row in rows] == [12] * 4


def broken(tmp_path: Path, damage) -> str:
    """A copy of the bundled target, damaged."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(TINY / "target", folder)
    damage(folder)
    return f"target.path={folder}"


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])


def pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def other_vocabulary(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 32000}))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["target.path=nowhere/at/all"], ["target.path", "nowhere/at/all"]),
        (["batch.context_len=9000"], ["batch.context_len=9000", "8448", "8436"]),
        (["batch.size=3000", "batch.context_len=8000"], ["batch.size=3000", "GiB", "would fit"]),
        (["batch.size=400", "hardware.dtype=bfloat16", "batch.context_len=8000"], ["400 rows", "8000", "tokens"]),
        (["hardware.device=cuda"], ["hardware.device=cuda", "hardware=cpu"]),
        (["draft=model", "cache=verify_guided"], ["cache.policy=verify_guided", "draft=self"]),
        (["draft=model", "cache=quantized"], ["cache.policy=quantized", "draft=self"]),
        (["hardware.tensor_parallel=3"], ["hardware.tensor_parallel=3", "4 query heads", "valid: 1, 2, 4"]),
        (["cache=snapkv", "hardware.tensor_parallel=4"], ["cache.policy=snapkv", "KV heads (2)", "streaming"]),
        (["cache.policy=nothing"], ["cache.policy=nothing", "streaming"]),
        (["draft=model", "target@draft.model=llama-3.2-1b", "draft.model.weights=random"], ["128256", "1024"]),
        (["data=stdlib", "data.path=FOLDER"], ["data.path=FOLDER has no effect with data=stdlib"]),
    ],
)
def test_mistakes_that_the_plan_finds(tmp_path, arguments, said):
    if torch.cuda.is_available() and "cuda" in arguments[0]:
        pytest.skip("there is a CUDA device here")
    if "draft=model" in arguments:
        arguments = [*arguments, "draft.synthetic_acceptance=0.5"]
    check_mistake(tmp_path, arguments, said)
    failed = list(iter_runs(tmp_path))
    # Only the memory that a run takes is found out after its folder is made.
    assert [r["kind"] for r in failed] == (["invalid"] if arguments[0].startswith("batch.size") else [])
    assert all(said[0] in r["reason"] for r in failed)


@pytest.mark.parametrize(
    ("damage", "said"),
    [(truncate, ["model.safetensors"]), (pickle, ["pytorch_model.bin", "safetensors"]), (other_vocabulary, ["32000"])],
)
def test_broken_checkpoints(tmp_path, damage, said):
    check_mistake(tmp_path / "runs", [broken(tmp_path, damage), "draft=model"], said)


def check_mistake(runs: Path, arguments: list[str], said: list[str]) -> None:
    """One line, which has every word that must be in it."""
    with pytest.raises(UserError) as raised:
        run(compose(small(runs, *arguments)), Job(tuple(arguments)))
    line = explain(raised.value, arguments)
    assert "\n" not in line
    for word in said:
        assert word in line, line


def test_a_mistake_that_the_plan_finds_is_one_line_and_exit_code_2(tmp_path):
    here = os.environ | {"WANDB_API_KEY": "", "NETRC": str(tmp_path / "netrc")}
    done = python("launch.py", *small(tmp_path / "runs", "wandb.mode=online"), env=here)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert re.match("error: wandb.mode=online: .*`wandb login`", done.stderr)
    assert not (tmp_path / "runs").exists()
