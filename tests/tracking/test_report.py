"""The report on the terminal: questions, groups, exports, comparisons, and mistakes in one line."""

import csv
import io
import json
import re
import time
from itertools import product

import pytest

from magicdec.commands import clean
from magicdec.commands.compare import main as compare_command
from magicdec.commands.figure import main as figure_command
from magicdec.commands.report import main
from magicdec.errors import UserError
from magicdec.report import difference, figures, page, picture, query
from magicdec.report.charts import COLOURS
from magicdec.report.query import informative, varying
from magicdec.report.rows import read_rows, rows_of_file
from magicdec.tracking.columns import flatten
from magicdec.tracking.console import Console
from magicdec.tracking.lock import locked
from magicdec.tracking.sweep import record
from tests.pixels import spots
from tests.programs import ROOT
from tests.tracking.stores import AXES, write_load, write_run, write_store

LOADS = ROOT / "tests" / "peers" / "results"
MANY, SECONDS = 10_000, 40  # it takes about 6 s on a free core; the bound is for crowded ones


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores") / "runs"
    write_store(folder, 200)
    return folder


@pytest.fixture
def report(tmp_path, capsys):
    """Return what the command prints of a store, that of the test unless it is given; or its
    mistake, one line.
    """

    def run(*arguments, runs=tmp_path, is_mistaken=False, command=main):
        code = command([*([str(runs)] if runs else []), *map(str, arguments)])
        out, err = capsys.readouterr()
        if not is_mistaken:
            assert code == 0, err
            return out
        assert (code, err.count("\n"), err[:7]) == (2, 1, "error: ")
        return err

    return run


@pytest.fixture
def compare(report, tmp_path):
    """Return what the comparison of two runs prints."""
    return lambda *names, **more: report(
        *names, "--runs-dir", tmp_path, runs=None, command=compare_command, **more
    )


ROWS = [
    {
        "id": "a",
        "status": "done",
        "cache.budget": 64,
        "speedup": 1.5,
        "target.name": "tiny",
        "ok": True,
    },
    {"id": "b", "status": "done", "cache.budget": 128, "speedup": 0.5, "target.name": "Llama"},
    {"id": "c", "status": "failed", "cache.budget": 128, "target.name": "tiny"},
]


def ids(rows):
    return "".join(row["id"] for row in rows)


def test_tests():
    wanted = {
        "cache.budget=128": "bc",
        "budget=64": "a",
        "cache.budget!=128": "a",
        "speedup>1": "a",
    }
    wanted |= {
        "speedup<=0.5": "b",
        "speedup=null": "c",
        "name~la": "b",
        "name=llama": "b",
        "ok=true": "a",
    }
    wanted |= {"budget>=64 status=done": "ab"}
    assert {test: ids(query.select(ROWS, [test])) for test in wanted} == wanted
    with pytest.raises(UserError, match="none of 3 runs"):
        query.select(ROWS, ["name~LA"])


def test_a_column_is_found_by_its_heading_too():
    known = ["draft.gamma", "predicted/gamma/x", "acceptance_rate", "predicted/speedup_error"]
    known += ["target.name", "target.path"]
    wanted = {
        "accepted": "acceptance_rate",
        "off": "predicted/speedup_error",
        "target": "target.name",
    }
    wanted |= {"gamma": "draft.gamma"}
    assert {typed: query.find_key(known, typed, "--columns") for typed in wanted} == wanted


def test_sorting_puts_what_lacks_the_key_last():
    assert ids(query.sort(ROWS, "speedup")) == "bac"
    assert ids(query.sort(ROWS, "speedup", descending=True)) == "abc"


def test_types_are_nullable():
    rows = [
        {"draft.gamma": 1, "alpha": 0.5, "fits": True, "draft.name": "self"},
        {},
        {"mixed": 1},
        {"mixed": "a"},
    ]
    found = query.table(rows)
    assert [str(kind) for kind in found.dtypes] == [
        "Int64",
        "Float64",
        "boolean",
        "string",
        "object",
    ]
    assert [found["draft.gamma"][0], found["draft.gamma"].isna().sum()] == [1, 3]
    assert query.table([{"a": 10**30}])["a"][0] == 10**30


