"""A peer whose worker is a program of the test's, run by our own Python."""

import sys

import pytest

from magicdec.drafts.ngram import PromptLookup
from magicdec.peers import process
from magicdec.peers.base import PeerSpec
from magicdec.peers.vllm import VllmEngine, VllmPeer
from magicdec.verification.sampling import Sampling
from tests.small import machine


@pytest.fixture
def peer(tmp_path, monkeypatch):
    made = []

    def new(program: str, time_limit_s: float = 30, **changes) -> VllmPeer:
        worker = tmp_path / "worker.py"
        worker.write_text(program)
        monkeypatch.setattr(process, "MAIN", worker)
        method = "auto" if isinstance(changes.get("draft"), PromptLookup) else "eagle"
        engine = VllmEngine(python=sys.executable, method=method, time_limit_s=time_limit_s)
        settings = {"num_rows": 2, "max_len": 200, "sampling": Sampling(), "gamma": 3, "kv_bytes_per_token": 8}
        settings |= {"hardware": machine(), "engine": engine}
        made.append(VllmPeer(PeerSpec("a target", **settings | changes)))
        return made[-1]

    yield new
    for one in made:
        one.close()
