"""Workers that crash, are killed, hang, flood their pipes or answer nonsense: one line, and no
process is left.
"""

import json
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magicdec.config.load import compose
from magicdec.errors import UserError
from magicdec.peers import pipe, process
from magicdec.peers.vllm import VllmPeer
from magicdec.scenarios import Job, run
from tests.peers.conftest import is_alive
from tests.refusals import refusal
from tests.scenarios.test_run import SMALL, TINY
from tests.serving.test_http import ANYTHING

READY = (
    'import json, os, sys, time; input(); print(json.dumps({"version": "1"}), flush=True);'
    " input()\n"
)
GOOD = {
    "tokens": [[1, 2]],
    "first": [0.5],
    "decode": [2.0],
    "rounds": 0,
    "proposed": 0,
    "accepted": [],
}
GOOD |= {"unplaced": 0, "peak_bytes": 7}


def answering(line: str) -> str:
    return READY + f"print({line!r}, flush=True); time.sleep(60)"


FAULTS = {
    "crash": (
        READY + "sys.exit('first\\nno more memory')",
        r"ended \(exit code 1\); its last words: no more memory",
    ),
    "early": ("import sys; sys.exit('at once')", r"ended \(exit code 1\); its last words: at once"),
    "killed": (READY + "os.kill(os.getpid(), 9)", r"ended \(killed by SIGKILL, .*\)"),
    "fault": (READY + "os.abort()", r"ended \(signal SIGABRT\)"),
    "silence": (
        READY + "sys.stderr.write('hm\\n'); time.sleep(60)",
        "gave no answer .*time_limit_s=1 .*: hm",
    ),
    "deaf": ("import time; time.sleep(60)", "gave no answer within engine.time_limit_s=1 seconds"),
    "stopped": (
        READY + "os.kill(os.getpid(), 19)",
        "gave no answer within engine.time_limit_s=1 seconds",
    ),
    "mute": (READY + "os.close(1); time.sleep(60)", r"ended \(its output was closed\)"),
    "half a line": (
        READY + "os.write(1, b'{\"tokens\": [[1'); sys.exit(0)",
        "answered '.*tokens.*not a JSON object",
    ),
    "escapes": (READY + r"sys.exit('\x1b[31mred\x07\r\n\ud800')", r"its last words: \\udc?"),
    "stderr": (
        READY + "while True: os.write(2, b'x' * 65536)",
        "gave no answer within .*last words: x{300}...",
    ),
    "stdout": (
        READY + "while True: os.write(1, b'x' * 65536)",
        "answered 'x{80}', which is not a JSON object",
    ),
    "error": (answering('{"error": "ValueError: no\\nmore"}'), "failed: ValueError: no more"),
    "text": (
        answering("Loading: 100%"),
        r"answered 'Loading: 100%\\n', which is not a JSON object",
    ),
    "list": (answering("[1]"), r"answered '\[1\]\\n', which is not a JSON object"),
    "null": (answering("null"), "answered 'null.*, which is not a JSON object"),
    "deep": (answering("[" * 100_000), r"answered '\[{80}', which is not a JSON object"),
    "digits": (answering("9" * 5000), "answered '9{80}', which is not a JSON object"),
    "empty": (answering("{}"), "broke the protocol: its answer: tokens is missing a value"),
    "NaN": (
        answering(json.dumps(GOOD | {"first": [float("nan")]})),
        r"its answer: first=\[nan\]: must be a list",
    ),
    "rows": (
        answering(json.dumps(GOOD | {"decode": []})),
        "its answer: decode has 0 values for 1 rows",
    ),
    "more": (
        answering(json.dumps(GOOD | {"tokens": [], "first": [], "decode": []})),
        "it decoded 0 rows, not 1",
    ),
    "short": (
        answering(json.dumps(GOOD | {"tokens": [[1]]})),
        "it cut a row short, at 1 of 2 tokens",
    ),
    "type": (
        answering(json.dumps(GOOD | {"tokens": [["\x1b"]]})),
        r"its answer: tokens=\[\[...\]\]: must be a list",
    ),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_worker_that_fails(peer, monkeypatch, kind):
    monkeypatch.setattr(pipe, "EXIT_S", 1)
    monkeypatch.setattr(pipe, "ANSWER_BYTES", 1 << 20)
    program, said = FAULTS[kind]
    engine = peer(program, time_limit_s=1 if "time_limit_s" in said or kind == "stderr" else 30)
    start = time.monotonic()
    # More than a pipe holds, for a worker that does not read it.
    with pytest.raises(UserError, match=f"^engine.name=vllm: the worker .*{said}") as raised:
        engine.generate([[1] * 100_000], 2, speculative=False)
    assert str(raised.value).isprintable()
    assert raised.value.kind == "crashed"
    assert time.monotonic() - start < 10
    assert not is_alive(engine._worker._process.pid)


def test_a_child_that_outlives_its_worker_does_not_keep_us(peer, monkeypatch):
    monkeypatch.setattr(pipe, "EXIT_S", 0.2)
    child = "import subprocess; subprocess.Popen(['sleep', '5'], start_new_session=True)\n"
    engine = peer(child + "import time; time.sleep(60)", time_limit_s=1)
    start = time.monotonic()
    with pytest.raises(UserError, match="gave no answer"):
        engine.generate([[1]], 2, speculative=False)
    assert time.monotonic() - start < 4


@settings(max_examples=100)
@given(
    st.binary(max_size=20)
    | st.dictionaries(st.sampled_from([*GOOD, "error", "kind"]), ANYTHING, max_size=2)
)
def test_no_answer_ends_otherwise_than_in_a_line(answer):
    """Answers are bytes, or the right one but for a few fields; no process is needed."""
    worker = pipe.WorkerProcess.__new__(pipe.WorkerProcess)
    worker.failure = pipe.WorkerFailed
    line = answer if isinstance(answer, bytes) else json.dumps(GOOD | answer).encode()
    said, tokens = "", [[]]
    try:
        tokens = worker._answer(line or b"\n", process.Decoded).tokens
    except (UserError, pipe.ImportFailed) as error:
        said = str(error)
    assert said.isprintable()
    assert all(type(token) is int for row in tokens for token in row)


def test_a_failed_conversion_is_a_line(peer, monkeypatch):
    folder = str(TINY / "target")
    for program, said in (
        ("import time; time.sleep(60)", "it took more than engine.time_limit_s=1 seconds"),
        (
            "import os; os.kill(os.getpid(), 9)",
            "killed by SIGKILL, perhaps because the system was out of memory",
        ),
        (r"import os; os.write(2, b'\xff\x1b[1m\n'); os._exit(3)", "\ufffd\\x1b[1m"),
    ):
        monkeypatch.setattr(VllmPeer, "conversion", lambda *_, program=program: ["-c", program])
        with refusal(f"engine.name=vllm: {folder} cannot be converted: {said}"):
            peer(time_limit_s=1).converted(folder, ".one")


def test_without_a_home_directory_a_conversion_asks_for_a_folder(peer, no_home):
    folder = str(TINY / "target")
    said = "there is no home directory to keep it in; name a folder with XDG_CACHE_HOME"
    with refusal(f"engine.name=vllm: {folder} cannot be converted: {said}"):
        peer().converted(folder, ".one")


def test_the_run_is_marked_as_failed(tmp_path, monkeypatch):
    """A run whose worker, our own program, crashes after its engine has written a lot."""
    worker = tmp_path / "crashing_worker.py"
    worker.write_text(
        "import os\ndef WORKER(**_):\n    os.write(2, b'a\\nno more\\n'); os._exit(7)"
    )
    monkeypatch.setattr(VllmPeer, "worker", str(worker))
    monkeypatch.setattr(VllmPeer, "modules", ("json",))
    keys = ["engine=vllm", f"engine.python={sys.executable}", f"runs_dir={tmp_path / 'runs'}"]
    with pytest.raises(UserError):
        run(compose([*SMALL, *keys]), Job())
    (path,) = tmp_path.glob("runs/*/result.json")
    result = json.loads(path.read_text())
    assert (result["status"], result["kind"]) == ("failed", "crashed")
    assert (
        result["reason"]
        == "engine.name=vllm: the worker ended (exit code 7); its last words: no more"
    )
    assert "a\nno more" in (path.parent / "log.txt").read_text()


def test_a_cache_that_cannot_be_written_is_a_line(peer, tmp_path, monkeypatch):
    (tmp_path / "caches").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    with refusal("engine.name=vllm: ", "caches/magicdec/converted cannot be written: Not a dir"):
        peer().converted(str(TINY / "target"), ".one")
