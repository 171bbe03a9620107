"""vLLM as an engine: the adapter against stand-ins for its worker, and against the real one where
there is one.

MAGICDEC_VLLM_PYTHON names the Python of such an environment.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

from magicdec.config.load import compose
from magicdec.drafts.model import IndependentModel
from magicdec.drafts.ngram import PromptLookup
from magicdec.measure.metrics import RowTimes
from magicdec.peers import process
from magicdec.peers.base import AcceptanceCounts, PeerSpec
from magicdec.peers.vllm import VllmEngine, VllmPeer
from magicdec.planning.resolve import resolve
from magicdec.scenarios import Job, run
from magicdec.verification.sampling import Sampling
from tests.peers.conftest import is_alive, needs
from tests.programs import ROOT, Program
from tests.refusals import refusal
from tests.scenarios.test_run import TINY
from tests.small import machine

# Writes down what it was asked, and says its process in its version.
GOOD = """
import json, os, sys
options = json.loads(input())
print(json.dumps({"version": f"of {os.getpid()}"}), flush=True)
for line in sys.stdin:
    batch = json.loads(line)
    with open(sys.argv[0].replace(".py", ".asked"), "a") as asked:
        print(json.dumps({"batch": batch, "options": options}), file=asked)
    rows, tokens = len(batch["prompts"]), list(range(batch["generate_len"]))
    answer = {"tokens": [tokens] * rows, "first": [0.5] * rows, "decode": [2.0] * rows}
    fast = "speculative_config" in options
    answer |= {"rounds": 4 * fast, "proposed": 12 * fast, "accepted": [3, 2, 1] if fast else [], "peak_bytes": 7 + fast}
    answer["unplaced"] = 0
    print(json.dumps(answer), flush=True)
"""  # noqa: E501
# Waits for the worker that is named.
WAITING = """
import pathlib, sys
from magicdec.peers import base, process, vllm
from magicdec.peers.vllm import VllmEngine
from magicdec.verification.sampling import Sampling
from magicdec.conformance.small_models import machine
process.MAIN = pathlib.Path(sys.argv[1])
engine = VllmEngine(python=sys.executable, time_limit_s=60)
with vllm.VllmPeer(base.PeerSpec("a", machine(), 1, 64, Sampling(), engine=engine)) as one:
    one.generate([[1]], 2, False)
