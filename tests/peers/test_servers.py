"""Servers that a run starts: how vLLM's and llama.cpp's are started, with stand-ins for them, and
that none is left.
"""

import json
import os
import signal
import sys
import time

import pytest

from magicdec.config.load import compose
from magicdec.drafts.eagle3 import Eagle3
from magicdec.drafts.model import IndependentModel
from magicdec.drafts.ngram import PromptLookup
from magicdec.errors import UserError
from magicdec.peers.llamacpp import LlamacppPeer
from magicdec.peers.started_server import as_arguments
from magicdec.peers.vllm import METHODS, VllmEngine, VllmPeer
from magicdec.scenarios import Job, run
from magicdec.units import WAYS
from tests.peers.conftest import needs
from tests.peers.stand_in import __file__ as stand_in
from tests.peers.test_openai import LOAD
from tests.programs import Program
from tests.refusals import refusal
from tests.scenarios.test_run import TINY
from tests.small import machine
from tests.tracking.sample import lines

STARTED = [
    *LOAD,
    "hardware=cpu",
    "draft=model",
    "cache=full",
    "batch.size=2",
    "engine.time_limit_s=20",
]


def starting(monkeypatch, behaviour: dict, log=None) -> None:
    """Make vLLM a stand-in; with `log`, its first line is the server's process."""

    def server(self, speculative: bool, port: int) -> list[str]:
        note = f"import os; open({str(log)!r}, 'a').write(f'{{os.getpid()}}\\n'); " if log else ""
        program = f"{note}import runpy, sys; sys.argv = ['', '{port}', {json.dumps(behaviour)!r}]; "
        return [
            sys.executable,
            "-c",
            program + f"runpy.run_path({stand_in!r}, run_name='__main__')",
        ]

    monkeypatch.setattr(VllmPeer, "server", server)
    monkeypatch.setattr(VllmPeer, "installed", lambda engine: "vllm 0")
    monkeypatch.setenv(VllmPeer.variable(), sys.executable)


def is_running(pid: int) -> bool:
    try:
        return "Z" not in open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_each_way_has_a_server_of_its_own(tmp_path, monkeypatch):
    starting(monkeypatch, {"metrics": "vllm", "load_s": 0.5}, tmp_path / "pids")
    result = run(
        compose(["engine=vllm", *STARTED, f"runs_dir={tmp_path}", "scenario.concurrencies=[1,2]"]),
        Job(),
    )
    assert {key.partition("/")[0] for key in result if "time_to_first" in key} == {*WAYS}
    assert (result["acceptance/source"], result["acceptance_length"]) == ("/metrics", 2)
    assert result["lossless/passed"] is True
    assert len(lines(tmp_path / result["id"] / "history.jsonl")) == 2
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    assert not any(map(is_running, pids))


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ({"load_s": 60}, "the server did not answer /health within engine.time_limit_s=1 seconds"),
        (
            {"models": None, "nonsense": 1},
            "the server ended (exit code 1); its last words: TypeError",
        ),
        ({"dies_at": 5}, "the server ended"),
        ({"status": 500, "body": "no"}, "status 500: no"),
    ],
)
@pytest.mark.slow
def test_a_server_that_fails_is_one_line_and_not_left(tmp_path, monkeypatch, behaviour, said):
    starting(monkeypatch, behaviour, tmp_path / "pids")
    limit = "engine.time_limit_s=1" if "load_s" in behaviour else "engine.time_limit_s=20"
    with refusal(said) as raised:
        run(compose(["engine=vllm", *STARTED, limit, f"runs_dir={tmp_path}"]), Job())
    assert str(raised.value).startswith("engine.name=vllm: ")
    assert not any(is_running(int(pid)) for pid in (tmp_path / "pids").read_text().split())


RUN = """
import sys
import tests.peers.test_servers as here
from pytest import MonkeyPatch
from magicdec.cli import main
here.starting(MonkeyPatch(), {"chunk_s": 1}, sys.argv[1])
sys.argv[1:2] = []
sys.exit(main())
"""


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.slow
def test_no_server_is_left_behind(tmp_path, end):
    pids, runs = tmp_path / "pids", tmp_path / "runs"
    process = Program("-c", RUN, pids, "engine=vllm", *STARTED, f"runs_dir={runs}")
    deadline = time.monotonic() + 60
    while not (pids.exists() and pids.read_text().endswith("\n")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1)  # under load
    pid = int(pids.read_text())
    assert is_running(pid)
    os.kill(process.pid, end)
    process.finish(30)
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(pid)


