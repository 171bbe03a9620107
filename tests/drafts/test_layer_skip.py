"""Layer skipping: a model of the first layers, without a copy of anything."""

from types import SimpleNamespace

import pytest
import torch

from magicdec.drafts.layer_skip import LayerSkip
from magicdec.errors import UserError
from magicdec.models.kv_cache import KVCache
from tests.small import accepted, open_batch, random_prompts, small_model


def test_it_computes_what_the_targets_first_layers_compute():
    target = small_model(num_layers=3)
    part = target.first_layers(2)
    alone = small_model(num_layers=2)
    alone.load_state_dict(part.state_dict())
    tokens = torch.tensor(random_prompts([9, 9]))
    outputs = [m(tokens, KVCache(m.config, 2, 9, torch.float32, "cpu")) for m in (part, alone)]
    assert torch.equal(*outputs)
    assert part.embed is target.embed
    assert part.layers[1] is target.layers[1]


def test_layers_that_do_nothing_are_not_missed():
    """A target whose last layer adds nothing accepts every proposal of the layers before it."""
    target = small_model()
    target.layers[1].output.weight.zero_()
    target.layers[1].down.weight.zero_()
    batch = open_batch(
        target, random_prompts([20, 31]), draft_name="layer_skip", num_layers=1, gamma=3
    )
    assert (accepted(batch.decoder.generate(batch.draft)) == 3).all()
    assert batch.draft.cache_bytes == 0


@pytest.mark.parametrize("num_layers", [0, 2, 3])
def test_as_many_layers_as_the_target_has_are_refused(num_layers):
    with pytest.raises(UserError, match=f"draft.num_layers={num_layers}: must be from 1 to 1"):
        LayerSkip(num_layers=num_layers).check(small_model().config)


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_one_of_the_layers_must_have_attention(num_layers):
    """Of four here, of which the third has."""
    target = SimpleNamespace(num_layers=4, has_entries=lambda layer: layer == 2)
    draft = LayerSkip(num_layers=num_layers)
    if num_layers == 3:
        draft.check(target)
        return
    with pytest.raises(UserError, match=f"^draft.num_layers={num_layers}: the target's first"):
        draft.check(target)


def test_the_draft_is_made_of_the_first_layers():
    config = small_model(num_layers=3, sliding_window=8, sliding_layers=(0,)).config
    drafter = LayerSkip(num_layers=2).drafter(config)
    assert (drafter.num_layers, drafter.sliding_layers) == (2, (0,))
