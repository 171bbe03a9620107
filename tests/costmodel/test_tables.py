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
    (row,) = tables.read_table(table(HEADER + "llama-3.1-8b,self,snapkv,4xL40,8000,16,3,1024,2.9,1.3\n"))
    assert row.autoregressive_ms is None
    setup = row.setup(model)
    assert (setup.hardware.count, setup.hardware.device.name, setup.cache.budget) == (4, "L40", 1024)


@pytest.mark.parametrize("budget", ["", "-1"])
def test_no_budget_is_the_whole_context(table, model, budget):
    (row,) = tables.read_table(table(HEADER + f"llama-3.1-8b,llama-3.2-1b,full,8xA100,8000,16,3,{budget},2.9,1.3\n"))
    setup = row.setup(model)
    assert (setup.cache.policy, setup.tokens_read) == ("full", 8000)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", "target is missing"),
        (HEADER.replace("gamma,", ""), "gamma is missing"),
        (HEADER, "has no rows"),
        (HEADER + "llama-3.1-8b,self,streaming,8xA100,many,16,3,512,2.9,1.3\n", "line 2: context_len=many"),
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
