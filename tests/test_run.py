"""Whole runs through the command line: what they leave, resumed sweeps, and mistakes that only a plan finds."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from magicdec.config.load import compose
from magicdec.costmodel.acceptance import measured
from magicdec.scenarios import Job, compare, run
from magicdec.tracking.reader import iter_runs
from magicdec.tracking.report.rows import read_rows

ROOT = Path(__file__).parents[1]
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


def launch(runs: Path, *arguments: str) -> subprocess.CompletedProcess:
    flags = [a for a in arguments if a.startswith("-")]
    keys = [a for a in arguments if not a.startswith("-")]
    small = [s for s in SMALL if not any(k.startswith(s.partition("=")[0] + "=") for k in keys)]
    command = [sys.executable, str(ROOT / "launch.py"), *flags, f"runs_dir={runs}", *small, *keys]
    return subprocess.run(command, capture_output=True, text=True)


def results(runs: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(runs.glob("*/result.json"))]


def test_a_run_leaves_everything_that_a_reader_needs(tmp_path):
    done = launch(tmp_path, "data.save_prompts=true", "draft.gamma=3")
    assert done.returncode == 0, done.stderr
    assert "lossless" in done.stdout
    (result,) = results(tmp_path)
    assert result["status"] == "done"
    assert result["lossless/identical"] is True
    assert result["acceptance/source"] == "measured"
    named = ("speedup", "speedup_wall", "acceptance_length", "alpha", "time/verify_ms", "memory/peak_gib")
    assert all(isinstance(result[name], float) for name in named)
    assert result["time/impossible"] is (result["time/overhead_ms"] < -0.05 * result["time/round_ms"])
    folder = tmp_path / result["id"]
    rows = [json.loads(line) for line in (folder / "generations.jsonl").read_text().splitlines()]
    assert [row["row"] for row in rows] == [0, 1]
    assert all(len(row["prompt"]) == 256 and len(row["speculative"]) == 12 for row in rows)
    assert all(row["speculative"] == row["autoregressive"] for row in rows)
    assert (folder / "config.yaml").exists()
    assert (folder / "history.jsonl").read_text()


def test_the_stored_output_is_what_transformers_writes(tmp_path):
    """The independent oracle, on the bundled checkpoint and real text."""
    from transformers import AutoModelForCausalLM

    assert launch(tmp_path, "data.save_prompts=true").returncode == 0
    (path,) = tmp_path.glob("*/generations.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32)
    prompts = torch.tensor([row["prompt"] for row in rows])
    settings = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompts, attention_mask=torch.ones_like(prompts), **settings)
    assert [row["speculative"] for row in rows] == expected[:, 256:].tolist()


def test_an_adaptive_gamma_is_lossless_and_logged(tmp_path):
    done = launch(tmp_path, "draft.gamma=auto")
    assert done.returncode == 0, done.stderr
    assert "gamma auto" in done.stdout
    (result,) = results(tmp_path)
    assert result["lossless/identical"] is True
    (path,) = tmp_path.glob("*/history.jsonl")
    gammas = [json.loads(line)["gamma"] for line in path.read_text().splitlines()]
    assert result["gamma"] in gammas
    assert set(gammas) <= {0, 1, 2, 3, 5, 8}


def test_a_task_is_scored_both_ways(tmp_path):
    done = launch(tmp_path, "data=ruler", "data.task=vt", "batch.context_len=1024")
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout
    (result,) = results(tmp_path)
    assert 0 <= result["autoregressive/accuracy"] == result["speculative/accuracy"] <= 1
    (path,) = tmp_path.glob("*/generations.jsonl")
    assert all(len(json.loads(line)["answers"]) == 5 for line in path.read_text().splitlines())


def test_two_ranks_leave_what_one_leaves(tmp_path):
    """Rank 0 alone stores and shows; the draft may have ranks of its own."""
    for ranks in (1, 2):
        keys = ["draft=model", "draft.tensor_parallel=1", f"hardware.tensor_parallel={ranks}", "cache.budget=64"]
        done = launch(tmp_path / str(ranks), *keys)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("acceptance rate") == 1
    one, two = (next((tmp_path / str(ranks)).glob("*/generations.jsonl")).read_text() for ranks in (1, 2))
    assert one == two


def test_a_sweep_goes_on_where_it_stood(tmp_path):
    assert launch(tmp_path, "-m", "draft.gamma=1,2").returncode == 0
    before = {r["id"]: r["finished"] for r in results(tmp_path)}
    again = launch(tmp_path, "-m", "draft.gamma=1,2,3")
    assert again.returncode == 0
    assert again.stderr.count("done already") == 2
    after = {r["id"]: r["finished"] for r in results(tmp_path)}
    assert len(after) == 3
    assert before.items() <= after.items()


def test_sampling_and_random_weights_say_what_they_are(tmp_path):
    random = ["target=qwen3-1.7b", "target.weights=random", "data=random", "draft.synthetic_acceptance=0.8"]
    shape = ["num_layers=1", "hidden_size=64", "intermediate_size=64", "vocab_size=100", "num_heads=2"]
    shape += ["num_kv_heads=1", "head_dim=32"]
    done = launch(tmp_path / "random", *random, *(f"target.architecture.{s}" for s in shape))
    assert done.returncode == 0, done.stderr
    assert "synthetic" in done.stdout.lower()
    (result,) = results(tmp_path / "random")
    assert result["acceptance/source"] == "synthetic"
    assert result["weights/source"] == "random"
    assert "RANDOM weights" in done.stdout
    assert result["lossless/identical"] is None
    sampled = launch(tmp_path / "sampled", "sampling=sample", "draft=model")
    assert sampled.returncode == 0, sampled.stderr
    (result,) = results(tmp_path / "sampled")
    assert (result["lossless/identical"], result["lossless/passed"], result["lossless/outside_tokens"]) == (
        None,
        True,
        0,
    )
    assert abs(result["lossless/z_score"]) < 4 > abs(result["lossless/baseline_z_score"])


def test_the_context_of_a_users_own_prompts_is_the_one_they_have(tmp_path, monkeypatch, capsys):
    """batch.context_len is only the most that a prompt may have."""
    (tmp_path / "prompts.jsonl").write_text(
        '{"prompt": "import os"}\n{"prompt": "def add(a, b):\\n    return a + b"}\n'
    )
    setups = []
    original = compare.beside
    monkeypatch.setattr(compare, "beside", lambda setup, *rest: setups.append(setup) or original(setup, *rest))
    keys = ["data=prompts", f"data.path={tmp_path}/prompts.jsonl", f"runs_dir={tmp_path}/runs"]
    found = run(compose([*SMALL, *keys, "cache.budget=8"]), Job())
    (path,) = (tmp_path / "runs").glob("*/generations.jsonl")
    short, long = (json.loads(line)["context_len"] for line in path.read_text().splitlines())
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
    """Of prompts that are all the same: the batches of a run draw numbers of their own."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "import os"}\n' * 2)
    data = ["data=prompts", f"data.path={tmp_path}/prompts.jsonl", "draft=none", "sampling=sample"]
    tokens = []
    for rows, batches in ((1, 2), (2, 1)):
        runs = tmp_path / str(rows)
        sizes = [f"batch.size={rows}", f"batch.num_batches={batches}", f"engine={engine}", f"runs_dir={runs}"]
        found = run(compose([*SMALL, *data, *sizes]), Job())
        lines = (runs / found["id"] / "generations.jsonl").read_text().splitlines()
        tokens.append([json.loads(line)["autoregressive"] for line in lines])
    assert tokens[0][0] != tokens[0][1]
    if engine == "native":
        assert tokens[0] == tokens[1]


