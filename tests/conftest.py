"""Settings for all tests."""

import logging
import os
import signal

import pytest
import torch

# The models here are so small that a second thread only waits; on a busy machine the threads wait for each other.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of the programs that tests start
# Whoever is started in the background of a script ignores Ctrl-C, and so would the programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    """Tests that need a GPU are marked `gpu`; they skip visibly without one."""
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


def pytest_collection_modifyitems(items):
    """Skip the marked tests where there is no GPU."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def hydra_logging():
    """Undo what Hydra does to the root logger: its handlers write to what pytest has closed by the next test."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def forked_ranks(monkeypatch):
    """Ranks that begin with everything imported; test_run.py starts some as a user's are."""
    from tests.programs import SERVER, start_server

    start_server()
    monkeypatch.setattr("magicdec.scenarios.ranks.CONTEXT", SERVER)
