"""Runs over data with categories, and over a trace with times of arrival."""

import json

import pytest

from magicdec.report.page import html_page
from magicdec.report.rows import read_rows
from magicdec.units import WAYS
from tests.runs import run_here
from tests.serving.conftest import SETTINGS


def stored(folder, content, *overrides):
    """The result of a run on these rows, with the lines of its history and generations."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in content))
    run = run_here(
        folder / "runs", "batch.size=3", "batch.context_len=60", f"data.path={file}", *overrides
    )
    return run.metrics | {"history": run.history, "generations": run.generations}


@pytest.mark.slow
def test_acceptance_and_tokens_of_each_category(tmp_path, capsys):
    rows = [
        {"kind": kind, "text": f"def {kind}{n}(self): return " * 2}
        for n, kind in enumerate("aab" * 2)
    ]
    keys = [
        "data=jsonl",
        "data.prompt=text",
        "data.category=kind",
        "cache.budget=24",
    ]
    result = stored(tmp_path, rows, *keys, "batch.num_batches=2")
    assert [
        (result[f"category/{name}/rows"], result[f"category/{name}/tokens"]) for name in "ab"
    ] == [(4, 48), (2, 24)]
    assert [row["category"] for row in result["generations"]] == ["a", "b", "a", "b", "a", "a"]
    for name in "ab":
        rounds = [
            pair
            for row in result["generations"]
            if row["category"] == name
            for pair in row["rounds"]
        ]
        accepted = sum(accepted for _, accepted in rounds)
        assert result[f"category/{name}/acceptance_rate"] == pytest.approx(
            accepted / sum(gamma for gamma, _ in rounds)
        )
        assert result[f"category/{name}/acceptance_length"] == pytest.approx(
            1 + accepted / len(rounds)
        )
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["category", "rows", "tokens", "acceptance", "rate", "length"] in shown
    assert ["a", "4", "48"] in [line[:3] for line in shown]
    assert "acceptance_length by category" in html_page(read_rows(tmp_path / "runs"), "")


@pytest.mark.parametrize("draft", ["self", "none"])
def test_a_trace_is_replayed_with_its_arrivals_and_lengths(tmp_path, draft, capsys):
    rows = [
        {
            "at": 1000 + 100 * n,
            "in": 20 + n,
            "out": 1 + 2 * n,
            "model": "large" if n % 2 else "small",
        }
        for n in range(5)
    ]
    fields = ["data.prompt_len=in", "data.output_len=out", "data.arrival=at", "data.category=model"]
    load = ["scenario.concurrencies=[]", "scenario.replays=[1,4]", "scenario.num_requests=4"]
    overrides = [
        *SETTINGS,
        "data=jsonl",
        *fields,
        "data.arrival_unit_s=0.001",
        *load,
        f"draft={draft}",
    ]
    result = stored(tmp_path, rows, *overrides)
    assert [level["replay"] for level in result["history"]] == [1, 4]
    assert "replay" not in result
    assert all(
        level["autoregressive/wall_s"] >= 0.3 / level["replay"] for level in result["history"]
    )
    assert [row["context_len"] for row in result["generations"]] == [20, 21, 22, 23]
    assert [len(row["autoregressive"]) for row in result["generations"]] == [1, 3, 5, 7]
    assert [result[f"category/{name}/tokens"] for name in ("large", "small")] == [3 + 7, 1 + 5]
    for way in WAYS[: 1 if draft == "none" else 2]:
        for name in ("large", "small"):
            assert result[f"category/{name}/{way}/time_to_first_token_ms_p50"] > 0
    assert [row["load.replay"] for row in read_rows(tmp_path / "runs")] == [1, 4]
    out = capsys.readouterr().out
    assert "trace at 4x" in out
    assert "up to 12 new tokens each" in " ".join(out.split())
    assert result.get("lossless/identical", True) is True