def test_groups_are_medians_over_the_runs_that_are_done():
    rows = [{"id": s, "status": "done", "cache.budget": 64, "speedup": s} for s in (1, 2, 9)] + ROWS
    lines = query.group(rows, ["budget"], mix=True)
    assert [(line["cache.budget"], line["runs"], line["speedup"]) for line in lines] == [
        (64, 4, 1.75),
        (128, 1, 0.5),
    ]


@pytest.fixture
def drafts(tmp_path):
    """Runs of two drafts, one of which has no cache, at two gammas each."""
    for number, (draft, gamma) in enumerate(product(("self", "ngram"), (1, 2))):
        values = {
            "draft.name": draft,
            "draft.gamma": gamma,
            "cache.policy": "streaming",
            "cache.budget": 64,
        }
        speedup = {"self": 0.4, "ngram": 1.5}[draft] + gamma / 100
        write_run(tmp_path, f"run{number}", values, {"speedup": speedup})
    return tmp_path


def test_a_group_has_one_draft_and_says_what_else_differs(report, drafts):
    lines = query.group(read_rows(drafts), ["cache.policy", "cache.budget"])
    shown = [
        (line["draft.name"], line.get("cache.policy"), round(line["speedup"], 3), line["differ"])
        for line in lines
    ]
    assert shown == [
        ("self", "streaming", 0.415, "draft.gamma"),
        ("ngram", None, 1.515, "draft.gamma"),
    ]
    out = report("--group-by", "policy,budget")
    assert re.search(r"^streaming +64 +self +2 +0.4[12]x", out, re.M)
    assert re.search(r"^ +ngram +2 +1.5[12]x", out, re.M)
    assert "medians over the runs that are done, which also differ in draft.gamma\n" in out
    assert "differ in" not in report("--group-by", "draft,gamma")
    (mixed,) = query.group(read_rows(drafts), ["batch.size"], mix=True)
    assert mixed["differ"] == "draft.name, cache.policy, cache.budget, draft.gamma"


def test_a_draft_without_a_cache_has_no_policy(report, compare, drafts):
    assert "holds for none" in report("--where", "draft=ngram policy=streaming", is_mistaken=True)
    assert [
        ids(query.select(read_rows(drafts), [f"policy={policy}"]))
        for policy in ("streaming", "null")
    ] == [
        "run0run1",
        "run2run3",
    ]
    assert re.search(r"^cache.policy +streaming *$", compare("run0", "run2"), re.M)


def test_targets_predictions_and_drawn_acceptances_do_not_mix_unless_told():
    kinds = [("compare", "speedup", "measured"), ("compare", "speedup", "synthetic")]
    kinds += [("predict", "predicted/speedup", "measured")]
    rows = [
        {"id": f"{target}{kind}", "status": "done", "cache.budget": 64, "target.name": target}
        | {"scenario.name": kind[0], kind[1]: speedup, "acceptance/source": kind[2]}
        for target, speedup in (("tiny", 1.0), ("Llama", 3.0))
        for kind in kinds
    ]
    names = ("target.name", "scenario.name", "acceptance/source")
    lines = query.group(rows, ["cache.budget"])
    assert [tuple(line[name] for name in (*names, "runs")) for line in lines] == [
        (target, scenario, source, 1)
        for target in ("Llama", "tiny")
        for scenario, _, source in kinds
    ]
    (mixed,) = query.group(rows, ["cache.budget"], mix=True)
    assert (mixed["runs"], mixed["speedup"], mixed["predicted/speedup"]) == (6, 2.0, 2.0)
    (alone,) = query.group(rows[:1], ["cache.budget"])
    assert (alone["runs"], alone.keys() & {*names}) == (1, set())


def test_the_notes_of_groups_are_those_of_their_runs(report, tmp_path):
    published = {
        "published/speedup": 2.0,
        "published/predicted_speedup": 1.9,
        "published/table": "3c",
    }
    write_run(tmp_path, "a", {"scenario.name": "predict", "draft.gamma": 2}, published)
    write_run(
        tmp_path,
        "b",
        {"scenario.name": "compare", "draft.gamma": 2},
        {"speedup": 1.0, "speedup_spread": 0.5},
    )
    write_run(tmp_path, "c", {"scenario.name": "compare", "draft.gamma": 2}, failed="out_of_memory")
    out = report("--group-by", "gamma")
    assert "the MagicDec paper's Table 3c, which has 1 of these 3" in out
    assert "1 failed" in out
    assert "1 noisy, marked !: " in out
    assert re.findall(r"(?m)^(compare|predict) *$", out) == ["compare", "predict"]
    assert len(re.findall(r"(?m)^ +2 ", out)) == 2
    assert len(re.findall(r"(?m)^ +2 ", report("--group-by", "gamma", "--mix"))) == 1


