"""The page on today's targets: its rows are those that its program predicts."""

import pytest
import today
from page import RESULTS
from render import read_csv

from magicdec.costmodel.prediction import predict


@pytest.mark.parametrize("target", ["llama-3.1-8b", "gpt-oss-120b"])
def test_published_rows_are_what_is_predicted_now(target):
    rows = read_csv(RESULTS / "today.csv")
    cell = {"target": target, "machine": "8xh100", "batch": 32, "context": 32768}
    [row] = [row for row in rows if {key: row[key] for key in cell} == cell]
    now = today.row_of(target, predict(today.setup_at(*cell.values()), today.GAMMAS, today.ALPHA))
    assert row["speedup"] == pytest.approx(now["speedup"], rel=1e-4)
    assert row["kv_share"] == pytest.approx(now["kv_share"], rel=1e-4)
