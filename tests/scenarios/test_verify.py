"""scenario=verify: shares of the best gamma, from times that are given, and schedules that are read
back.
"""

import itertools
import json
from dataclasses import replace

import pytest

from magicdec.config.load import compose
from magicdec.costmodel.engine_settings import read_vllm
from magicdec.errors import UserError
from magicdec.measure import metrics
from magicdec.planning import build
from magicdec.scenarios import verify
from tests.runs import outcome, shown

SMALL = [
    "scenario=verify",
    "hardware=cpu",
    "batch.generate_len=6",
    "cache.budget=64",
    "scenario.repeats=2",
]
SMALL += ["scenario.batch_sizes=[1,2]", "scenario.context_lens=[128,256]", "scenario.gammas=[1,2]"]
PER_TOKEN_MS = {0: 10.0, 1: 8.0, 2: 5.0, 4: 20.0}  # by gamma, in the order of passes


@pytest.fixture
def timed(monkeypatch):
    """Rounds take what PER_TOKEN_MS says. Collects the gammas in the order of their passes."""
    passes: list[int] = []
    decoded = verify._decoded
    monkeypatch.setattr(
        verify, "_decoded", lambda batch, gamma: passes.append(gamma) or decoded(batch, gamma)
    )
    times = itertools.cycle(PER_TOKEN_MS.values())  # asked for after each repeat
    monkeypatch.setattr(metrics, "time_per_output_token_ms", lambda rows: next(times))
    return passes


def test_a_schedule_is_held_against_every_gamma_in_turn(timed, tmp_path):
    entries = [[1, 1, 1, 200, 4], [2, 8, 1, 200, 1], [1, 8, 201, 9999, 2]]
    schedule = {"method": "ngram", "num_speculative_tokens_per_batch_size": entries}
    (tmp_path / "schedule.json").write_text(json.dumps(schedule))
    found = outcome(*SMALL, f"scenario.file={tmp_path}/schedule.json")
    # A warm-up, and two repeats; the file's own gamma is measured, too.
    assert timed[:12] == [0, 1, 2, 4] * 3
    lines = {(line["batch_size"], line["context_len"]): line for line in found.history}
    assert {line["best_gamma"] for line in found.history} == {2}
    chosen = {cell: line["gamma"] for cell, line in lines.items()}
    assert chosen == {(1, 128): 4, (2, 128): 1, (1, 256): 2, (2, 256): 2}
    assert lines[2, 128]["share_of_best"] == pytest.approx(5 / 8)
    assert lines[1, 256]["speedup/gamma_2"] == pytest.approx(2.0)
    assert found.metrics["verify/worst_share"] == pytest.approx(5 / 20)
    assert found.metrics["verify/median_share"] == pytest.approx((5 / 8 + 1) / 2)
    assert {line["gamma_by_batch"] for line in found.history} == {2}, "the best one everywhere"
    assert found.metrics["verify/worst_share_by_batch"] == 1
    said = "by batch alone 0.0% at worst and 0.0% on average; by batch and context 75.0% at worst"
    assert said in " ".join(shown(found.view).split())


def test_a_schedule_that_was_rewritten_makes_another_run(tmp_path):
    """The path is the same, and the sweep must not skip what the old schedule has done."""
    file = tmp_path / "schedule.json"
    found = []
    for gamma in (1, 2):
        schedule = {"num_speculative_tokens_per_batch_size": [[1, 8, gamma]]}
        file.write_text(json.dumps(schedule))
        found.append(verify.prepare(compose([*SMALL, f"scenario.file={file}"])).fingerprints)
    assert found[0].keys() == found[1].keys()
    changed = [key for key in found[0] if found[0][key] != found[1][key]]
    assert changed == ["scenario.file"]


def test_without_a_file_the_schedule_is_predicted_from_the_acceptance_measured_here():
    found = outcome(*SMALL)
    assert len(found.history) == 4
    for line in found.history:
        assert 0 < line["alpha"] <= 1
        assert line["gamma"] in (0, 1, 2)
        chosen, best = (line[f"speedup/gamma_{line[gamma]}"] for gamma in ("gamma", "best_gamma"))
        assert line["share_of_best"] == pytest.approx(chosen / best)


