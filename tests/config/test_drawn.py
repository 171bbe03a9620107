"""draft.synthetic_acceptance: a probability, a mean length, or shares by position."""

import pytest

from magicdec.config.choices import DraftConfig
from magicdec.config.load import compose
from magicdec.config.omega import omega
from magicdec.errors import UserError
from magicdec.planning.resolve import resolve
from magicdec.scenarios import predict


def drawn(given, gamma=4):
    return DraftConfig(gamma=gamma, synthetic_acceptance=given)


def test_what_is_drawn_by_position():
    assert drawn(0.5).drawn(3) == (0.5, 0.5, 0.5)
    assert drawn([0.8, 0.4, 0.0, 0.0]).drawn(5) == (0.8, 0.5, 0.0, 0.0, 0.0)
    assert drawn(None).drawn(3) is None


@pytest.mark.parametrize("given", [0.7, 3.24, [0.8, 0.6, 0.5, 0.34]])
def test_the_mean_length_is_what_was_asked_for(given):
    asked = {0.7: omega(4, 0.7), 3.24: 3.24}.get(given) if not isinstance(given, list) else 3.24
    assert drawn(given).drawn_length(4) == pytest.approx(asked)
    assert omega(4, drawn(given).drawn_alpha) == pytest.approx(asked)


def test_a_prediction_assumes_the_alpha_of_the_same_length():
    keys = ["target=llama-3.1-8b", "hardware=h100", "scenario=predict", "draft.gamma=4"]
    by_length, by_position = (
        predict.predicted(resolve(compose([*keys, f"draft.synthetic_acceptance={given}"])))
        for given in ("3.24", "[0.8,0.6,0.5,0.34]")
    )
    assert by_length.best.alpha == pytest.approx(by_position.best.alpha)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("[0.8,0.6]", "needs a probability for each of draft.gamma=4 positions"),
        ("[0.8,0.6,0.7,0.1]", "must not rise"),
        ("5.1", "yields at most 5 tokens"),
        ("[0.8,1.2,0.1,0.1]", "must be a probability, a mean length above 1, or a list"),
        ("-1", "must be a probability, a mean length above 1, or a list"),
        ("3.24 draft.gamma=auto", "needs a fixed draft.gamma"),
    ],
)
def test_mistakes_in_what_is_drawn_are_named(keys, message):
    with pytest.raises(UserError, match=message):
        compose(["draft.gamma=4", *f"draft.synthetic_acceptance={keys}".split()])
