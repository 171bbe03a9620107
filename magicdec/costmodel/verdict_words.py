"""The verdict of a prediction in words: what to expect of a configuration, and why."""

from magicdec.costmodel.growth import remarks
from magicdec.costmodel.prediction import AtGamma, Prediction
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
    context = (prediction.prompts or setup).context
    where = f"at batch {setup.batch}, context {context:,}"
    limit = _critical_context(prediction)
    if best.speedup is None:
        breaks_even = best.break_even_alpha
        if breaks_even is None:
            text = (
                f"this configuration is predicted never to pay: {where}, {_reason(best)}; {limit}"
            )
        else:
            text = (
                "no acceptance is known for this configuration, so there is no verdict: it pays if"
                f" alpha exceeds {breaks_even:.2f} at gamma {best.gamma} ({where}); {limit}."
                f" {_remedy(prediction)}"
            )
    else:
        estimate = prediction.estimate
        assert estimate is not None
        basis = "measured acceptance, predicted times; " if estimate.is_measured else ""
        text = (
            f"{_asked_and_best(prediction)}: {where}, {_reason(best)}; {limit} ({basis}alpha"
            f" {estimate.alpha:.2f}: {estimate.source})"
        )
    if setup.remark:
        text = f"{text}. {setup.remark}"
    for remark in remarks(setup, best.gamma):
        text = f"{text}. {remark[0].upper()}{remark[1:]}"
    needed = prediction.memory.total / GIB
    device = prediction.setup.hardware.device
    unfit = (
        f". It needs {needed:.0f} GiB of {device.memory / GIB:.0f} on each GPU, so it does not fit"
    )
    return text if prediction.fits else f"{text}{unfit}"


def _asked_and_best(prediction: Prediction) -> str:
    """Return the speedups at draft.gamma, and at the best gammas where these are others."""
    best, per_batch, asked = prediction.best, prediction.best_per_batch, prediction.configured
    sure = f" ({prediction.confidence})" if prediction.confidence else ""

    def title(at: AtGamma) -> str:
        criteria = {"per row": best, "per batch": per_batch}
        met = " and ".join(name for name, winner in criteria.items() if at is winner)
        return f"the best {met}" if met else ""

    first = asked or best
    name = f"draft.gamma={asked.gamma}" if asked else f"gamma {best.gamma}"
    subject = f"{name}, {title(first)}," if title(first) else name
    gain = sure if first is best else f" ({_pays(prediction, first)})"
    text = f"{subject} is predicted to run at {prediction.speedups(first)}{gain}"
    if best is not first:
        text += f"; {title(best)} is gamma {best.gamma}: {prediction.speedups(best)}{sure}"
    if per_batch is not None and per_batch not in (first, best):
        text += f"; {title(per_batch)} is gamma {per_batch.gamma}: {prediction.speedups(per_batch)}"
    return text


def _pays(prediction: Prediction, at: AtGamma) -> str:
    """Return whether speculation pays at a gamma, in words."""
    per_batch = prediction.speedup_wall(at)
    if at.speedup is None or at.speedup < 1:
        return "does not pay"
    return "pays per row only" if per_batch is not None and per_batch < 1 else "pays"


def pays_from(at: AtGamma) -> str:
    """Return the alpha from which speculation pays, for a table."""
    return "never" if at.break_even_alpha is None else f"{at.break_even_alpha:.2f}"


def _remedy(prediction: Prediction) -> str:
    """Return what would give a verdict."""
    budgets = ", ".join(map(str, prediction.known_budgets))
    advice = (
        f"Choose a budget with a known acceptance (cache.budget={budgets})"
        if budgets
        else "Measure it with a run"
    )
    return f"{advice}, or give one, such as scenario.alpha={ASSUMED}"


def _critical_context(prediction: Prediction) -> str:
    critical = prediction.critical_context
    if not any(memory.grows for memory in prediction.setup.target.memories):
        return "there is no S*"
    if critical is None:
        return f"S* is beyond {prediction.setup.target.max_position_embeddings:,}"
    return f"S* is {round(critical, 1 - len(str(critical)) + 1):,}"


def _reason(at: AtGamma) -> str:
    """Return what the baseline spends its time on if speculation pays, else what speculation spends
    it on.
    """
    times, decoding = at.times, at.times.target
    if (at.speedup or 0.0) >= 1.0:
        return f"decoding is {BOUND_BY[decoding.largest]}"
    drafting = times.draft.plus(times.select).scaled(times.gamma)
    # The time beyond that of decoding; an operator that becomes bound by compute counts with all
    # its time.
    extra = times.verify.plus(decoding, -1.0)
    return (
        f"drafting takes {drafting.total / decoding.total:.2f} decoding steps and is"
        f" {BOUND_BY[drafting.largest]}, verification takes"
        f" {times.verify.total / decoding.total:.2f} and is {BOUND_BY[extra.largest]}"
    )
