"""Two runs compared: what differs, and whether a change is noise."""

import io
import json

import pytest

from magicdec.report import difference
from magicdec.report.rows import read_rows
from magicdec.tracking.console import Console
from tests.tracking.stores import write_run


def test_two_runs_compared(compare, tmp_path):
    values = {"cache.budget": 64, "draft.gamma": 2}
    write_run(tmp_path, "aaa1", values, {"speedup": 1.0, "alpha": 0.5})
    other = {
        "speedup": 1.5,
        "alpha": 0.5,
        "predicted/target_decode/attention_of_a_long_name_ms": 1.25,
    }
    write_run(tmp_path, "bbb2", values | {"draft.gamma": 4}, other)
    out = compare("aaa", tmp_path / "bbb2")
    lines = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip()}
    assert lines["draft.gamma"] == ["2", "4"], "a setting has no change in percent"
    assert lines["speedup"] == ["1.00x", "1.50x", "+50.0%"]
    assert not lines.keys() & {"alpha", "cache.budget"}
    assert "1 more key differs; --all for everything" in out
    assert "predicted/target_decode/attention_of_a_long_name_ms" in compare(
        "aaa", tmp_path / "bbb2", "--all"
    )
    assert "c: no such run" in compare("a", "c", is_mistaken=True)


def test_two_runs_compared_at_80_columns(tmp_path):
    """Neither their ids nor the main metrics nor the changes are folded; what does not fit is."""
    metrics = {"speedup": 1.0, "speculative/time_per_output_token_ms": 3.0}
    ids = ("0a1b2c3d4e5f-2", "6a7b8c9d0e1f-3")
    for name, draft, times in zip(ids, (2, 4), (1, 2), strict=True):
        found = {key: times * value for key, value in metrics.items()} | {
            "device": f"{'a very long name ' * 4}{name}"
        }
        write_run(tmp_path, name, {"draft.gamma": draft}, found)
    out = io.StringIO()
    Console(file=out, width=80).print(difference.difference_table(*read_rows(tmp_path), width=80))
    lines = [line.split() for line in out.getvalue().splitlines() if line.strip()]
    assert lines[0] == [*ids, "change"]
    assert ["speculative/time_per_output_token_ms", "3", "6", "+100.0%"] in lines
    assert ["draft.gamma", "2", "4"] in lines
    assert max(map(len, out.getvalue().splitlines())) <= 80


def test_a_change_is_in_percent_only_where_that_means_something():
    for key, a, b, change in (
        ("predicted/speedup_error", -0.05, 0.1221, "+17 points"),
        ("time/overhead_ms", -0.5, 1.0, "+1.5"),
        ("alpha", 0.5, 0.0, "-0.5"),
        ("alpha", 0.5, 0.6, "+20.0%"),
        ("acceptance/source", "measured", "synthetic", ""),
    ):
        assert difference._change(key, a, b) == change


@pytest.mark.parametrize(
    ("changes", "time", "is_said"),
    [
        ({"draft.gamma": 4}, 17.2, True),
        ({"draft.gamma": 4}, 10.5, False),  # within noise
        ({"batch.size": 4}, 17.2, False),  # other work
    ],
)
def test_equal_baselines_that_differ_are_pointed_out(compare, tmp_path, changes, time, is_said):
    values = {"draft.gamma": 2, "batch.size": 1}
    baseline = "autoregressive/time_per_output_token_ms"
    write_run(tmp_path, "aaa1", values, {baseline: 10.0, "device": "a cpu"})
    write_run(
        tmp_path,
        "bbb2",
        values | changes,
        {baseline: time, "device": "a cpu", "speedup_spread": 0.5},
    )
    out = compare("aaa", "bbb")
    assert ("the autoregressive baselines do the same work and differ by 72%" in out) == is_said
    assert "bbb2: the speedup spreads over 50% between repeats" in out


