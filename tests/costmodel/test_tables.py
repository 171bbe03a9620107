import csv

import pytest

from magicdec.costmodel import tables
from magicdec.errors import UserError

HEADER = "target,draft,policy,hardware,context_len,batch_size,gamma,kv_budget,omega,speedup\n"


@pytest.fixture
def table(tmp_path):
    def write(text):
        path = tmp_path / "table.csv"
        path.write_text(text)
        return path

    return write


def test_the_published_tables_are_complete():
    rows = tables.read_table()
    assert len(rows) == 65
    assert {row.table for row in rows} == {"2", "3a", "3b", "3c", "6"}
    for row in rows:  # each repeats itself: T_T / T_SD is its speedup, to rounding
        assert row.autoregressive_ms / row.speculative_ms == pytest.approx(row.speedup, abs=0.011)


def test_other_tables_may_lack_times(table, model):
    (row,) = tables.read_table(
        table(HEADER + "llama-3.1-8b,self,snapkv,4xL40,8000,16,3,1024,2.9,1.3\n")
    )
    assert row.autoregressive_ms is None
    setup = row.setup(model)
    assert (setup.hardware.count, setup.hardware.device.name, setup.cache.budget) == (
        4,
        "L40",
        1024,
    )


@pytest.mark.parametrize("budget", ["", "-1"])
def test_no_budget_is_the_whole_context(table, model, budget):
    (row,) = tables.read_table(
        table(HEADER + f"llama-3.1-8b,llama-3.2-1b,full,8xA100,8000,16,3,{budget},2.9,1.3\n")
    )
    setup = row.setup(model)
    assert (setup.cache.policy, setup.tokens_read) == ("full", 8000)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", "target is missing"),
        (HEADER.replace("gamma,", ""), "gamma is missing"),
        (HEADER, "has no rows"),
        (
            HEADER + "llama-3.1-8b,self,streaming,8xA100,many,16,3,512,2.9,1.3\n",
            "line 2: context_len=many",
        ),
        (HEADER + "llama-3.1-8b,self,,8xA100,8000,16,3,512,2.9,1.3\n", "line 2: policy is empty"),
    ],
)
def test_bad_tables_are_named(table, text, names):
    with pytest.raises(UserError, match=names):
        tables.read_table(table(text))


def test_a_missing_file_and_a_missing_model_are_named(model, tmp_path):
    with pytest.raises(UserError, match=r"nosuch\.csv"):
        tables.read_table(tmp_path / "nosuch.csv")
    with pytest.raises(UserError, match="target=gpt-5"):
        model("gpt-5")


def test_the_first_version_has_the_speedups_of_the_abstract_and_a_source_in_every_row():
    rows = tables.first_version()
    assert len(rows) == 20
    assert {row.version for row in rows} == {"first"}
    assert all("Infini-AI-Lab/MagicDec at " in row.source for row in rows)
    ranked = sorted(
        (row.speedup, row.target, row.gamma, row.context_len, row.batch_size) for row in rows
    )
    best = {target: (speedup, *cell) for speedup, target, *cell in ranked}
    assert best == {"llama-2-7b-32k": (2.0, 4, 32000, 32), "llama-3.1-8b": (1.84, 5, 100000, 32)}


def test_the_points_of_the_first_versions_figure_have_the_batches_that_its_numbers_imply():
    with open(
        tables.FIRST_VERSION.with_name("magicdec_first_version_figure1.csv"), newline=""
    ) as file:
        points = list(csv.DictReader(file))
    measured = {
        (r.context_len, r.batch_size): r.autoregressive_ms
        for r in tables.read_table()
        if r.table == "3a"
    }
    assert len(points) == 20
    misfits = []
    for point in points:
        batch = int(point["batch_size"])
        ratio = float(point["speedup"])
        ms = float(point["speculative_ms"])
        cell = int(point["context_len"]), batch
        assert (cell in measured) == (point["batch_from"] != "order of the points")
        if cell in measured:
            assert ratio * ms == pytest.approx(measured[cell], rel=0.005)
        for way in ("autoregressive", "speculative"):
            if point[f"{way}_ms"] and (throughput := point[f"{way}_tokens_per_second"]):
                implied = float(point[f"{way}_ms"]) * float(throughput) / 1e3
                misfits += [] if implied == pytest.approx(batch, rel=1e-3) else [(way, *cell)]
    assert misfits == [("autoregressive", 8000, 64)], "published so"
