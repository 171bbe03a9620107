"""Repeats are added to a run: by sweeps that ask for more, after disturbances and after kills."""

import json
import os
from dataclasses import replace
from itertools import count
from math import pi, sqrt
from statistics import median, stdev

import numpy as np
import pytest

from magicdec import scenarios
from magicdec.measure.intervals import half_width, ratio_of_repeats, t_quantile
from magicdec.scenarios import Job, compare
from magicdec.scenarios.stored_units import Stored, Unit, Units
from magicdec.tracking.reader import load_run
from magicdec.tracking.store import Run
from magicdec.tracking.unit_files import UNIT, read_all
from tests.measure.test_metrics import GENERATION
from tests.runs import only_run, run_here
from tests.scenarios.sessions import Killed
from tests.tracking.sample import CONFIG

PRECISELY = ("resume=noisy", "scenario.precision=0.1%")


def unit(batch=0, **changes):
    return Unit(
        batch, 0.5, {"autoregressive": GENERATION, "speculative": replace(GENERATION, **changes)}
    )


# The files


def test_a_unit_is_read_back_as_it_was(tmp_path):
    stored = Stored.read(Run.open(tmp_path, "abc", CONFIG), 2)
    written = replace(
        unit(1, setup_seconds=2.5), disturbed="other programs took 20% of the processors"
    )
    stored.add(written)
    (again,) = Stored.read(stored.run, 2).units.by_batch[1]
    assert again.times() == written.times()
    assert again.to_json() == written.to_json()
    for way, generation in written.ways.items():
        assert again.ways[way].accepted_RB.equal(generation.accepted_RB)
        assert again.ways[way].committed_RB.dtype == generation.committed_RB.dtype


def test_other_tokens_and_another_gamma_are_kept_and_do_not_count(tmp_path):
    stored = Stored.read(Run.open(tmp_path, "abc", CONFIG), 1)
    added = [
        unit(),
        unit(tokens=[[1, 2, 3, 4, 6], [1, 2, 3, 4, 5]]),
        unit(gammas=[4, 4, 4]),
        unit(),
    ]
    reasons = [stored.add(one).left_out for one in added]
    assert reasons == [
        None,
        "speculative decoding wrote other tokens than in the first repeat",
        "most rounds proposed 4 tokens, in the first repeat 2",
        None,
    ]
    again = Stored.read(stored.run, 1).units
    assert (again.num_repeats, again.left_out) == (2, reasons[1:3])


def test_a_damaged_unit_is_named_and_not_written_over(tmp_path, caplog):
    run = Run.open(tmp_path, "abc", CONFIG)
    Stored.read(run, 1).add(unit())
    path = run.folder / "units" / "0-0.json"
    path.write_text(path.read_text()[:-40])
    torn = path.read_text()
    stored = Stored.read(run, 1)
    assert stored.units.num_repeats == 0
    assert str(path) in caplog.text
    stored.add(unit())
    assert (path.read_text(), Stored.read(run, 1).units.num_repeats) == (torn, 1)


def test_a_run_that_is_killed_at_any_write_goes_on_where_it_was(tmp_path, monkeypatch):
    """Each write is one rename: the process ends in front of each of them, and then behind the
    last.
    """
    replaced, writes = os.replace, count()

    def session(number_of_kill):
        """Add to the run until it has three units; return how many there were before."""
        run = (
            Run.reopen(tmp_path / "abc", CONFIG)
            if (tmp_path / "abc").exists()
            else Run.open(tmp_path, "abc", CONFIG)
        )
        stored = Stored.read(run, 1)
        before = stored.units.num_repeats
        while stored.units.num_repeats < 3:
            stored.add(unit())
        run.finish({"repeats": 3}, [], [])
        return before

    def killing(*paths):
        if next(writes) == moment:
            raise Killed
        replaced(*paths)

    known = 0
    for moment in count():
        writes = count()
        monkeypatch.setattr(os, "replace", killing)
        try:
            session(moment)
            break
        except Killed:
            monkeypatch.setattr(os, "replace", replaced)
            units = Stored.read(Run(tmp_path, "abc"), 1).units.num_repeats
            assert units >= known, "what was measured is still there"
            known = units
    assert moment > 2
    assert only_run(tmp_path)["status"] == "done"
    assert len(read_all(tmp_path / "abc" / "units", UNIT)) == 3


# Which repeats count


def units_of(logs, disturbed):
    """Units whose speculative decoding takes 1 and whose autoregressive decoding takes as long as
    given.
    """
    found = []
    for log, reason in zip(logs, disturbed, strict=True):
        ways = {"autoregressive": _timed(np.exp(log)), "speculative": _timed(1.0)}
        found.append(Unit(0, 0.0, ways, reason))
    return Units.of(found, 1)


