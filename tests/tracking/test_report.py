"""The report on the terminal: questions, groups, exports, comparisons, and mistakes in one line."""

import csv
import json
import re
import time
from itertools import product
from types import SimpleNamespace

import pytest

from magicdec.errors import UserError
from magicdec.tracking import clean, sync
from magicdec.tracking.lock import locked
from magicdec.tracking.report import difference, figures, page, query
from magicdec.tracking.report.__main__ import main
from magicdec.tracking.report.query import informative, varying
from magicdec.tracking.report.rows import flatten, read_rows, rows_of_file
from tests.programs import ROOT
from tests.tracking.stores import AXES, data_of, write_load, write_run, write_store

LOADS = ROOT / "tests" / "peers" / "results"
MANY, SECONDS = 10_000, 40  # it takes about 6 s on a free core; the bound is for crowded ones


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores") / "runs"
    write_store(folder, 200)
    return folder


@pytest.fixture
def report(store, capsys):
    def run(*arguments, runs=store):
        code = main([*([str(runs)] if runs else []), *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out, err

    return run


ROWS = [
    {"id": "a", "status": "done", "cache.budget": 64, "speedup": 1.5, "target.name": "tiny", "ok": True},
    {"id": "b", "status": "done", "cache.budget": 128, "speedup": 0.5, "target.name": "Llama"},
    {"id": "c", "status": "failed", "cache.budget": 128, "target.name": "tiny"},
]


@pytest.mark.parametrize(
    ("test", "ids"),
    [
        ("cache.budget=128", "bc"),
        ("budget=64", "a"),
        ("cache.budget!=128", "a"),
        ("speedup>1", "a"),
        ("speedup<=0.5", "b"),
        ("speedup=null", "c"),
        ("name~LA", ""),
        ("name~la", "b"),
        ("name=llama", "b"),
        ("ok=true", "a"),
        ("budget>=64 status=done", "ab"),
    ],
)
def test_tests(test, ids):
    if ids:
        assert "".join(row["id"] for row in query.select(ROWS, [test])) == ids
    else:
        with pytest.raises(UserError, match="none of 3 runs"):
            query.select(ROWS, [test])


@pytest.mark.parametrize(
    ("typed", "key"),
    [
        ("accepted", "acceptance_rate"),
        ("off", "predicted/speedup_error"),
        ("target", "target.name"),
        ("gamma", "draft.gamma"),
    ],
)
def test_a_column_is_found_by_its_heading_too(typed, key):
    known = [
        "draft.gamma",
        "predicted/gamma/x",
        "acceptance_rate",
        "predicted/speedup_error",
        "target.name",
        "target.path",
    ]
    assert query.find_key(known, typed, "--columns") == key


def test_sorting_puts_what_lacks_the_key_last():
    assert [row["id"] for row in query.sort(ROWS, "speedup")] == ["b", "a", "c"]
    assert [row["id"] for row in query.sort(ROWS, "speedup", descending=True)] == ["a", "b", "c"]


def test_types_are_nullable():
    rows = [{"draft.gamma": 1, "alpha": 0.5, "fits": True, "draft.name": "self"}, {}, {"mixed": 1}, {"mixed": "a"}]
    found = query.table(rows)
    assert [str(kind) for kind in found.dtypes] == ["Int64", "Float64", "boolean", "string", "object"]
    assert [found["draft.gamma"][0], found["draft.gamma"].isna().sum()] == [1, 3]
    assert query.table([{"a": 10**30}])["a"][0] == 10**30


def test_groups_are_medians_over_the_runs_that_are_done():
    rows = [{"id": s, "status": "done", "cache.budget": 64, "speedup": s} for s in (1, 2, 9)] + ROWS
    lines = query.group(rows, ["budget"], mix=True)
    assert [(line["cache.budget"], line["runs"], line["speedup"]) for line in lines] == [(64, 4, 1.75), (128, 1, 0.5)]


def test_measured_and_synthetic_acceptance_do_not_mix():
    sources = ("measured", "synthetic")
    rows = [{"id": s, "status": "done", "a.b": 1, "speedup": 1, "acceptance/source": s} for s in sources]
    assert [line["runs"] for line in query.group(rows, ["a.b"])] == [1, 1]


MODELS = [
    {"status": "done", "cache.budget": 64, "target.name": target, "scenario.name": scenario, key: speedup, "id": number}
    for number, (target, speedup, scenario, key) in enumerate(
        (*target, *scenario)
        for target in (("tiny", 1.0), ("Llama", 3.0))
        for scenario in (("compare", "speedup"), ("predict", "predicted/speedup"))
    )
]


def test_targets_and_predictions_do_not_mix_unless_told():
    lines = query.group(MODELS, ["cache.budget"])
    assert [(line["target.name"], line["scenario.name"], line["runs"]) for line in lines] == [
        (target, scenario, 1) for target in ("Llama", "tiny") for scenario in ("compare", "predict")
    ]
    mixed = query.group(MODELS, ["cache.budget"], mix=True)
    assert [(line["runs"], line["speedup"], line["predicted/speedup"]) for line in mixed] == [(4, 2.0, 2.0)]
    assert [line["runs"] for line in query.group(MODELS[:1], ["cache.budget"])] == [1]
    assert "target.name" not in query.group(MODELS[:1], ["cache.budget"])[0]


def test_the_notes_of_groups_are_those_of_their_runs(report, tmp_path):
    published = {"published/speedup": 2.0, "published/predicted_speedup": 1.9, "published/table": "3c"}
    write_run(tmp_path, "a", {"scenario.name": "predict", "draft.gamma": 2}, published)
    write_run(tmp_path, "b", {"scenario.name": "compare", "draft.gamma": 2}, {"speedup": 1.0, "speedup_spread": 0.5})
    write_run(tmp_path, "c", {"scenario.name": "compare", "draft.gamma": 2}, {}, failed=True)
    code, out, _ = report("--group-by", "gamma", runs=tmp_path)
    assert code == 0
    assert "the MagicDec paper's Table 3c, which has 1 of these 3" in out
    assert "1 failed" in out
    assert "1 noisy, marked !: " in out
    assert re.findall(r"(?m)^(compare|predict) *$", out) == ["compare", "predict"]
    assert len(re.findall(r"(?m)^ +2 ", out)) == 2
    _, out, _ = report("--group-by", "gamma", "--mix", runs=tmp_path)
    assert len(re.findall(r"(?m)^ +2 ", out)) == 1


def test_step_errors_stand_next_to_the_speedups_and_the_impossible_is_marked(report, tmp_path):
    predicted = {"predicted/speedup": 0.96, "predicted/speedup_error": -0.04, "predicted/step_error": -0.95}
    write_run(tmp_path, "a", {}, {"speedup": 1.0, "time/overhead_ms": -188.0, "time/round_ms": 475.0} | predicted)
    write_run(tmp_path, "b", {"draft.gamma": 2}, {"speedup": 1.0, "time/overhead_ms": -1.0, "time/round_ms": 475.0})
    _, out, _ = report(runs=tmp_path)
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


def test_the_table_shows_what_differs(report):
    code, out, _ = report("--where", "speedup>1", "--sort", "speedup", "--descending", "--limit", 3)
    assert code == 0
    for word in ("policy", "budget", "speedup", "tokens/s", "3 of", "SYNTHETIC"):
        assert word in out
    assert re.search(r"\bspeedup +speedup_wall\b", out)  # side by side
    code, out, _ = report("--group-by", "policy,budget")
    assert code == 0
    assert "medians" in out
    assert all(re.search(rf"\nsnapkv +{budget} +measured ", out) for budget in AXES["cache.budget"])
    code, out, _ = report("--columns", "id,reason", "--where", "status=failed")
    assert "batch.size: too much" in out


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
def test_mistakes_are_one_line(report, arguments, said):
    code, _, err = report(*arguments)
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said in err


def test_no_store_is_a_mistake(report, tmp_path):
    assert "no such folder" in report(runs=tmp_path / "nowhere")[2]
    assert "holds no runs" in report(runs=tmp_path)[2]


def test_csv_holds_every_column(report, tmp_path):
    target = tmp_path / "new" / "runs.csv"
    assert report("--csv", target)[0] == 0
    with target.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 200
    assert {"id", "cache.budget", "speculative/tokens_per_second", "reason"} <= lines[0].keys()
    assert {line["lossless/identical"] for line in lines} == {"true", ""}


@pytest.mark.extra
def test_parquet(report, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    assert report("--parquet", tmp_path / "runs.parquet")[0] == 0
    table = parquet.read_table(tmp_path / "runs.parquet")
    assert table.num_rows == 200
    assert str(table.schema.field("speedup").type) == "double"
    assert str(table.schema.field("cache.budget").type) == "int64"


def test_a_sweep_is_the_runs_of_its_folders(report, store, tmp_path):
    for folder, ids in (
        ("2026-01-01_00-00-00_grid", ("000000000001",)),
        ("2026-01-02_00-00-00-1_grid", ("000000000002",)),
        ("2026-01-02_00-00-00_another_grid", ("000000000003",)),
        ("2026-01-02_00-00-00", ("000000000004",)),
    ):
        path = store / "sweeps" / folder / "jobs.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"job": 0, "id": name}) + "\n" for name in ids) + '{"id": "0000')
    assert [row["id"] for row in read_rows(store, "grid")] == ["000000000001", "000000000002"]
    assert [row["id"] for row in read_rows(store, "2026-01-02_00-00-00-1_grid")] == ["000000000002"]


def test_a_sweep_comes_in_the_order_of_its_jobs(report, tmp_path):
    """Whichever ran first, or was done before."""
    names = {2: "aaa", 0: "ccc", 1: "bbb"}
    for name in names.values():
        write_run(tmp_path, name, {"draft.gamma": 2}, {})
    path = tmp_path / "sweeps" / "2026-01-01_00-00-00" / "jobs.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps({"job": job, "id": name}) + "\n" for job, name in names.items()))
    assert [row["id"] for row in read_rows(tmp_path, path.parent.name)] == ["ccc", "bbb", "aaa"]
    assert [row["id"] for row in read_rows(tmp_path)] == ["aaa", "bbb", "ccc"]


def test_predictions_have_a_table_of_their_own(report, tmp_path):
    """With what they have: the best gamma, and the alpha from which speculation pays where none is known."""
    predicted = {"predicted/gamma": 3, "predicted/break_even_alpha": 0.7071, "predicted/speedup": 1.2}
    write_run(tmp_path, "a", {"draft.gamma": 1}, {"speedup": 1.5, "acceptance_rate": 0.5} | predicted)
    write_run(tmp_path, "b", {"draft.gamma": 2}, {"speedup": 0.9, "acceptance_rate": 0.25} | predicted)
    unknown = {key: value for key, value in predicted.items() if key != "predicted/speedup"}
    for number in range(2):
        write_run(tmp_path, f"c{number}", {"scenario.name": "predict", "batch.size": number}, unknown)
    code, out, _ = report(runs=tmp_path)
    assert code == 0
    lines = [line.split() for line in out.splitlines() if line.strip()]
    assert lines[0] == ["compare"]
    assert lines[1] == ["id", "status", "speedup", "gamma", "accepted", "predicted"]
    assert lines[5] == ["predict"]
    assert lines[6] == ["id", "status", "size", "best", "gamma", "pays", "from", "alpha"]
    assert lines[8] == ["c0", "done", "0", "3", "0.7071"]
    _, out, _ = report("--columns", "id,draft.gamma,predicted/gamma", runs=tmp_path)
    assert len(re.findall(r"(?m)^(a|b|c0|c1) ", out)) == 4, "a single table where columns are named"


def test_two_runs_compared(report, tmp_path):
    values = {"cache.budget": 64, "draft.gamma": 2}
    write_run(tmp_path, "aaa1", values, {"speedup": 1.0, "alpha": 0.5})
    other = {"speedup": 1.5, "alpha": 0.5, "predicted/target_decode/attention_of_a_long_name_ms": 1.25}
    write_run(tmp_path, "bbb2", values | {"draft.gamma": 4}, other)
    code, out, _ = report("compare", "aaa", tmp_path / "bbb2", "--runs-dir", tmp_path, runs=None)
    assert code == 0
    lines = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip()}
    assert lines["draft.gamma"] == ["2", "4"], "a setting has no change in percent"
    assert lines["speedup"] == ["1.00x", "1.50x", "+50.0%"]
    assert "alpha" not in lines
    assert "cache.budget" not in lines
    assert "1 more key differs; --all for everything" in out
    _, out, _ = report("compare", "aaa", tmp_path / "bbb2", "--runs-dir", tmp_path, "--all", runs=None)
    assert "predicted/target_decode/attention_of_a_long_name_ms" in out
    code, _, err = report("compare", "a", "c", "--runs-dir", tmp_path, runs=None)
    assert (code, err.count("\n")) == (2, 1)
    assert "c: no such run" in err


@pytest.mark.parametrize(
    ("key", "a", "b", "change"),
    [
        ("predicted/speedup_error", -0.05, 0.1221, "+17 points"),
        ("time/overhead_ms", -0.5, 1.0, "+1.5"),
        ("alpha", 0.5, 0.0, "-0.5"),
        ("alpha", 0.5, 0.6, "+20.0%"),
        ("acceptance/source", "measured", "synthetic", ""),
    ],
)
def test_a_change_is_in_percent_only_where_that_means_something(key, a, b, change):
    assert difference._change(key, a, b) == change


@pytest.mark.parametrize(
    ("changes", "time", "is_said"),
    [
        ({"draft.gamma": 4}, 17.2, True),
        ({"draft.gamma": 4}, 10.5, False),  # within noise
        ({"batch.size": 4}, 17.2, False),  # other work
    ],
)
def test_equal_baselines_that_differ_are_pointed_out(report, tmp_path, changes, time, is_said):
    values, baseline = {"draft.gamma": 2, "batch.size": 1}, "autoregressive/time_per_output_token_ms"
    write_run(tmp_path, "aaa1", values, {baseline: 10.0, "device": "a cpu"})
    write_run(tmp_path, "bbb2", values | changes, {baseline: time, "device": "a cpu", "speedup_spread": 0.5})
    _, out, _ = report("compare", "aaa", "bbb", "--runs-dir", tmp_path, runs=None)
    assert ("the autoregressive baselines do the same work and differ by 72%" in out) == is_said
    assert "bbb2: the speedup spreads over 50% between repeats" in out


def test_a_command_to_copy_leaves_out_what_is_not_the_runs():
    stored = json.dumps(["+sweeps=grid", "draft.gamma=4", "runs_dir=x", "data.path='a b'"])
    assert page.command({"overrides": stored}) == "magicdec +sweeps=grid draft.gamma=4 'data.path='\"'\"'a b'\"'\"''"


@pytest.mark.slow
def test_ten_thousand_runs_in_seconds(report, tmp_path):
    write_store(tmp_path / "runs", MANY)
    start = time.perf_counter()
    assert report("--html", tmp_path / "page.html", "--csv", tmp_path / "runs.csv", runs=tmp_path / "runs")[0] == 0
    assert time.perf_counter() - start < SECONDS
    assert (tmp_path / "page.html").stat().st_size < 5e6


def test_a_sweep_is_drawn_over_what_it_varies(tmp_path):
    machines = {"a100": 2039.0, "h100": 3350.0}
    rows = [
        {"batch.size": batch, "batch.context_len": 512, "hardware.name": name, "hardware.bandwidth_gbs": bandwidth}
        | {"speedup": 1.0 + batch / 10, "time/draft_ms": 1.0, "time/verify_ms": 3.0, "time/target_decode_ms": 2.0}
        for name, bandwidth in machines.items()
        for batch in (1, 8)
    ]
    drawn = figures.draw_sweep(rows, tmp_path / "figures", "magicdec report runs")
    assert [path.name for path in drawn] == ["speedup.png", "ratios.png"], "nothing is known of intensity"
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    points = figures.points(rows, "batch.size", "hardware.name", figures.SPEEDUPS)
    assert [(point["x"], point["series"], point["kind"], point["y"]) for point in points] == [
        *((1, "a100", "measured", 1.1), (8, "a100", "measured", 1.8)),
        *((1, "h100", "measured", 1.1), (8, "h100", "measured", 1.8)),
    ]
    with pytest.raises(UserError, match="no speedups"):
        figures.draw_sweep([{"batch.size": 1}], tmp_path, "")


@pytest.mark.parametrize("kind", figures.FORMATS)
def test_a_figure_holds_its_caption_and_its_command(tmp_path, capsys, kind):
    for number, (budget, policy) in enumerate(product((64, 512), ("snapkv", "streaming"))):
        found = {"speedup": 1 + number / 10, "speedup_ci95": [1.0, 2.0]}
        found["speedup_spread"] = 0.3 * (number == 3)
        write_run(tmp_path, f"run{number}", {"cache.budget": budget, "cache.policy": policy}, found)
    out = tmp_path / f"figure.{kind}"
    arguments = ["figure", str(tmp_path), "--x", "budget", "--series", "policy", "--format", kind, "--out", str(out)]
    assert main(arguments) == 0
    assert capsys.readouterr().out == f"written {out}\n"
    content = out.read_bytes()
    command = f"magicdec {' '.join(arguments)}"
    assert (command.encode("utf-16-be").hex() if kind == "pdf" else command).encode() in content
    if kind == "svg":
        text = content.decode()
        for words in ("cache.budget", "cache.policy", "streaming", "Held constant: target.name tiny", ">!</text>"):
            assert words in text
        assert "Bars: 95% intervals. !: a noisy measurement." in text


def test_a_figure_of_nothing_and_of_what_does_not_mix(tmp_path, capsys):
    for number, source in enumerate(("measured", "synthetic")):
        write_run(tmp_path, f"run{number}", {"draft.gamma": number + 1}, {"speedup": 1.5, "acceptance/source": source})
    for arguments, words in (
        (
            ("--x", "gamma"),
            "the runs differ in acceptance/source (measured, synthetic), and their median means nothing",
        ),
        (("--x", "gamma", "--where", "source=measured", "--y", "device"), "no run that is done has numbers for device"),
        (("--x", "gama"), "--x gama: no run has such a key; did you mean"),
        (("--x", "gamma", "--where", "source=measured", "--out", "a.jpg"), "must end in one of .pdf, .png, .svg"),
    ):
        assert main(["figure", str(tmp_path), *arguments]) == 2
        assert words in capsys.readouterr().err


def test_a_run_under_load_is_a_row_per_level(tmp_path, capsys):
    write_load(tmp_path, {1: (100.0, 150.0), 8: (500.0, 450.0)})
    rows = read_rows(tmp_path)
    assert [(row["load.concurrency"], row["speedup"]) for row in rows] == [(1, 1.5), (8, 0.9)]
    assert varying(rows) == ["load.concurrency"]
    assert main([str(tmp_path), "--where", "concurrency=8"]) == 0
    assert "0.90x" in capsys.readouterr().out
    (tmp_path / "10ad" / "history.jsonl").unlink()
    assert [row["speedup"] for row in read_rows(tmp_path)] == [0.9]


def test_files_of_load_generators_become_rows(tmp_path, report):
    """Next to a run under load; the table is that of scenario=serve."""
    write_load(tmp_path / "runs", {1: (50.0, 60.0)})
    files = [LOADS / f"{name}.json" for name in ("vllm_bench", "aiperf", "guidellm")]
    code, out, _ = report(*files, "--where", "engine.name!=native", runs=tmp_path / "runs")
    assert code == 0
    for words in ("AR TTFT ms", "AR TPOT ms", "concurrency", "vllm bench serve", "AIPerf", "GuideLLM"):
        assert words in out
    (line,) = (line.split() for line in out.splitlines() if line.startswith("vllm_bench.json"))
    assert [part for part in line if part in ("4", "125.5", "637.9", "21.6")] == ["125.5", "4", "637.9", "21.6"]
    target = tmp_path / "all.csv"
    assert report(*files, "--csv", target, "--html", tmp_path / "page.html", runs=tmp_path / "runs")[0] == 0
    assert [row["id"] for row in csv.DictReader(target.open())][-1] == "guidellm.json"
    code, _, err = report(target, runs=tmp_path / "runs")
    assert (code, err.count("\n")) == (2, 1)
    assert "all.csv: not a result file that is read here" in err


def test_files_of_load_generators_need_no_store(tmp_path, report):
    files = [LOADS / f"{name}.json" for name in ("guidellm", "aiperf")]
    code, out, _ = report(*files, "--html", tmp_path / "page.html", runs=None)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if ".json" in line] == ["guidellm.json", "aiperf.json"]
    assert (tmp_path / "page.html").exists()
    code, _, err = report(*files, "--sweep", "serving", runs=None)
    assert (code, err.count("\n")) == (2, 1)
    assert f"--sweep serving: {files[0]} is a file; name a run store before it" in err


def test_a_server_that_reports_acceptance_is_speculative(tmp_path, report):
    content = json.loads((LOADS / "vllm_bench.json").read_text()) | {"spec_decode_acceptance_length": 2.5}
    (tmp_path / "fast.json").write_text(json.dumps(content))
    (row,) = rows_of_file(tmp_path / "fast.json")
    assert (row["speculative/tokens_per_second"], row["acceptance_length"]) == (
        pytest.approx(125.53, rel=1e-4),
        2.5,
    )
    assert not [key for key in row if key.startswith("autoregressive/")]


def test_a_level_lacks_what_it_has_not_measured(tmp_path):
    """Not even by the run's own figures, which are those of its last level."""
    write_load(tmp_path, {1: (100.0, 150.0), 2: (180.0, None), 8: (500.0, 450.0)})
    rows = read_rows(tmp_path)
    assert [row.get("speedup") for row in rows] == [1.5, None, 0.9]
    assert [row.get("speculative/tokens_per_second") for row in rows] == [150.0, None, 450.0]
    assert [row.get("lossless/passed") for row in rows] == [True, None, True]
    assert {row["memory/peak_gib"] for row in rows} == {1.0}


def test_the_levels_of_a_run_are_one_run(report, tmp_path):
    write_load(tmp_path, {1: (100.0, 150.0), 2: (180.0, None), 8: (500.0, 450.0)})
    write_run(tmp_path, "other", {"draft.gamma": 2}, {})
    assert [line["runs"] for line in query.group(read_rows(tmp_path), ["gamma"], mix=True)] == [2]
    _, out, _ = report("--html", tmp_path / "page.html", runs=tmp_path)
    assert "2 runs in " in out
    assert "\n1 SYNTHETIC: " in out
    assert "holds for none of 2 runs" in report("--where", "speedup>9", runs=tmp_path)[2]


def test_engines_are_compared_by_what_they_wrote(report, tmp_path):
    """Those of the same prompts: ours is what the others are measured by, whichever ran first."""
    wrote = {"vllm": "other", "native": "same", "transformers": "same"}
    said = [("vllm", "no"), ("native", "yes"), ("transformers", "yes")]
    for number, (engine, output) in enumerate(wrote.items()):
        found = {"data/fingerprint": "prompts", "output/fingerprint": output, "autoregressive/tokens_per_second": 99.5}
        write_run(tmp_path, f"run{number}", {"engine.name": engine}, found)
    found = {"data/fingerprint": "other prompts", "output/fingerprint": "other"}
    write_run(tmp_path, "run3", {"engine.name": "native"}, found)
    agreement = {row["id"]: row.get("output/agrees") for row in read_rows(tmp_path)}
    assert agreement == {"run0": False, "run1": True, "run2": True, "run3": None}
    code, out, _ = report(runs=tmp_path)
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == ["id", "status", "engine", "draft", "AR", "tokens/s", "agrees"]
    assert [line[2:] for line in lines[2:5]] == [[engine, "self", "99.5", word] for engine, word in said]
    _, out, _ = report("compare", tmp_path / "run0", tmp_path / "run1", runs=None)
    assert "the same prompts, other autoregressive tokens" in out


@pytest.fixture
def attempts(tmp_path):
    """A run with two attempts that are done and one that failed, and runs that were mistyped."""
    values = {"cache.budget": 64}
    write_run(tmp_path, "aaa", values, {"speedup": 1.0})
    write_run(tmp_path, "aaa-2", values, {"speedup": 2.0})
    write_run(tmp_path, "aaa-3", values, {}, failed=True)
    write_run(tmp_path, "bbb", values, {}, failed=True)
    for name in ("ccc", "ccc-2", "aaa-4"):
        write_run(tmp_path, name, values, {}, failed=True)
        path = tmp_path / name / "result.json"
        path.write_text(path.read_text().replace("out_of_memory", "invalid"))
    return tmp_path


def test_the_latest_attempt_is_shown_and_nothing_that_was_mistyped(report, attempts):
    assert [(row["id"], row.get("speedup")) for row in read_rows(attempts)] == [("aaa-2", 2.0), ("bbb", None)]
    code, out, _ = report(runs=attempts)
    assert code == 0
    assert "1 failed; " in out
    assert "left out: 3 mistyped, 2 superseded; --all shows them, magicdec clean " in out
    code, out, _ = report("--all", runs=attempts)
    assert re.findall(r"^[a-c]{3}\S*", out, re.M) == ["aaa", "aaa-2", "aaa-3", "aaa-4", "bbb", "ccc", "ccc-2"]
    assert "left out" not in out


def test_any_two_attempts_are_compared(report, attempts):
    _, out, _ = report("compare", "aaa", "aaa-2", "--runs-dir", attempts, runs=None)
    assert re.search(r"^speedup +1.00x +2.00x +\+100.0%$", out, re.M)
    assert "the same configuration" in out
    code, _, err = report("compare", "aa", "bbb", "--runs-dir", attempts, runs=None)
    assert (code, "aa: aaa, aaa-2, aaa-3, aaa-4; name a run's folder" in err) == (2, True)
    assert "no such run" in report("compare", attempts / "gone", "bbb", runs=None)[2]


def test_what_was_mistyped_is_deleted_by_a_command(report, attempts, capsys):
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


def test_a_store_of_nothing_but_mistakes_says_so(report, tmp_path):
    write_run(tmp_path, "ccc", {"cache.budget": 64}, {}, failed=True)
    path = tmp_path / "ccc" / "result.json"
    path.write_text(path.read_text().replace("out_of_memory", "invalid"))
    code, _, err = report(runs=tmp_path)
    assert (code, err.count("\n")) == (2, 1)
    assert "left out: 1 mistyped; --all shows them" in err


DEEP = "[" * 5000 + "]" * 5000
RESULTS = {
    "a list": "[1]",
    "deep": f'{{"status": "done", "speedup": {DEEP}}}',
    "surrogate": '{"status": "done", "device": "\\ud800"}',
    "nan": '{"status": "done", "speedup": NaN}',
    "huge": f'{{"status": "done", "speedup": 1{"0" * 400}}}',
    "a status": '{"status": ["done"]}',
    "overrides": '{"status": "done", "overrides": [1]}',
}
CONFIGS = {
    "a date": "batch: {size: 2026-01-01}",
    "no group": "batch: 5\nscenario: serve\n",
    "no tree": "batch: &all {size: *all}",
    "deep config": f"batch: {DEEP[4000:6000]}",
    "other types": "batch: {size: [1], context_len: {a: x}}\ntarget: {name: .nan}\n1: 2\n",
    "an object": "batch: !!python/object:os.system x",
}


def test_no_broken_run_hides_the_others(report, tmp_path):
    """Or ends the report, in whatever form."""
    for number, budget in enumerate((64, 128)):
        write_run(tmp_path, f"whole{number}", {"cache.budget": budget}, {"speedup": 1.5, "batch.size": 8})
    for name, text in RESULTS.items():
        write_run(tmp_path, name, {}, {})
        (tmp_path / name / "result.json").write_text(text)
    for name, text in CONFIGS.items():
        write_run(tmp_path, name, {}, {"speedup": "fast", "time/draft_ms": [1], "gpu/shared": {"a": 1}})
        config = (tmp_path / name / "config.yaml").read_text()
        (tmp_path / name / "config.yaml").write_text(f"{config}{text}")
    write_load(tmp_path, {1: (100.0, 150.0)})
    levels = [f'{{"concurrency": {DEEP}}}', '{"concurrency": "many", "speedup": []}', '{"concurrency": NaN}', "torn"]
    with (tmp_path / "10ad" / "history.jsonl").open("a") as file:
        file.write("\n".join(levels))
    rows = read_rows(tmp_path)
    assert {row["id"] for row in rows} == {"whole0", "whole1", "10ad"}
    assert [row.get("load.concurrency") for row in rows if row["id"] == "10ad"] == [1, "many"]
    sent = sync._runs(SimpleNamespace(runs_dir=tmp_path, sweep=None, ids=[]))
    assert [run["id"] for run in sent] == ["10ad", "whole0", "whole1"]
    written = ["--html", tmp_path / "page.html", "--csv", tmp_path / "runs.csv"]
    for arguments in ([], written, ["--group-by", "budget"], ["--sort", "speedup"], ["--where", "budget>0"]):
        code, out, _ = report(*arguments, "--columns", "budget", runs=tmp_path)
        assert code == 0
        assert {"64", "128"} <= set(out.split())
    assert data_of((tmp_path / "page.html").read_text())["number"] == 3 + 1


def write_generations(folder, slowness, accepted=(1, 2, 0, 2), repeats=3):
    """Four rows of three rounds of gamma 2, whose repeats take `slowness` times as long as the first."""
    lines = []
    for row, number in enumerate(accepted):
        times = {"autoregressive": [4.0] * repeats, "speculative": [(3 - number / 2) * s for s in slowness[:repeats]]}
        line = {"row": row, "autoregressive": [5] * 8, "speculative": [5] * 8, "decode_s": times}
        lines.append(json.dumps(line | {"rounds": [[2, number]] * 3}))
    (folder / "generations.jsonl").write_text("\n".join(lines))


def test_times_of_a_damaged_file_are_left_out(report, tmp_path):
    metrics = {"speedup": 1.5, "speedup_wall": 1.2, "acceptance_length": 2.2, "data/fingerprint": "f"}
    for name in ("aaa1", "bbb2"):
        write_run(tmp_path, name, {"batch.size": 4}, metrics)
        write_generations(tmp_path / name, (1.0, 1.01, 1.02))
    file = tmp_path / "bbb2" / "generations.jsonl"
    file.write_text(file.read_text().replace('"autoregressive": [4.0, 4.0, 4.0]', '"autoregressive": [4.0]', 1))
    code, out, _ = report("compare", "aaa", "bbb", "--runs-dir", tmp_path, runs=None)
    assert code == 0
    assert "acceptance_length: the same" in out
    assert "speedup, speedup_wall: whether the change is noise takes at least" in out


@pytest.mark.parametrize(
    ("slowness", "told"),
    [
        (
            (1.0, 1.01, 1.02),
            "speedup: changes by -2.2% to +2.3%, within noise; 100 more repeats of both would not tell",
        ),
        ((1.5, 1.51, 1.52), "speedup: changes by -34.5% to -31.7%, more than noise"),
        ((1.01, 1.06, 1.07), "within noise; about 3 more repeats of both would tell"),
    ],
)
def test_a_change_within_noise_is_called_that(report, tmp_path, slowness, told):
    for name, times in (("aaa1", (1.0, 1.01, 1.02)), ("bbb2", slowness)):
        metrics = {"speedup": 1.5, "speedup_wall": 1.2, "acceptance_length": 2.2, "data/fingerprint": "f"}
        write_run(tmp_path, name, {"batch.size": 4}, metrics)
        write_generations(tmp_path / name, times)
    _, out, _ = report("compare", "aaa", "bbb", "--runs-dir", tmp_path, runs=None)
    assert told in out
    assert "acceptance_length: the same" in out


def test_two_repeats_do_not_tell_noise(report, tmp_path):
    for name, rows in (("aaa1", (1, 2, 0, 2)), ("bbb2", (2, 1, 2, 0))):
        write_run(tmp_path, name, {"batch.size": 4}, {"speedup": 1.5, "acceptance_length": 2.2})
        write_generations(tmp_path / name, (1.0, 1.1), rows, repeats=2)
    _, out, _ = report("compare", "aaa", "bbb", "--runs-dir", tmp_path, runs=None)
    assert "speedup: whether the change is noise takes at least 4 rows and 3 repeats" in out
    assert "within noise; more repeats would not tell, more rows might" in out
