"""Acceptance that others have published of heads, modules and drafts of blocks."""

import csv
import re
from statistics import median

import pytest

from magicdec.config.load import compose
from magicdec.config.omega import alpha_from_acceptance_length
from magicdec.costmodel.head_lengths import TABLE, published_alpha
from magicdec.costmodel.speedup import batch_rounds
from magicdec.errors import UserError
from magicdec.planning.acceptances import assumed_alpha
from magicdec.planning.resolve import resolve
from magicdec.scenarios import predict

HEAD = "sglang-eagle3-llama3.1-instruct-8b"
KEYS = ["target=llama-3.1-8b", "hardware=h100", "draft=eagle3", "draft.model.path=null"]
KINDS = ("eagle3", "mtp", "dflash")
SOURCES = re.compile(r" at [0-9a-f]{7}|arXiv \d{4}\.\d{5}|[\w-]+/[\w-]+#\d+|model card of ")
ROWS = list(csv.DictReader(TABLE.open(newline="")))


def test_published_lengths_say_where_they_are_from():
    assert len({row["name"] for row in ROWS}) >= 10
    for row in ROWS:
        assert 1 <= float(row["length"]) <= int(row["gamma"]) + 1
        assert row["licence"]
        assert row["date"]
        assert SOURCES.search(row["source"]), row


def test_published_lengths_are_of_all_kinds_of_drafts():
    tasks = {kind: {row["name"] for row in ROWS if row["draft"] == kind} for kind in KINDS}
    assert all(len(names) >= 3 for names in tasks.values()), tasks


def test_a_draft_of_several_sources_names_them_all():
    source = published_alpha("qwen3-8b-dflash-b16").source
    assert all(name in source for name in ("sglang#16818", "vllm#32206", "Model-Optimizer"))
    assert "not run here" in source


def test_a_head_is_as_well_accepted_as_its_lengths_say():
    rows = [row for row in ROWS if row["name"] == HEAD]
    alphas = [alpha_from_acceptance_length(float(r["length"]), int(r["gamma"])) for r in rows]
    estimate = published_alpha(HEAD)
    assert estimate.alpha == median(alphas)
    spread = f"{min(alphas):.2f} to {max(alphas):.2f} over {len(rows)} lengths"
    assert all(words in estimate.source for words in (spread, "MIT", "2025-12-23", "SpecBundle"))
    task = next(row for row in rows if row["gamma"] == "5")
    of_task = published_alpha(f"{HEAD}/{task['task']}")
    assert of_task.alpha <= 1
    assert task["task"] in of_task.source


def test_a_prediction_takes_published_acceptance_and_nothing_else(tmp_path):
    keys = [*KEYS, "scenario=predict", f"draft.acceptance={HEAD}", f"runs_dir={tmp_path}"]
    found = predict.predicted(resolve(compose(keys)))
    assert found.estimate == published_alpha(HEAD)
    best, tokens = found.best, found.generate_len - 1
    rounds = batch_rounds(best.gamma, found.estimate.alpha, 1, tokens)
    assert best.speedup == pytest.approx(best.times.speedup(tokens / rounds))
    given = compose([*keys, "scenario.alpha=0.5"])
    assert assumed_alpha(given, given.scenario).alpha == 0.5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sglang-eagle3-llama3.1-instruct-8", f"is not published; did you mean {HEAD}"),
        (f"{HEAD}/chess", f"{HEAD} has the tasks .*gsm8k"),
    ],
)
def test_unknown_names_are_answered_with_known_ones(name, message):
    with pytest.raises(UserError, match=message):
        published_alpha(name)


def test_a_run_that_measures_refuses_published_acceptance():
    with pytest.raises(UserError, match=r"draft\.acceptance=.*for scenario=predict"):
        compose([f"draft.acceptance={HEAD}"])
