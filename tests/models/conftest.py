from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import FAMILIES, make_checkpoint
from tests.models.adapter_cases import Folders


@pytest.fixture(scope="session", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint of each family in turn."""
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A tiny checkpoint of its own, for tests that break it."""
    return make_checkpoint(tmp_path / "llama")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Return a function that makes a family's checkpoint at its first use."""

    @cache
    def folder(family: str, seed: int = 0, **changes: Any) -> Path:
        path = tmp_path_factory.mktemp(family)
        return make_checkpoint(path, family, seed=seed, eos_token_id=None, **changes)

    return folder
