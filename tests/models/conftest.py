from pathlib import Path

import pytest

from tests.checkpoints import FAMILIES, make_checkpoint


@pytest.fixture(scope="session", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint of each family in turn."""
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A tiny checkpoint of its own, for tests that break it."""
    return make_checkpoint(tmp_path / "llama")