def test_serving_compares_both_ways_at_each_level(tmp_path):
    load = ["scenario.concurrencies=[1,3]", "scenario.rates=[50]", "scenario.num_requests=5", "scenario.latency_ms=1e6"]
    done = launch(tmp_path, "scenario=serve", "batch.size=2", *load)
    assert done.returncode == 0, done.stderr
    (result,) = results(tmp_path)
    assert result["lossless/identical"] is True
    assert result["acceptance_length"] > 1
    lines = (tmp_path / result["id"] / "history.jsonl").read_text().splitlines()
    levels = [json.loads(line) for line in lines]
    assert [(level.get("concurrency"), level.get("rate")) for level in levels] == [(1, None), (3, None), (None, 50)]
    for level in levels:
        for way in ("autoregressive", "speculative"):
            assert level[f"{way}/tokens_per_second"] > 0
            assert level[f"{way}/goodput_rps"] == level[f"{way}/requests_per_second"]
            assert 0 < level[f"{way}/time_to_first_token_ms_p50"] <= level[f"{way}/time_to_first_token_ms_p99"]
    rows = [json.loads(line) for line in (tmp_path / result["id"] / "generations.jsonl").read_text().splitlines()]
    assert sorted(row["context_len"] for row in rows) == [64, 64, 128, 128, 256]
    assert all(row["speculative"] == row["autoregressive"] and len(row["speculative"]) == 12 for row in rows)
    assert "50 a second" in done.stdout


def test_several_ranks_serve_together(tmp_path):
    """Rank 0 schedules, which no other rank could: slots change hands on all of them at once."""
    load = ["scenario=serve", "scenario.concurrencies=[2]", "scenario.num_requests=4", "batch.prefill_chunk=64"]
    done = launch(tmp_path, *load, "hardware.tensor_parallel=2", "draft=model")
    assert done.returncode == 0, done.stderr
    (result,) = results(tmp_path)
    assert result["lossless/identical"] is True
    rows = (tmp_path / result["id"] / "generations.jsonl").read_text().splitlines()
    assert [len(json.loads(row)["speculative"]) for row in rows] == [12] * 4


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
        (["wandb.mode=online"], ["wandb.mode=online", "wandb login"]),
        (["data=stdlib", "data.path=FOLDER"], ["data.path=FOLDER has no effect with data=stdlib"]),
    ],
)
def test_mistakes_that_the_plan_finds(tmp_path, monkeypatch, arguments, said):
    monkeypatch.setenv("WANDB_API_KEY", "")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    if torch.cuda.is_available() and "cuda" in arguments[0]:
        pytest.skip("there is a CUDA device here")
    if "draft=model" in arguments:
        arguments = [*arguments, "draft.synthetic_acceptance=0.5"]
    check_mistake(launch(tmp_path / "runs", *arguments), said)
    failed = results(tmp_path / "runs")
    # Only the memory that a run takes is found out after its folder is made.
    assert [r["kind"] for r in failed] == (["invalid"] if arguments[0].startswith("batch.size") else [])
    assert all(said[0] in r["reason"] for r in failed)


@pytest.mark.parametrize(
    ("damage", "said"),
    [(truncate, ["model.safetensors"]), (pickle, ["pytorch_model.bin", "safetensors"]), (other_vocabulary, ["32000"])],
)
def test_broken_checkpoints(tmp_path, damage, said):
    check_mistake(launch(tmp_path / "runs", broken(tmp_path, damage), "draft=model"), said)


def check_mistake(done: subprocess.CompletedProcess, said: list[str]) -> None:
    """One line, exit code 2, and every word that must be in it."""
    assert done.returncode == 2, done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("error: ")
    assert "Traceback" not in done.stderr
    for word in said:
        assert word in line, line