def test_step_errors_stand_next_to_the_speedups_and_the_impossible_is_marked(report, tmp_path):
    predicted = {
        "predicted/speedup": 0.96,
        "predicted/speedup_error": -0.04,
        "predicted/step_error": -0.95,
    }
    write_run(
        tmp_path,
        "a",
        {},
        {"speedup": 1.0, "time/overhead_ms": -188.0, "time/round_ms": 475.0} | predicted,
    )
    write_run(
        tmp_path,
        "b",
        {"draft.gamma": 2},
        {"speedup": 1.0, "time/overhead_ms": -1.0, "time/round_ms": 475.0},
    )
    out = report()
    assert re.search(r"predicted +off +steps off", out)
    assert re.search(r"0\.96x +-4% +-95%", out)
    assert "1 with an impossible overhead" in out


def test_rows_are_flat_and_say_what_varies():
    run = {"id": "x", "status": "done", "config": {"a": {"b": [1, 2], "c": None}}}
    assert flatten(run) == {"a.b": "[1,2]", "id": "x", "status": "done"}
    assert varying(ROWS) == ["target.name", "cache.budget"]


def test_what_an_option_brings_along_tells_nothing_more():
    names = {"tiny": ("path/tiny", 4), "large": ("path/large", 4)}
    rows = [
        {"target.name": n, "target.path": p, "cache.num_sink": s, "cache.budget": b}
        for n, (p, s) in names.items()
        for b in (64, 128)
    ]
    assert varying(rows) == ["target.name", "cache.budget", "target.path"]
    assert informative(rows) == ["target.name", "cache.budget"]
    rows[0] |= {"target.path": "path/other", "cache.num_sink": 0}
    assert informative(rows) == ["target.name", "cache.budget", "cache.num_sink", "target.path"]


def test_the_table_shows_what_differs(report, store):
    out = report(
        "--where", "speedup>1", "--sort", "speedup", "--descending", "--limit", 3, runs=store
    )
    for word in ("policy", "budget", "speedup", "tokens/s", "3 of", "SYNTHETIC"):
        assert word in out
    assert re.search(r"\bspeedup +speedup_wall\b", out)  # side by side
    out = report("--group-by", "policy,budget", runs=store)
    assert "medians" in out
    assert all(re.search(rf"\nsnapkv +{budget} +measured ", out) for budget in AXES["cache.budget"])
    assert "batch.size: too much" in report(
        "--columns", "id,reason", "--where", "status=failed", runs=store
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--where", "bugdet=4"], "did you mean budget?"),
        (["--where", "budget"], "not of the form"),
        (["--where", "speedup>abc"], "speedup>abc: abc is not a number, and > compares numbers"),
        (["--where", "speedup>100"], "holds for none of 200 runs"),
        (["--sort", "tokens_per_second"], "which one?"),
        (["--sweep", "mine"], "no such sweep"),
        (["--html", "/dev/null/page.html"], "cannot be written"),
        (["--columns", "spedup"], "did you mean speedup?"),
    ],
)
def test_mistakes_are_one_line(report, store, arguments, said):
    assert said in report(*arguments, runs=store, is_mistaken=True)


def test_no_store_and_one_of_nothing_but_mistakes_are_mistakes(report, tmp_path):
    assert "no such folder" in report(runs=tmp_path / "nowhere", is_mistaken=True)
    assert "holds no runs" in report(is_mistaken=True)
    write_run(tmp_path, "ccc", failed="invalid")
    assert "left out: 1 mistyped; --all shows them" in report(is_mistaken=True)


def test_csv_holds_every_column(report, store, tmp_path):
    target = tmp_path / "new" / "runs.csv"
    report("--csv", target, runs=store)
    with target.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 200
    assert {"id", "cache.budget", "speculative/tokens_per_second", "reason"} <= lines[0].keys()
    assert {line["lossless/identical"] for line in lines} == {"true", ""}


