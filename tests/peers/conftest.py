"""Peers whose workers are programs of a test's, run by our own Python."""

import os
import sys

import pytest

from magicdec.config.registry import ENGINES
from magicdec.peers import process
from magicdec.peers.base import PeerSpec
from magicdec.peers.process import WorkerPeer
from magicdec.verification.sampling import Sampling
from tests.scenarios.test_run import TINY
from tests.small import machine


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def needs(kind: type[WorkerPeer]) -> None:
    """Skip a test where no environment with this engine is named."""
    if not os.environ.get(kind.variable()):
        pytest.skip(f"{kind.variable()} names no Python of an environment with {kind.title}")


@pytest.fixture
def peer(tmp_path, monkeypatch):
    """A function that makes a peer of the bundled target, whose worker is the given program."""
    made, worker = [], tmp_path / "worker.py"
    monkeypatch.setattr(process, "MAIN", worker)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # with what it converts
    monkeypatch.setattr(WorkerPeer, "installed", classmethod(lambda cls, engine: "an engine 1"))

    def new(
        program: str = "", name: str = "vllm", time_limit_s: float = 30, keys=(), **changes
    ) -> WorkerPeer:
        worker.write_text(program)
        engine = ENGINES[name].facts(python=sys.executable, time_limit_s=time_limit_s, **dict(keys))
        settings = {
            "num_rows": 2,
            "max_len": 200,
            "sampling": Sampling(),
            "gamma": 3,
            "kv_bytes_per_token": 8,
        }
        settings |= {"target": str(TINY / "target"), "hardware": machine(), "engine": engine}
        made.append(ENGINES[name].work(PeerSpec(**settings | changes)))
        return made[-1]

    yield new
    for one in made:
        one.close()