def _timed(seconds):
    times = [seconds * end / GENERATION.round_seconds[-1] for end in GENERATION.round_seconds]
    return replace(GENERATION, round_seconds=times)


def walls(repeats, way):
    return [
        sum(max(row.decode for row in batch) for batch in times[way]) for times in repeats.times
    ]


def test_disturbed_repeats_leave_the_figures_where_enough_others_are_left():
    units = units_of([0.1, 0.9, 0.2, 0.3], [None, "a backup", None, None])
    assert np.log(walls(units.repeats(3), "autoregressive")) == pytest.approx([0.1, 0.2, 0.3])
    assert np.log(walls(units.repeats(4), "autoregressive")) == pytest.approx([0.1, 0.9, 0.2, 0.3])


def test_a_repeat_is_not_judged_by_its_own_times():
    marks = [None, "a backup", None, None, "a backup"]
    logs = np.random.default_rng(0).normal(0, 1, 5)
    for order in (range(5), [4, 3, 2, 1, 0], [2, 0, 4, 1, 3]):
        kept = np.log(walls(units_of(logs[list(order)], marks).repeats(3), "autoregressive"))
        assert kept == pytest.approx([logs[list(order)][place] for place in (0, 2, 3)])


@pytest.mark.parametrize("wanted", [3, 8])
def test_intervals_still_cover_the_truth_where_disturbed_repeats_leave(wanted):
    """Other work comes at random, slows both ways, and the slower one more. It is seen in nine of
    ten cases.
    """
    random, covered, studies = np.random.default_rng(1), 0, 600
    for _ in range(studies):
        logs, others = random.normal(0, 0.03, 12), random.random(12) < 0.3
        seen = others & (random.random(12) < 0.9)
        slowed = logs + np.where(others & ~seen, random.normal(0, 0.03, 12), 0.0)
        slowed += np.where(seen, random.normal(0.2, 0.1, 12), 0.0)
        repeats = units_of(slowed, ["other work" if one else None for one in seen]).repeats(wanted)
        # Too few are left: the interval is of a disturbed machine.
        if len(repeats.repeats) == 12 and seen.any():
            covered += 0.95
            continue
        estimate = ratio_of_repeats(walls(repeats, "autoregressive"), walls(repeats, "speculative"))
        covered += abs(estimate.value) <= half_width(estimate.parts)
    assert 0.93 <= covered / studies <= 0.97  # 0.95, within two and a half standard errors


# Runs


@pytest.fixture
def measure(tmp_path):
    """Measure a run of three repeats in a sweep of its own each time."""
    numbers = count()

    def once(*keys):
        job = Job((), tmp_path / "sweeps" / f"sweep {next(numbers)}")
        return run_here(tmp_path, "batch.num_batches=2", "scenario.repeats=3", *keys, job=job)

    return once


@pytest.fixture
def disturbed(measure):
    return disturb(measure())


def disturb(run):
    changes = {"noisy": True, "speedup_precision": 0.5}
    (run.folder / "result.json").write_text(json.dumps(run.metrics | changes))
    return run


def contents(run):
    return {path.name: path.read_bytes() for path in (run.folder / "units").iterdir()}


def seconds(run):
    """The seconds of every row, by way: (rows, repeats)."""
    rows = run.generations
    assert len({len(row["autoregressive"]) for row in rows}) == 1
    ways = ("autoregressive", "speculative")
    return {way: np.array([row["decode_s"][way] for row in rows]) for way in ways}, len(
        rows[0]["speculative"]
    ) - 1


def test_a_sweep_that_asks_for_more_repeats_adds_them(measure):
    first = measure()
    before, profile = contents(first), first.metrics["time/target_decode_ms"]
    second = measure("scenario.repeats=5")
    assert second.folder == first.folder
    assert (first.metrics["repeats"], second.metrics["repeats"]) == (3, 5)
    assert contents(second).items() >= before.items(), "what was measured is as it was"
    assert len(contents(second)) == 2 * 5
    assert second.metrics["time/target_decode_ms"] == profile
    assert second.metrics["started"] == first.metrics["started"]
    assert load_run(second.folder)["config"]["scenario"]["repeats"] == 5
    assert second.metrics["duration_s"] > first.metrics["duration_s"]
    assert measure("scenario.repeats=4").metrics == second.metrics, "five are enough for four"