"""


def asked() -> list[dict]:
    return [
        json.loads(line) for line in process.MAIN.with_suffix(".asked").read_text().splitlines()
    ]


def test_a_worker_for_each_way(peer):
    engine = peer(GOOD, keys={"method": "eagle"}, draft=IndependentModel(), draft_folder="a draft")
    prompts = [[1, 2, 3], [4, 5]]
    plain = engine.generate(prompts, 5, speculative=False)
    assert plain.tokens == [[0, 1, 2, 3, 4]] * 2
    assert plain.times == [RowTimes(0.5, 2.0, 4)] * 2
    assert (plain.counts, engine.peak_bytes) == (AcceptanceCounts(), 7)
    (first,), one = asked(), engine.version
    assert first["batch"]["prompts"] == prompts
    assert first["batch"]["sampling"] == {"temperature": 0.0, "ignore_eos": True}
    options = first["options"]
    assert (options["model"], options["max_model_len"], options["max_num_seqs"]) == (
        str(TINY / "target"),
        200,
        2,
    )
    whole_blocks = 2 * (256 + 256) + 128  # of 128 tokens, and two to spare a row
    assert options["kv_cache_memory_bytes"] == 8 * whole_blocks
    assert "speculative_config" not in options
    engine.generate(prompts, 5, speculative=False)
    assert engine.version == one
    assert engine.generate(prompts, 5, speculative=True).counts == AcceptanceCounts(
        4, 12, (3, 2, 1)
    )
    assert engine.peak_bytes == 8
    assert engine.version != one
    assert not is_alive(int(one.split()[-1]))
    drafts = asked()[-1]["options"]["speculative_config"]
    assert drafts == {"method": "eagle", "model": "a draft", "num_speculative_tokens": 3}
    engine.close()
    assert not is_alive(int(engine.version.split()[-1]))


def test_what_it_is_told_of_prompt_lookup_sampling_and_ends(peer):
    sampling = Sampling(temperature=0.7, top_p=0.9, seed=5)
    options = {"sampling": sampling, "eos_token_ids": (0, 2), "hardware": machine(compile=True)}
    engine = peer(GOOD, draft=PromptLookup(max_ngram=4), **options)
    engine.generate([[1]], 2, speculative=True)
    engine.generate([[1]], 2, speculative=True, first=4)
    line, later = asked()
    assert later["batch"]["seed"] == 9  # a batch behind four other prompts
    drafts = {
        "method": "ngram",
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 1,
        "num_speculative_tokens": 3,
    }
    assert line["options"]["speculative_config"] == drafts
    assert (line["options"]["enforce_eager"], line["batch"]["seed"]) == (False, 5)
    expected = {
        "temperature": 0.7,
        "top_k": 0,
        "top_p": 0.9,
        "ignore_eos": False,
        "stop_token_ids": [0, 2],
    }
    assert line["batch"]["sampling"] == expected


def test_a_vllm_that_cannot_be_imported_is_the_users_to_mend(peer):
    answer = json.dumps({"error": "ImportError: torchvision", "kind": "import"})
    with refusal("vLLM cannot be imported (ImportError: torchvision); make one with"):
        peer(f"input(); print({answer!r}, flush=True)").generate([[1]], 2, speculative=False)


def test_our_own_worker_where_there_is_no_vllm(peer, monkeypatch):
    """The real program under a Python without vLLM: it says so, as the plan stage would have."""
    engine = peer(time_limit_s=60)
    monkeypatch.undo()
    with refusal("No module named 'vllm'"):
        engine.generate([[1]], 2, speculative=False)


def test_the_worker_ends_with_its_input():
    """Whoever asked may have been killed."""
    program = "import queue, threading, time; from magicdec.peers.worker import listen\n"
    program += "threading.Thread(target=listen, args=(queue.Queue(),)).start(); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE)
    process.stdin.close()
    assert process.wait(30) == 0


def test_an_interrupted_run_leaves_no_worker(tmp_path):
    """Ctrl-C while the worker is silent."""
    worker, told = tmp_path / "worker.py", tmp_path / "pid"
    say = f"open({str(told)!r}, 'w').write(f'{{os.getpid()}} ')"
    worker.write_text(f"import os, time; input(); {say}; time.sleep(60)")
    process = Program("-c", WAITING, worker)
    while not (told.exists() and told.read_text().endswith(" ")):
        assert process.poll() is None
        time.sleep(0.05)
    pid = int(told.read_text())
    assert is_alive(pid)
    os.kill(process.pid, signal.SIGINT)
    assert process.finish(20).returncode != 0
    assert not is_alive(pid)


def test_the_real_one_accepts_a_head_as_often_as_ours(tmp_path):
    needs(VllmPeer)
    size = ["batch.size=8", "batch.context_len=384", "batch.generate_len=64", "scenario.repeats=1"]
    head = ["draft=eagle3", "cache=full", "draft.gamma=3", *size, f"runs_dir={tmp_path}"]
    native, other = (
        run(compose([f"engine={engine}", *head]), Job()) for engine in ("native", "vllm")
    )
    assert other["output/fingerprint"] == native["output/fingerprint"]
    low, high = native["acceptance_rate_ci95"]
    assert low < other["acceptance_rate"] < high


def test_a_head_whose_rows_outgrow_it_is_refused():
    overrides = [
        "engine=vllm",
        f"engine.python={sys.executable}",
        "draft=eagle3",
        "cache=full",
        "draft.gamma=3",
    ]
    most = 512 - 64 - 2 * 4
    with refusal("beyond its max_position_embeddings=512; ", f" batch.context_len={most} or less"):
        resolve(compose([*overrides, f"batch.context_len={most + 1}"]))
    with refusal("pip install"):
        resolve(compose([*overrides, f"batch.context_len={most}"]))


def test_the_real_one_ends_rows_at_their_end_of_sequence():
    needs(VllmPeer)
    engine = VllmEngine(time_limit_s=300)
    sizes = {"num_rows": 2, "max_len": 256, "kv_bytes_per_token": 8192}
    spec = PeerSpec(str(TINY / "target"), machine(), sampling=Sampling(), engine=engine, **sizes)
    prompts = [list(range(5, 105)), list(range(200, 260))]
    with VllmPeer(spec) as peer:
        whole = peer.generate(prompts, 16, speculative=False).tokens
    end = whole[0][5]
    with VllmPeer(replace(spec, eos_token_ids=(end,))) as peer:
        got = peer.generate(prompts, 16, speculative=False)
    assert got.tokens == [row[: row.index(end) + 1] if end in row else row for row in whole]
    assert got.times[0].decoded == len(got.tokens[0]) - 1 < 15


def test_the_free_draft_of_a_profile_has_a_method_of_its_own(peer):
    """Whatever method was chosen for the draft that is profiled."""
    draft = IndependentModel(gamma=2)
    chosen = peer("", keys={"method": "draft_model"}, draft=draft, free_acceptance=0.5)
    free = VllmPeer(chosen._with_free_draft())
    try:
        options = free.options(True)
        assert options["speculative_config"]["method"] == "ngram"
    finally:
        free.close()