@pytest.mark.extra
def test_parquet(report, store, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    report("--parquet", tmp_path / "runs.parquet", runs=store)
    table = parquet.read_table(tmp_path / "runs.parquet")
    assert table.num_rows == 200
    assert str(table.schema.field("speedup").type) == "double"
    assert str(table.schema.field("cache.budget").type) == "int64"


def test_a_sweep_is_the_runs_of_its_folders_in_the_order_of_its_jobs(tmp_path):
    """Whichever ran first, or was done before."""
    grid, other = "2026-01-02_00-00-00-1_grid", "2026-01-02_00-00-00"
    sweeps = {
        "2026-01-01_00-00-00_grid": ["c"],
        grid: ["b", "a"],
        "2026-01-02_00-00-00_another_grid": ["d"],
    }
    for folder, names in (sweeps | {other: ["d", "b", "a"]}).items():
        for job, name in reversed(list(enumerate(names))):
            record(tmp_path / "sweeps" / folder, job, name, [])
        with (tmp_path / "sweeps" / folder / "jobs.jsonl").open("a") as file:
            file.write('{"id": "0000')
    for name in "abcd":
        write_run(tmp_path, name, {"draft.gamma": 2})
    assert sorted(ids(read_rows(tmp_path, "grid"))) == ["a", "b", "c"]
    assert [ids(read_rows(tmp_path, name)) for name in (grid, other, None)] == ["ba", "dba", "abcd"]


def test_predictions_have_a_table_of_their_own(report, tmp_path):
    """It shows the best gamma, and the alpha from which speculation pays where no acceptance is
    known.
    """
    predicted = {
        "predicted/gamma": 3,
        "predicted/break_even_alpha": 0.7071,
        "predicted/speedup": 1.2,
    }
    write_run(
        tmp_path, "a", {"draft.gamma": 1}, {"speedup": 1.5, "acceptance_rate": 0.5} | predicted
    )
    write_run(
        tmp_path, "b", {"draft.gamma": 2}, {"speedup": 0.9, "acceptance_rate": 0.25} | predicted
    )
    unknown = {key: value for key, value in predicted.items() if key != "predicted/speedup"}
    for number in range(2):
        write_run(
            tmp_path, f"c{number}", {"scenario.name": "predict", "batch.size": number}, unknown
        )
    lines = [line.split() for line in report().splitlines() if line.strip()]
    assert lines[0] == ["compare"]
    assert lines[1] == ["id", "status", "speedup", "gamma", "accepted", "predicted"]
    assert lines[5] == ["predict"]
    assert lines[6] == ["id", "status", "size", "best", "gamma", "pays", "from", "alpha"]
    assert lines[8] == ["c0", "done", "0", "3", "0.7071"]
    out = report("--columns", "id,draft.gamma,predicted/gamma")
    assert len(re.findall(r"(?m)^(a|b|c0|c1) ", out)) == 4, "a single table where columns are named"


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


def test_no_line_of_a_pipe_ends_in_blanks(report, compare, drafts):
    for out in (report(), report("--group-by", "policy"), compare("run0", "run2")):
        assert [line for line in out.splitlines() if line != line.rstrip()] == []


def test_two_runs_compared_at_80_columns(tmp_path):
    """Neither their ids nor the main metrics nor the changes are folded; what does not fit is."""
    metrics, ids = (
        {"speedup": 1.0, "speculative/time_per_output_token_ms": 3.0},
        ("0a1b2c3d4e5f-2", "6a7b8c9d0e1f-3"),
    )
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
    values, baseline = (
        {"draft.gamma": 2, "batch.size": 1},
        "autoregressive/time_per_output_token_ms",
    )
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


def test_a_command_to_copy_leaves_out_what_is_not_the_runs():
    stored = json.dumps(["+sweeps=grid", "draft.gamma=4", "runs_dir=x", "data.path='a b'"])
    assert (
        page.command({"overrides": stored})
        == "magicdec +sweeps=grid draft.gamma=4 'data.path='\"'\"'a b'\"'\"''"
    )


@pytest.mark.slow
def test_ten_thousand_runs_in_seconds(report, tmp_path):
    write_store(tmp_path / "runs", MANY)
    start = time.perf_counter()
    report("--html", tmp_path / "page.html", "--csv", tmp_path / "runs.csv", runs=tmp_path / "runs")
    assert time.perf_counter() - start < SECONDS
    assert (tmp_path / "page.html").stat().st_size < 5e6


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
        ("--x gama", "--x gama: no run has such a key; did you mean"),
        ("--x gamma --where source=measured --out a.jpg", "must end in one of .pdf, .png, .svg"),
        (
            "--x gamma --where source=measured --out a.svg --format png",
            "a.svg: does not end in .png, as --format png",
        ),
    ):
        assert words in report(*typed.split(), command=figure_command, is_mistaken=True)