def test_a_disturbed_run_is_measured_again_and_all_repeats_count(measure, disturbed):
    second = measure(*PRECISELY)
    assert second.folder == disturbed.folder
    assert (disturbed.metrics["repeats"], second.metrics["repeats"]) == (3, 6)
    both, tokens = seconds(second)
    for way, times in both.items():
        tpot = 1e3 * median(times.mean(0) / tokens)
        assert second.metrics[f"{way}/time_per_output_token_ms"] == pytest.approx(tpot)
    ratios = both["autoregressive"].sum(0) / both["speculative"].sum(0)
    assert second.metrics["speedup"] == pytest.approx(median(ratios))
    of_median = sqrt(pi / 2 * 6 / (5 + pi / 2))  # over the error of a mean of 6
    assert second.metrics["speedup_precision"] == pytest.approx(
        of_median * t_quantile(5) * stdev(np.log(ratios)) / sqrt(6)
    )
    disturb(second)
    assert measure(*PRECISELY).metrics["repeats"] == 9


def test_what_is_known_well_enough_is_skipped(measure, disturbed):
    assert measure("resume=noisy", "scenario.precision=60%").metrics["repeats"] == 3
    assert measure().metrics["repeats"] == 3, "resume=true does not look at noise"


def test_an_interrupted_run_goes_on_in_its_folder(tmp_path, measure, monkeypatch):
    generate, passes = compare._generate, []

    def interrupted(*arguments):
        passes.append(arguments)
        if len(passes) == 2 * 4 + 1:  # the second batch has one of three repeats
            raise KeyboardInterrupt
        return generate(*arguments)

    monkeypatch.setattr(compare, "_generate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure()
    stopped = only_run(tmp_path)
    assert (stopped["status"], stopped["kind"], stopped["repeats"]) == ("failed", "interrupted", 1)
    monkeypatch.setattr(compare, "_generate", generate)
    done = measure()
    assert (done.metrics["status"], done.metrics["repeats"], done.folder.name) == (
        "done",
        3,
        stopped["id"],
    )
    assert "reason" not in done.metrics
    audited = json.loads((done.folder / "audits" / "0.json").read_text())
    assert list(audited) == ["0"]


def test_a_run_that_is_stopped_while_it_is_judged_is_done_and_logged(tmp_path, monkeypatch):
    logged = []
    monkeypatch.setattr(scenarios, "log_run", lambda folder, *_: logged.append(folder) or [])
    monkeypatch.setattr(scenarios, "slowness", lambda *_: interrupt())
    with pytest.raises(KeyboardInterrupt):
        run_here(tmp_path, "tracker=[wandb]", "wandb.mode=offline")
    assert only_run(tmp_path)["status"] == "done"
    assert len(logged) == 1


def interrupt():
    raise KeyboardInterrupt


def test_a_session_that_fails_leaves_a_run_done_that_was_done(measure, monkeypatch):
    first = measure()
    monkeypatch.setattr(compare, "_generate", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        measure("scenario.repeats=4")
    assert json.loads((first.folder / "result.json").read_text()) == first.metrics
    assert "ZeroDivisionError" in (first.folder / "log.txt").read_text()


def test_a_run_by_hand_has_a_folder_of_its_own(tmp_path, measure):
    first = measure()
    by_hand = run_here(tmp_path, "batch.num_batches=2", "scenario.repeats=3")
    assert by_hand.folder.name == f"{first.folder.name}-2"


def test_tokens_that_never_repeat_end_the_session(measure, monkeypatch):
    first = measure()
    generate = compare._generate

    def others(*arguments):
        generation = generate(*arguments)
        generation.tokens[0][0] += 1
        return generation

    monkeypatch.setattr(compare, "_generate", others)
    second = measure("scenario.repeats=9")
    assert (second.metrics["repeats"], second.metrics["repeats_left_out"]) == (
        3,
        compare.MOST_LEFT_OUT,
    )
    assert second.metrics["speedup"] == first.metrics["speedup"]
    assert "other tokens" in second.metrics["repeats_left_out_why"]


@pytest.mark.slow
def test_added_repeats_update_the_same_run_of_weights_and_biases(measure):
    first = measure("tracker=[wandb]", "scenario.repeats=1")
    second = measure("tracker=[wandb]", "scenario.repeats=2")
    logged = sorted((second.folder / "wandb").glob("offline-run-*"))
    assert len(logged) == 2
    assert all(path.name.endswith(f"-{first.folder.name}") for path in logged)
    files = {path.name: path for path in logged[-1].glob("*.wandb")}
    assert files, "the second session is there, to be sent in place of the first"
