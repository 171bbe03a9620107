"""scenario=compare in this process: runs that were disturbed, and runs without anything to decode."""

import json
import shutil

import pytest

from magicdec.config.load import compose
from magicdec.scenarios import Job, compare, run
from tests.test_run import SMALL, TINY


def test_a_disturbed_run_says_so_with_a_single_repeat(tmp_path, monkeypatch, capsys):
    profile_round = compare.profile_round
    monkeypatch.setattr(compare, "profile_round", lambda *a: {name: ms / 1e3 for name, ms in profile_round(*a).items()})
    result = run(compose([*SMALL, f"runs_dir={tmp_path}"]), Job())
    assert "speedup_spread" not in result
    assert result["noisy"] is True
    assert min(result["agreement/target_decode"], result["agreement/round"]) > 100
    assert "NOISY" in capsys.readouterr().out


def test_a_machine_that_is_slow_throughout_is_noticed(tmp_path):
    """By an earlier attempt at the same run, which was faster."""
    config = compose([*SMALL, f"runs_dir={tmp_path}"])
    first = run(config, Job())
    assert "agreement/earlier" not in first
    assert first["agreement/prediction"] == max(
        1.0, first["time/target_decode_ms"] / first["predicted/target_decode_ms"]
    )
    quick = {"autoregressive/time_per_output_token_ms": first["autoregressive/time_per_output_token_ms"] / 100}
    (tmp_path / first["id"] / "result.json").write_text(json.dumps(first | quick))
    second = run(config, Job())
    assert second["agreement/earlier"] > 5
    assert second["noisy"] is True


@pytest.mark.parametrize("engine", ["native", "transformers"])
def test_rows_that_end_at_their_first_token_leave_no_speedup(tmp_path, engine):
    """Every token of the checkpoint ends a sequence."""
    folder = shutil.copytree(TINY / "target", tmp_path / "checkpoint")
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((folder / name).read_text()) | {"eos_token_id": list(range(1024))}
        (folder / name).write_text(
            json.dumps(settings | {"eos_token_id": list(range(settings.get("vocab_size", 1024)))})
        )
    keys = [f"engine={engine}", f"target.path={folder}", "draft=model", "cache=full", "batch.size=1"]
    config = compose([*SMALL, *keys, "sampling.ignore_eos=false", f"runs_dir={tmp_path / 'runs'}"])
    result = run(config, Job())
    assert result["status"] == "done"
    assert result["lossless/identical"] is True
    assert result["speculative/time_to_first_token_ms"] > 0
    assert not [key for key in result if key.startswith("speedup")]
