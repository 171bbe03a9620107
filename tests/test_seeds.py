"""Random numbers of a test depend on the test alone."""

import random

import numpy as np
import pytest
import torch

from tests.conftest import seed_of


@pytest.fixture(scope="module")
def shared():
    """What the first of several tests sets up."""
    return torch.rand(3)


@pytest.mark.parametrize("number", [1, 2])
def test_numbers_are_those_of_the_test(number, request):
    seed = seed_of(request.node.nodeid)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(seed)))
    assert random.random() == random.Random(seed).random()
    assert np.random.rand() == np.random.RandomState(seed).rand()


def test_numbers_of_a_shared_fixture_are_its_own(shared):
    generator = torch.Generator().manual_seed(
        seed_of(f"{__name__.replace('.', '/')}.py shared None")
    )
    assert torch.equal(shared, torch.rand(3, generator=generator))