def test_a_schedule_of_measured_steps_takes_the_gamma_whose_rounds_were_fastest(monkeypatch):
    # Of a round without a draft, with gamma 1, with gamma 2.
    seconds = itertools.cycle([1.0, 0.01, 100.0])
    monkeypatch.setattr(metrics, "mean_round_s", lambda generation: next(seconds))
    found = outcome(*SMALL, "scenario.steps=measured")
    assert {line["gamma"] for line in found.history} == {1}
    assert all(
        line["predicted/speedup/gamma_1"] > 90 > 1 > line["predicted/speedup/gamma_2"]
        for line in found.history
    )


def test_acceptance_is_that_of_prompts_of_their_own_lengths(monkeypatch):
    """Rows are shorter than `scenario.context_lens`. Were rounds free, a schedule would propose as
    much as it can.
    """
    prompts = build.prompts

    def shorter(*arguments):
        whole = prompts(*arguments)
        return replace(
            whole, tokens=[row[: len(row) - 20 - 2 * i] for i, row in enumerate(whole.tokens)]
        )

    def equal(plan, scenario, contexts):
        return {
            (rows, context): dict.fromkeys((0, 1, 2), 1.0)
            for rows in (1, 2)
            for context in contexts
        }

    monkeypatch.setattr(build, "prompts", shorter)
    monkeypatch.setattr(verify, "_predicted_steps", equal)
    found = outcome(*SMALL)
    assert [line["context_len"] for line in found.history] == [107, 107, 235, 235]
    for line in found.history:
        assert line["gamma"] > 0
        assert line["predicted/speedup/gamma_2"] > 1.2


def ending_at_once(monkeypatch, rows: tuple[int, ...]) -> None:
    """Let every row of batches of these sizes end at its first token."""
    start = verify.NativeEngine.open

    def opened(self, prompts):
        batch = start(self, prompts)
        state = batch.decoder.state
        if len(prompts) in rows:
            state.limit_B.copy_(state.prompt_len_B + 1)
        return batch

    monkeypatch.setattr(verify.NativeEngine, "open", opened)


@pytest.mark.parametrize("steps", ["predicted", "measured"])
def test_a_cell_whose_rows_all_end_at_their_first_token_is_left_out(steps, monkeypatch, caplog):
    ending_at_once(monkeypatch, (1,))
    found = outcome(*SMALL, f"scenario.steps={steps}")
    assert [line["batch_size"] for line in found.history] == [2, 2]
    assert "left out: 1 rows of 128 tokens" in caplog.text


def test_where_every_row_ends_at_its_first_token_nothing_is_verified(monkeypatch):
    ending_at_once(monkeypatch, (1, 2))
    with pytest.raises(UserError, match="every row ends at its first token"):
        outcome(*SMALL)


def test_the_turns_of_a_small_batch_take_one_prompt_after_another(monkeypatch):
    opened: list[list[list[int]]] = []
    start = verify.NativeEngine.open
    monkeypatch.setattr(
        verify.NativeEngine, "open", lambda self, rows: opened.append(rows) or start(self, rows)
    )
    outcome(*SMALL, "scenario.context_lens=[128]", "scenario.repeats=3")
    *_, small, other, both = opened  # after what chooses the chunks of the prefill
    assert both == small + other
    assert small != other


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["draft=none"], "measures a draft"),
        (["draft.synthetic_acceptance=0.5"], "without synthetic_acceptance"),
        (["scenario.file=missing.json"], "missing.json: .*No such file"),
        (["scenario.file=/dev/zero"], "^scenario.file=/dev/zero: not a regular file$"),
    ],
)
def test_what_cannot_be_verified_is_refused(keys, said):
    with pytest.raises(UserError, match=said):
        verify.prepare(compose([*SMALL, *keys]))


@pytest.mark.parametrize(
    "config",
    [
        [],
        {},
        {"num_speculative_tokens_per_batch_size": []},
        *(
            {"num_speculative_tokens_per_batch_size": [row]}
            for row in ([1, 2], [1, 2, "3"], [1, 2, -3], 5)
        ),
    ],
)
def test_a_file_without_a_schedule_is_no_schedule(config):
    with pytest.raises(ValueError, match="must hold"):
        read_vllm(config)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"num_speculative_tokens_per_batch_size": [[1, 2, 1025]]}', "gamma 1,025 is above 1,024"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_file_that_nothing_can_be_done_with_is_named_with_its_key(tmp_path, text, said):
    file = tmp_path / "file.json"
    file.write_text(text)
    with pytest.raises(UserError) as refused:
        verify.prepare(compose([*SMALL, f"scenario.file={file}"]))
    assert str(refused.value) == f"scenario.file={file}: {said}"
