"""A prediction in a sentence."""

from magicdec.costmodel.predict import AtGamma, Prediction
from magicdec.units import GIB

ASSUMED = 0.8  # in the advice to give an alpha: what published drafts reach
BOUND_BY = {
    "weights": "bound by reading weights",
    "kv": "bound by reading the KV cache",
    "activations": "bound by moving activations",
    "compute": "compute-bound",
    "communication": "bound by communication",
    "overhead": "bound by launch overhead",
}


def verdict(prediction: Prediction) -> str:
    """Return what to expect, and why, in plain words."""
    setup, best = prediction.setup, prediction.best
    where = f"at batch {setup.batch}, context {setup.context:,}"
    limit = _critical_context(prediction)
    if best.speedup is None:
        breaks_even = best.break_even_alpha
        if breaks_even is None:
            text = f"this configuration is predicted never to pay: {where}, {_reason(best)}; {limit}"
        else:
            text = (
                f"no acceptance is known for this configuration, so there is no verdict: it pays if alpha exceeds "
                f"{breaks_even:.2f} at gamma {best.gamma} ({where}); {limit}. {_remedy(prediction)}"
            )
    else:
        known = prediction.estimate
        assert known is not None
        basis = "measured acceptance, predicted times; " if known.is_measured else ""
        text = (
            f"this configuration is predicted to run at {prediction.speedups}, with gamma {best.gamma}: {where}, "
            f"{_reason(best)}; {limit} ({basis}alpha {known.alpha:.2f}: {known.source})"
        )
    return text if prediction.fits else f"{text}. {_does_not_fit(prediction)}"


def pays_from(at: AtGamma) -> str:
    """Return the alpha from which speculation pays, for a table."""
    return "never" if at.break_even_alpha is None else f"{at.break_even_alpha:.2f}"


def _remedy(prediction: Prediction) -> str:
    """Return what would give a verdict."""
    budgets = ", ".join(map(str, prediction.known_budgets))
    known = f"Choose a budget with a known acceptance (cache.budget={budgets})" if budgets else "Measure it with a run"
    return f"{known}, or give one, such as scenario.alpha={ASSUMED}"


def _critical_context(prediction: Prediction) -> str:
    critical = prediction.critical_context
    if critical is None:
        return f"S* is beyond {prediction.setup.target.max_position_embeddings:,}"
    return f"S* is {round(critical, 1 - len(str(critical)) + 1):,}"


def _reason(at: AtGamma) -> str:
    """Return what the baseline spends its time on if speculation pays, else what speculation spends it on."""
    times, decoding = at.times, at.times.target
    if (at.speedup or 0.0) >= 1.0:
        return f"decoding is {BOUND_BY[decoding.largest]}"
    drafting = times.draft.plus(times.select).scaled(times.gamma)
    # The time beyond that of decoding; an operator that becomes bound by compute counts with all its time.
    extra = times.verify.plus(decoding, -1.0)
    return (
        f"drafting takes {drafting.total / decoding.total:.2f} decoding steps and is {BOUND_BY[drafting.largest]}, "
        f"verification takes {times.verify.total / decoding.total:.2f} and is {BOUND_BY[extra.largest]}"
    )


def _does_not_fit(prediction: Prediction) -> str:
    needed, device = prediction.memory.total / GIB, prediction.setup.hardware.device
    return f"It needs {needed:.0f} GiB of {device.memory / GIB:.0f} on each GPU, so it does not fit"