def test_a_run_under_load_is_a_row_per_level(report, tmp_path):
    """A level lacks what it has not measured: not even the run's own figures, those of its last
    level, fill it.
    """
    write_load(tmp_path, {1: (100.0, 150.0), 2: (180.0, None), 8: (500.0, 450.0)})
    rows = read_rows(tmp_path)
    assert [(row["load.concurrency"], row.get("speedup")) for row in rows] == [
        (1, 1.5),
        (2, None),
        (8, 0.9),
    ]
    assert [row.get("speculative/tokens_per_second") for row in rows] == [150.0, None, 450.0]
    assert [row.get("lossless/passed") for row in rows] == [True, None, True]
    assert {row["memory/peak_gib"] for row in rows} == {1.0}
    assert varying(rows) == ["load.concurrency"]
    assert "0.90x" in report("--where", "concurrency=8")
    write_run(tmp_path, "other", {"draft.gamma": 2})
    assert [line["runs"] for line in query.group(read_rows(tmp_path), ["gamma"], mix=True)] == [
        2
    ], "one run"
    out = report("--html", tmp_path / "page.html")
    assert "2 runs in " in out
    assert "\n1 SYNTHETIC: " in out
    assert "holds for none of 2 runs" in report("--where", "speedup>9", is_mistaken=True)
    (tmp_path / "10ad" / "history.jsonl").unlink()
    assert [row.get("speedup") for row in read_rows(tmp_path)] == [0.9, None]


def test_files_of_load_generators_become_rows(tmp_path, report):
    """Next to a run under load; the table is that of scenario=serve."""
    write_load(tmp_path, {1: (50.0, 60.0)})
    files = [LOADS / f"{name}.json" for name in ("vllm_bench", "aiperf", "guidellm")]
    out = report(*files, "--where", "engine.name!=native")
    for words in (
        "AR TTFT ms",
        "AR TPOT ms",
        "concurrency",
        "vllm bench serve",
        "AIPerf",
        "GuideLLM",
    ):
        assert words in out
    (line,) = (line.split() for line in out.splitlines() if line.startswith("vllm_bench.json"))
    assert [part for part in line if part in ("4", "125.5", "637.9", "21.6")] == [
        "125.5",
        "4",
        "637.9",
        "21.6",
    ]
    target = tmp_path / "all.csv"
    report(*files, "--csv", target, "--html", tmp_path / "page.html")
    assert [row["id"] for row in csv.DictReader(target.open())][-1] == "guidellm.json"
    assert "all.csv: not a result file that is read here" in report(target, is_mistaken=True)


def test_files_of_load_generators_need_no_store(tmp_path, report):
    files = [LOADS / f"{name}.json" for name in ("guidellm", "aiperf")]
    out = report(*files, "--html", tmp_path / "page.html", runs=None)
    assert [line.split()[0] for line in out.splitlines() if ".json" in line] == [
        "guidellm.json",
        "aiperf.json",
    ]
    assert (tmp_path / "page.html").exists()
    err = report(*files, "--sweep", "serving", runs=None, is_mistaken=True)
    assert f"--sweep serving: {files[0]} is a file; name a run store before it" in err


def test_a_server_that_reports_acceptance_is_speculative(tmp_path):
    content = json.loads((LOADS / "vllm_bench.json").read_text()) | {
        "spec_decode_acceptance_length": 2.5
    }
    (tmp_path / "fast.json").write_text(json.dumps(content))
    (row,) = rows_of_file(tmp_path / "fast.json")
    assert row["speculative/tokens_per_second"] == pytest.approx(125.53, rel=1e-4)
    assert row["acceptance_length"] == 2.5
    assert not [key for key in row if key.startswith("autoregressive/")]


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