def test_engines_are_compared_by_what_they_wrote(report, compare, tmp_path):
    """Those of the same prompts: ours is what the others are measured by, whichever ran first."""
    wrote = {"vllm": "other", "native": "same", "transformers": "same"}
    said = [("vllm", "no"), ("native", "yes"), ("transformers", "yes")]
    for number, (engine, output) in enumerate(wrote.items()):
        found = {
            "data/fingerprint": "prompts",
            "output/fingerprint": output,
            "autoregressive/tokens_per_second": 99.5,
        }
        write_run(tmp_path, f"run{number}", {"engine.name": engine}, found)
    found = {"data/fingerprint": "other prompts", "output/fingerprint": "other"}
    write_run(tmp_path, "run3", {"engine.name": "native"}, found)
    agreement = {row["id"]: row.get("output/agrees") for row in read_rows(tmp_path)}
    assert agreement == {"run0": False, "run1": True, "run2": True, "run3": None}
    lines = [line.split() for line in report().splitlines()]
    assert lines[0] == ["id", "status", "engine", "draft", "AR", "tokens/s", "agrees"]
    assert [line[2:] for line in lines[2:5]] == [
        [engine, "self", "99.5", word] for engine, word in said
    ]
    assert "the same prompts, other autoregressive tokens" in compare(
        tmp_path / "run0", tmp_path / "run1"
    )


METRICS = {"speedup": 1.5, "acceptance_length": 2.2}
CALM = (1.0, 1.01, 1.02)


def write_pair(folder, slowness, metrics, accepted=((1, 2, 0, 2), (1, 2, 0, 2))):
    """Two runs of four rows, three rounds and gamma 2, whose repeats take `slowness` times as long
    as usual.
    """
    for name, times, numbers in zip(("aaa1", "bbb2"), slowness, accepted, strict=True):
        write_run(folder, name, {"batch.size": 4}, metrics)
        rows = [
            {
                "row": row,
                "autoregressive": [5] * 8,
                "speculative": [5] * 8,
                "rounds": [[2, number]] * 3,
            }
            | {
                "decode_s": {
                    "autoregressive": [4.0] * len(times),
                    "speculative": [(3 - number / 2) * s for s in times],
                }
            }
            for row, number in enumerate(numbers)
        ]
        (folder / name / "generations.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.mark.parametrize(
    ("slowness", "told"),
    [
        (
            CALM,
            (
                "speedup: changes by -2.5% to +2.6%, within noise; 100 more repeats of both would"
                " not tell"
            ),
        ),
        ((1.5, 1.51, 1.52), "speedup: changes by -34.7% to -31.5%, more than noise"),
        ((1.01, 1.06, 1.07), "within noise; about 2 more repeats of both would tell"),
    ],
)
def test_a_change_within_noise_is_called_that(compare, tmp_path, slowness, told):
    write_pair(tmp_path, (CALM, slowness), METRICS | {"speedup_wall": 1.2, "data/fingerprint": "f"})
    out = compare("aaa", "bbb")
    assert told in out
    assert "acceptance_length: the same" in out
    file = tmp_path / "bbb2" / "generations.jsonl"
    file.write_text(
        file.read_text().replace('"autoregressive": [4.0, 4.0, 4.0]', '"autoregressive": [4.0]', 1)
    )
    out = compare("aaa", "bbb")
    assert "acceptance_length: the same" in out
    assert "speedup, speedup_wall: not known whether the change is noise" in out, (
        "without a damaged file's times"
    )


def test_two_repeats_do_not_tell_noise(compare, tmp_path):
    write_pair(tmp_path, ((1.0, 1.1), (1.0, 1.1)), METRICS, ((1, 2, 0, 2), (2, 1, 2, 0)))
    out = compare("aaa", "bbb")
    assert "an interval needs at least 4 rows and 3 repeats (scenario.repeats) of both" in out
    assert "within noise; more repeats would not tell, more rows might" in out
