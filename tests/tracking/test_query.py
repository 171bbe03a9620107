"""Questions to a store: tests, sorting, groups and what varies."""

import re
from itertools import product

import pytest

from magicdec.errors import UserError
from magicdec.report import query
from magicdec.report.query import informative, varying
from magicdec.report.rows import read_rows
from magicdec.tracking.columns import flatten
from magicdec.tracking.sweep import record
from tests.tracking.stores import write_run

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
        "name~LA": "b",
        "name=llama": "b",
        "ok=true": "a",
    }
    wanted |= {"budget>=64 status=done": "ab"}
    assert {test: ids(query.select(ROWS, [test])) for test in wanted} == wanted
    with pytest.raises(UserError, match="none of 3 runs"):
        query.select(ROWS, ["name~mistral"])


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


def test_no_line_of_a_pipe_ends_in_blanks(report, compare, drafts):
    for out in (report(), report("--group-by", "policy"), compare("run0", "run2")):
        assert [line for line in out.splitlines() if line != line.rstrip()] == []