@pytest.fixture
def attempts(tmp_path):
    """A run with two attempts that are done and one that failed, and runs that were mistyped."""
    write_run(tmp_path, "aaa", {}, {"speedup": 1.0})
    write_run(tmp_path, "aaa-2", {}, {"speedup": 2.0})
    for name in ("aaa-3", "bbb"):
        write_run(tmp_path, name, failed="out_of_memory")
    for name in ("ccc", "ccc-2", "aaa-4"):
        write_run(tmp_path, name, failed="invalid")
    return tmp_path


def test_the_latest_attempt_is_shown_and_nothing_that_was_mistyped(report, attempts):
    assert [(row["id"], row.get("speedup")) for row in read_rows(attempts)] == [
        ("aaa-2", 2.0),
        ("bbb", None),
    ]
    out = report()
    assert "1 failed; " in out
    assert "left out: 3 mistyped, 2 superseded; --all shows them, magicdec clean " in out
    out = report("--all")
    assert re.findall(r"^[a-c]{3}\S*", out, re.M) == [
        "aaa",
        "aaa-2",
        "aaa-3",
        "aaa-4",
        "bbb",
        "ccc",
        "ccc-2",
    ]
    assert "left out" not in out


def test_any_two_attempts_are_compared(compare, attempts):
    out = compare("aaa", "aaa-2")
    assert re.search(r"^speedup +1.00x +2.00x +\+100.0%$", out, re.M)
    assert "the same configuration" in out
    assert "aa: aaa, aaa-2, aaa-3, aaa-4; name a run's folder" in compare(
        "aa", "bbb", is_mistaken=True
    )
    assert "no such run" in compare(attempts / "gone", "bbb", is_mistaken=True)


def test_what_was_mistyped_is_deleted_by_a_command(attempts, capsys):
    (attempts / "ccc" / "wandb").mkdir()
    assert clean.main([str(attempts)]) == 0
    out = capsys.readouterr().out
    assert "ccc-2  batch.size: too much\n" in out
    assert f"3 runs deleted from {attempts}\n" in out
    assert sorted(path.name for path in attempts.iterdir()) == ["aaa", "aaa-2", "aaa-3", "bbb"]
    with locked(attempts / "aaa"):
        assert clean.main([str(attempts), "--kind", "out_of_memory"]) == 2
        assert "aaa is being run by" in capsys.readouterr().err
    assert clean.main([str(attempts), "--kind", "out_of_memory"]) == 0
    assert sorted(path.name for path in attempts.iterdir()) == ["aaa", "aaa-2"]
    assert clean.main([str(attempts / "nowhere")]) == 2


def test_every_kind_of_failure_can_be_deleted():
    kinds = {error.kind for error in (UserError, *UserError.__subclasses__())}
    assert kinds <= set(clean.KINDS)


def test_a_broken_level_does_not_hide_the_others(tmp_path):
    """Other kinds of damage are in test_store.py, and every form of the report in
    test_damage.py.
    """
    write_load(tmp_path, {1: (100.0, 150.0)})
    levels = [f'{{"concurrency": {"[" * 5000}{"]" * 5000}}}', '{"concurrency": NaN}']
    levels += ['{"concurrency": "many", "speedup": []}', "torn"]
    with (tmp_path / "10ad" / "history.jsonl").open("a") as file:
        file.write("\n".join(levels))
    assert [row.get("load.concurrency") for row in read_rows(tmp_path)] == [1, "many"]


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
                "speedup: changes by -2.2% to +2.3%, within noise; 100 more repeats of both would"
                " not tell"
            ),
        ),
        ((1.5, 1.51, 1.52), "speedup: changes by -34.5% to -31.7%, more than noise"),
        ((1.01, 1.06, 1.07), "within noise; about 3 more repeats of both would tell"),
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
    assert "speedup, speedup_wall: whether the change is noise takes at least" in out, (
        "without a damaged file's times"
    )


def test_two_repeats_do_not_tell_noise(compare, tmp_path):
    write_pair(tmp_path, ((1.0, 1.1), (1.0, 1.1)), METRICS, ((1, 2, 0, 2), (2, 1, 2, 0)))
    out = compare("aaa", "bbb")
    assert "speedup: whether the change is noise takes at least 4 rows and 3 repeats" in out
    assert "within noise; more repeats would not tell, more rows might" in out
