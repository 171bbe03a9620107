"""scenario=compare in this process: runs that were disturbed, and runs without anything to
decode.
"""

import json
import shutil

import pytest

from magicdec.models.transformer import Transformer
from magicdec.scenarios import compare
from tests.checkpoints import make_checkpoint
from tests.runs import TINY, run_here


def test_a_disturbed_run_says_so_with_a_single_repeat(tmp_path, monkeypatch, capsys):
    profile_round = compare.profile_round
    monkeypatch.setattr(
        compare,
        "profile_round",
        lambda *a: {name: ms / 1e3 for name, ms in profile_round(*a).items()},
    )
    result = run_here(tmp_path).metrics
    assert "speedup_spread" not in result
    assert result["noisy"] is True
    assert min(result["agreement/target_decode"], result["agreement/round"]) > 100
    assert "NOISY" in capsys.readouterr().out


def test_a_run_whose_repeats_are_all_disturbed_names_the_other_programs(
    tmp_path, monkeypatch, capsys
):
    """Three repeats, and all count, because none is undisturbed."""
    shares = iter([78, 84, 81])
    monkeypatch.setattr(
        compare.Interference,
        "description",
        lambda _: f"other programs took {next(shares)}% of the processors",
    )
    run = run_here(tmp_path, "scenario.repeats=3")
    why = "other programs took 78% to 84% of the processors in all 3 repeats"
    assert run.metrics["disturbed"] == why
    assert run.metrics["repeats"] == 3
    assert run.metrics["noisy"] is True
    shown = " ".join(capsys.readouterr().out.split())
    assert f"NOISY {why}" in shown
    assert "stop the other programs, then measure it again" in shown
    log = (run.folder / "log.txt").read_text()
    assert "batch 0, repeat 2: other programs took 84% of the processors" in log


def test_a_run_says_how_many_of_the_repeats_that_count_were_disturbed(tmp_path, monkeypatch):
    reasons = iter([None, "other programs took 50% of the processors", None, None])
    monkeypatch.setattr(compare.Interference, "description", lambda _: next(reasons))
    first = run_here(tmp_path, "scenario.repeats=4").metrics
    assert first["disturbed"] == "other programs took 50% of the processors in 1 of 4 repeats"


def test_a_machine_that_is_slow_throughout_is_noticed(tmp_path):
    """An earlier attempt at the same run was faster."""
    run = run_here(tmp_path)
    first, step = run.metrics, "autoregressive/time_per_output_token_ms"
    assert "agreement/earlier" not in first
    slower = first["time/target_decode_ms"] / first["predicted/target_decode_ms"]
    assert first["agreement/prediction"] == max(1.0, slower)
    (run.folder / "result.json").write_text(json.dumps(first | {step: first[step] / 100}))
    second = run_here(tmp_path).metrics
    assert second["agreement/earlier"] > 5
    assert second["noisy"] is True


def test_the_bytes_of_a_verification_are_those_of_the_gamma_that_is_timed(tmp_path, monkeypatch):
    """With experts, they depend on the number of tokens."""
    own, asked = Transformer.step_weight_bytes, []
    monkeypatch.setattr(
        Transformer, "step_weight_bytes", lambda model, n: asked.append(n) or own(model, n)
    )
    monkeypatch.setattr(compare.Figures, "gamma", 2)
    run_here(tmp_path, "draft.gamma=auto", "batch.size=3")
    assert asked == [3, 9]


@pytest.mark.parametrize("engine", ["native", "transformers"])
def test_rows_that_end_at_their_first_token_leave_no_speedup(tmp_path, engine):
    """Every token of the checkpoint ends a sequence."""
    folder = shutil.copytree(TINY / "target", tmp_path / "checkpoint")
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((folder / name).read_text()) | {"eos_token_id": list(range(1024))}
        (folder / name).write_text(json.dumps(settings))
    keys = ["draft=model", "cache=full", "batch.size=1", "sampling.ignore_eos=false"]
    result = run_here(tmp_path / "runs", f"engine={engine}", f"target.path={folder}", *keys).metrics
    assert result["status"] == "done"
    assert result["lossless/identical"] is True
    assert result["speculative/time_to_first_token_ms"] > 0
    assert not [key for key in result if key.startswith("speedup")]


def test_the_bytes_of_a_step_end_with_the_windows_of_its_layers(tmp_path):
    """Three layers with windows of 12 tokens: a longer prompt adds nothing to read."""
    path = make_checkpoint(tmp_path / "model", "mistral-sliding")
    keys = [f"target.path={path}", "data=random", "draft.synthetic_acceptance=0.5"]

    def bytes_of(context):
        sizes = [f"batch.context_len={context}", "cache.budget=16", "batch.generate_len=8"]
        found = run_here(tmp_path / "runs", *keys, *sizes).metrics
        rate = 1e9 * found["roofline/bandwidth_gbs"]
        return found["roofline/target_decode"] * rate * found["time/target_decode_ms"] / 1e3

    assert bytes_of(30) == pytest.approx(bytes_of(100), rel=1e-6)


def test_a_budget_that_holds_the_prompts_that_were_read_is_warned_about_once(tmp_path, capsys):
    """The prompts have at least 30 tokens and fewer than 64; batch.context_len=256 is their
    bound.
    """
    path = tmp_path / "rows.jsonl"
    path.write_text(2 * f'{{"prompt": "{30 * "one "}"}}\n')
    keys = ["data=jsonl", f"data.path={path}", "data.prompt=prompt"]
    run = run_here(tmp_path / "runs", *keys, "cache.budget=64", "scenario.repeats=2")
    longest = run.metrics["data/context_len_max"]
    assert 30 <= longest < 64
    line = f"cache.budget=64 holds all of the longest prompt, which has {longest} tokens"
    shown = " ".join(capsys.readouterr().err.split())
    assert shown.count(line) == 1
    run_here(tmp_path / "runs", *keys, "cache.budget=16")
    assert "holds all of" not in capsys.readouterr().err
