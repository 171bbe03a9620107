"""The policy that docs/adding-a-policy.md takes as its example works as it stands there."""

from magicdec.config.registry import POLICIES
from tests.inputs.test_plugins import EXAMPLES
from tests.small import drafting, small_model


def test_the_example_policy_is_lossless(monkeypatch):
    monkeypatch.setattr(POLICIES, "_entries", {name: POLICIES[name] for name in POLICIES})
    exec(EXAMPLES[0], {"__name__": "strided"})
    batch = drafting(
        "self", small_model(), [60, 9, 35], policy="strided", gamma=3, budget=12, recent=6
    )
    assert batch.decoder.generate().tokens == batch.decoder.generate(batch.draft).tokens
    cache, target = batch.draft.cache, batch.decoder.cache
    batch.restart()
    kept = cache.k_LBKSD[0, 0, 0, :6]
    assert (kept == target.k_LBKSD[0, 0, 0, [0, 9, 18, 27, 36, 45]]).all()