def test_vllms_arguments(peer):
    settings = {"draft_folder": "a draft", "hardware": machine(tensor_parallel=4)}
    command = peer(draft=Eagle3(), **settings).server(True, 81)
    told = {
        name: command[command.index(f"--{name}") + 1]
        for name in ("model", "port", "tensor-parallel-size")
    }
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert told == {"model": str(TINY / "target"), "port": "81", "tensor-parallel-size": "4"}
    assert [command[command.index(f"--max-{name}") + 1] for name in ("num-seqs", "model-len")] == [
        "2",
        "200",
    ]
    assert "--no-enable-prefix-caching" in command
    assert command[command.index("--per-request-spec-decode-metrics") + 1] == "summary"
    drafts = json.loads(command[command.index("--speculative-config") + 1])
    assert drafts == {"method": "eagle3", "num_speculative_tokens": 3, "model": "a draft"}
    assert "--speculative-config" not in peer(draft=IndependentModel(), **settings).server(
        False, 81
    )
    lookup = peer(keys={"method": "suffix"}, draft=PromptLookup(max_ngram=4)).options(True)[
        "speculative_config"
    ]
    assert lookup == {"method": "suffix", "num_speculative_tokens": 3}
    free = peer(draft=PromptLookup(synthetic_acceptance=0.7)).options(True)["speculative_config"]
    assert free["rejection_sample_method"] == "synthetic"
    assert free["synthetic_acceptance_length"] == pytest.approx(1 + 0.7 + 0.7**2 + 0.7**3)


def test_vllms_sampler_for_cpus_accepts_at_no_given_rate(peer):
    """It ends in an assertion; so the free draft is accepted as its text repeats."""
    for device, draws in (("cpu", False), ("cuda", True)):
        assert peer(hardware=machine(device=device)).draws_acceptance is draws


def test_a_method_needs_its_draft():
    for draft, methods in METHODS.items():
        assert VllmEngine().chosen(draft) == methods[0]
        assert [VllmEngine(method=method).chosen(draft) for method in methods] == list(methods)
    with pytest.raises(
        UserError, match=r"^engine.method=mtp goes with draft=self, not with draft=model$"
    ):
        VllmEngine(method="mtp").chosen("model")
    with pytest.raises(UserError, match=r"engine.method=medusa: must be one of auto, draft_model,"):
        compose(["engine=vllm", "engine.method=medusa"])


def test_flags():
    assert as_arguments({"a_b": 1, "c": True, "d": False, "e": {"x": 1}}) == [
        "--a-b",
        "1",
        "--c",
        "--e",
        '{"x": 1}',
    ]


def test_the_study_composes_for_vllm():
    config = compose(["experiment=study/llama-3.1-70b-8b", "engine=vllm"])
    assert (config.engine.name, config.draft.name, config.hardware.tensor_parallel) == (
        "vllm",
        "model",
        4,
    )
    assert config.scenario.name == "serve"
    assert compose(["experiment=study/llama-3.1-70b-8b"]).scenario == config.scenario


SMALL_LOAD = ["hardware=cpu", "cache=full", "batch.size=2", "draft.gamma=3", "scenario.rates=[20]"]


@pytest.mark.parametrize("kind", [VllmPeer, LlamacppPeer])
@pytest.mark.parametrize("draft", ["none", "model", "ngram"])
def test_the_real_server_writes_what_ours_writes(tmp_path, kind, draft):
    needs(kind)
    drafts = [text for text in SMALL_LOAD if draft != "none" or "gamma" not in text]
    common = [*LOAD, *drafts, f"draft={draft}", f"runs_dir={tmp_path}"]
    native, other = (
        run(compose([f"engine={engine}", *common]), Job()) for engine in ("native", kind.name)
    )
    ours, theirs = (lines(tmp_path / one["id"] / "generations.jsonl") for one in (native, other))
    assert [row["autoregressive"] for row in theirs] == [row["autoregressive"] for row in ours]
    if draft != "none":
        assert other["lossless/identical"] is True
        assert 1 <= other.get("acceptance_length", 1) <= 4  # no long n-gram may occur twice
