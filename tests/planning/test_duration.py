"""The time that a dry run expects runs to take."""

import pytest

from magicdec.config.load import compose
from magicdec.config.omega import omega
from magicdec.costmodel.round import round_times
from magicdec.costmodel.speedup import batch_rounds
from magicdec.planning import duration
from magicdec.planning.resolve import resolve
from magicdec.planning.setup import setup_of

GBS, TFLOPS = 10.0, 0.2


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine whose figures are known, and no run listed before."""
    monkeypatch.setattr(duration, "measured_rates", lambda _: (GBS, TFLOPS))
    monkeypatch.setattr(duration, "_prefilled", set())


def plan(*overrides):
    return resolve(compose(["hardware=cpu", "batch.size=8", "batch.context_len=1024", *overrides]))


@pytest.mark.parametrize("draft", ["self", "none"])
def test_a_prediction_is_bounded_by_what_the_machine_can_do(draft):
    this = plan(f"draft={draft}")
    prefill, decoding = duration.predicted_seconds(this)
    model = this.target.config
    per_token = model.hidden_size * (model.num_heads + model.num_kv_heads) * 2 * model.head_dim
    weights = model.num_layers * (per_token + 3 * model.hidden_size * model.intermediate_size)
    least = 2 * weights * 8 * 1024 / (TFLOPS * 1e12)
    assert least < prefill < 20 * least
    kv = 2 * model.num_layers * model.num_kv_heads * model.head_dim * 4 * 8 * 1024
    assert decoding > 3 * 64 * (kv + 2 * weights) / (GBS * 1e9)


def test_repeats_and_batches_take_their_time():
    prefill, decoding = duration.predicted_seconds(plan())
    assert duration.predicted_seconds(plan("scenario.repeats=6")) == pytest.approx(
        (prefill, 2 * decoding)
    )
    assert duration.predicted_seconds(plan("batch.num_batches=3")) == pytest.approx(
        (3 * prefill, 3 * decoding)
    )
    assert duration.predicted_seconds(plan("draft=none"))[0] == pytest.approx(prefill)


def test_drawn_acceptance_is_that_of_the_prediction():
    """Where none is known, both ways would take equally long."""
    keys = ("data=random", "batch.context_len=4096", "draft.synthetic_acceptance=0.9")
    _, decoding = duration.predicted_seconds(plan(*keys))
    _, alone = duration.predicted_seconds(plan(*keys, "draft=none"))
    assert alone < decoding < 1.8 * alone


def test_a_batch_waits_for_its_slowest_row():
    """Speculation decodes as long as the decode steps divided by the speedup of the whole batch,
    which at alpha 0.7 is well below that of a row.
    """
    keys = ("data=random", "batch.context_len=4096", "batch.generate_len=128", "batch.size=64")
    this = plan(*keys, "draft.gamma=4", "draft.synthetic_acceptance=0.7", "scenario.repeats=1")
    alone = plan(*keys, "draft=none", "scenario.repeats=1")
    _, decoding = duration.predicted_seconds(this)
    _, plain = duration.predicted_seconds(alone)
    times = round_times(setup_of(this, GBS, TFLOPS).at(context=4096 + 64), 4)
    rounds = batch_rounds(4, 0.7, num_rows=64, num_tokens=127)
    assert rounds > 1.15 * 127 / omega(4, 0.7)
    assert decoding - plain == pytest.approx(rounds * times.round_s, rel=0.02)


def test_an_independent_draft_prefills_too():
    own = plan("draft=model", "batch.context_len=1024")
    alone = duration.predicted_seconds(plan("draft=none"))[0]
    assert duration.predicted_seconds(own)[0] > 1.02 * alone
    assert duration.predicted_seconds(plan("draft=self"))[0] == pytest.approx(alone)


def test_a_shared_prefill_is_counted_once():
    prefill, decoding = duration.predicted_seconds(plan())
    assert duration.seconds(plan(), []) == pytest.approx(prefill + decoding)
    smaller = plan("cache.budget=64")
    assert duration.seconds(smaller, []) == pytest.approx(duration.predicted_seconds(smaller)[1])
    assert duration.seconds(plan("data.seed=1"), []) == pytest.approx(prefill + decoding)
    assert duration.seconds(plan("sweep.share=none"), []) == pytest.approx(prefill + decoding)


def test_finished_attempts_tell_better():
    attempts = [{"status": "done", "duration_s": seconds} for seconds in (5.0, 6.0, 90.0)]
    attempts.append({"status": "failed", "duration_s": 1.0})
    assert duration.seconds(plan(), attempts) == 6.0
    assert duration.seconds(plan("scenario=profile"), attempts) == 6.0
    assert duration.seconds(plan("scenario=profile"), []) is None
