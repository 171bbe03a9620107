"""Figures of sweeps, and the command that draws them."""

from itertools import product

import pytest

from magicdec.commands.figure import main as figure_command
from magicdec.errors import UserError
from magicdec.report import figures, picture, query
from magicdec.report.by_context import rows_by_context
from magicdec.report.charts import COLOURS
from magicdec.report.rows import read_runs, rows_of
from tests.pixels import spots
from tests.tracking.stores import write_run


def test_a_sweep_is_drawn_over_what_it_varies(tmp_path):
    machines = {"a100": 2039.0, "h100": 3350.0}
    rows = [
        {
            "batch.size": batch,
            "batch.context_len": 512,
            "hardware.name": name,
            "hardware.bandwidth_gbs": bandwidth,
        }
        | {
            "speedup": 1.0 + batch / 10,
            "time/draft_ms": 1.0,
            "time/verify_ms": 3.0,
            "time/target_decode_ms": 2.0,
        }
        for name, bandwidth in machines.items()
        for batch in (1, 8)
    ]
    drawn = figures.draw_sweep(rows, tmp_path / "figures", "magicdec report runs")
    assert [path.name for path in drawn] == [
        "speedup.png",
        "ratios.png",
    ], "nothing is known of intensity"
    for path in drawn:
        assert all(spots(path, colour) for colour in COLOURS[:2]), "a colour for each machine"
    points = figures.points(rows, "batch.size", "hardware.name", figures.SPEEDUPS)
    assert [(point["x"], point["series"], point["kind"], point["y"]) for point in points] == [
        (batch, name, "measured", 1.0 + batch / 10) for name in machines for batch in (1, 8)
    ]
    with pytest.raises(UserError, match="no speedups"):
        figures.draw_sweep([{"batch.size": 1}], tmp_path, "")


@pytest.mark.parametrize("kind", picture.FORMATS)
def test_a_figure_holds_its_caption_and_its_command(report, tmp_path, kind):
    for number, (budget, policy) in enumerate(product((64, 512), ("snapkv", "streaming"))):
        found = {
            "speedup": 1 + number / 10,
            "speedup_ci95": [1.0, 2.0],
            "speedup_spread": 0.3 * (number == 3),
        }
        write_run(tmp_path, f"run{number}", {"cache.budget": budget, "cache.policy": policy}, found)
    out = tmp_path / f"figure.{kind}"
    arguments = [
        str(tmp_path),
        "--x",
        "budget",
        "--series",
        "policy",
        "--format",
        kind,
        "--out",
        str(out),
    ]
    assert report(*arguments, runs=None, command=figure_command) == f"written {out}\n"
    content = out.read_bytes()
    command = f"magicdec figure {' '.join(arguments)}"
    assert (command.encode("utf-16-be").hex() if kind == "pdf" else command).encode() in content
    if kind == "svg":
        text = content.decode()
        for words in (
            "cache.budget",
            "cache.policy",
            "streaming",
            "Held constant: target.name tiny",
            ">!</text>",
        ):
            assert words in text
        assert "Bars: 95% intervals. !: a noisy measurement." in text


def test_a_figure_of_nothing_and_of_what_does_not_mix(report, tmp_path):
    for number, source in enumerate(("measured", "synthetic")):
        write_run(
            tmp_path,
            f"run{number}",
            {"draft.gamma": number + 1},
            {"speedup": 1.5, "acceptance/source": source},
        )
    mixed = (
        "the runs differ in acceptance/source (measured, synthetic), and their median means nothing"
    )
    for typed, words in (
        ("--x gamma", mixed),
        (
            "--x gamma --where source=measured --y device",
            "no run that is done has numbers for device",
        ),
        ("--x context", "--x context: no run has acceptance by context; scenario=serve"),
        ("--x gama", "--x gama: no run has such a key; did you mean"),
        ("--x gamma --where source=measured --out a.jpg", "must end in one of .pdf, .png, .svg"),
        (
            "--x gamma --where source=measured --out a.svg --format png",
            "a.svg: does not end in .png, as --format png",
        ),
    ):
        assert words in report(*typed.split(), command=figure_command, is_mistaken=True)


def test_acceptance_is_drawn_by_context(report, tmp_path):
    buckets = {512: (3.0, [2.8, 3.2]), 2048: (2.0, [1.5, 2.5])}
    metrics = {"acceptance_length": 2.4, "acceptance_length_ci95": [2.0, 3.0]}
    for tokens, (length, ends) in buckets.items():
        metrics |= {
            f"context/{tokens}/acceptance_length": length,
            f"context/{tokens}/acceptance_length_ci95": ends,
        }
    metrics |= {"acceptance/source": "measured", "device": "a CPU"}
    write_run(tmp_path, "loaded", {"scenario.name": "serve"}, metrics)
    rows = list(rows_by_context(rows_of(read_runs(tmp_path)[0])))
    points = figures.points(rows, "context", None, {"length": "acceptance_length"})
    assert [(point["x"], point["y"], [point["low"], point["high"]]) for point in points] == [
        (tokens, length, ends) for tokens, (length, ends) in buckets.items()
    ]
    assert query.constants(rows)["device"] == "a CPU"
    out = tmp_path / "by-context.png"
    arguments = (str(tmp_path), "--x", "context", "--out", str(out))
    assert report(*arguments, runs=None, command=figure_command) == f"written {out}\n"
    assert spots(out, COLOURS[0])
    drawn = metrics | {"acceptance/source": "synthetic"}
    write_run(tmp_path, "synthetic", {"scenario.name": "serve"}, drawn)
    mixed = "the runs differ in acceptance/source (measured, synthetic)"
    assert mixed in report("--x", "context", command=figure_command, is_mistaken=True)
