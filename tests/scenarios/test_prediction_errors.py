"""Predictions next to a run: steps at the end of its prompts, speedups over its generation."""

import pytest

from magicdec.config.load import compose
from magicdec.costmodel.round import round_times
from magicdec.costmodel.speedup import batch_rounds
from magicdec.planning.resolve import resolve
from magicdec.planning.setup import setup_of
from magicdec.scenarios import prediction_errors

RATES = (10.0, 0.2)  # GB/s and TFLOP/s


def test_steps_are_predicted_after_the_prompts_and_speedups_halfway_through_the_generation(
    monkeypatch,
):
    monkeypatch.setattr(prediction_errors, "measured_rates", lambda *_: RATES)
    keys = ["batch.size=8", "batch.context_len=512", "batch.generate_len=1024", "cache.budget=64"]
    plan = resolve(
        compose(["hardware=cpu", "data=random", "draft.synthetic_acceptance=0.8", *keys])
    )
    results = {"gamma": 4, "alpha": 0.8, "data/context_len_mean": 512, "speedup": 1.0}
    results |= {f"time/{step}_ms": 1.0 for step in ("target_decode", "draft", "verify")}
    found = prediction_errors.prediction_metrics(plan, results | {"roofline/bandwidth_gbs": 10.0})
    after_prompts, halfway = (
        round_times(setup_of(plan, *RATES).at(context=context), 4) for context in (512, 1024)
    )
    tokens = 1023 / batch_rounds(4, 0.8, num_rows=1, num_tokens=1023)  # the prefill gives the first
    assert halfway.speedup(tokens) > 1.02 * after_prompts.speedup(tokens)
    assert found["predicted/speedup"] == pytest.approx(halfway.speedup(tokens))
    assert found["predicted/speedup_error"] == pytest.approx(halfway.speedup(tokens) - 1)
    assert found["predicted/target_decode_ms"] == pytest.approx(1e3 * after_prompts.target.total)
