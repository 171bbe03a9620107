"""llama.cpp and OpenVINO GenAI as engines: what their workers are asked for, and the real ones
where there are any.

MAGICDEC_LLAMACPP_PYTHON, MAGICDEC_OPENVINO_PYTHON and MAGICDEC_VLLM_PYTHON name the Pythons of
their environments. The protocol is the one that test_vllm.py tests.
"""

import json
import runpy
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from magicdec.architectures.hugging_face import from_hugging_face
from magicdec.config.load import compose
from magicdec.drafts.model import IndependentModel
from magicdec.drafts.ngram import PromptLookup
from magicdec.measure.metrics import RowTimes
from magicdec.models import checkpoint
from magicdec.peers import process
from magicdec.peers.base import AcceptanceCounts
from magicdec.peers.llamacpp import LlamacppPeer
from magicdec.peers.openvino import OpenvinoEngine, OpenvinoPeer
from magicdec.peers.vllm import VllmPeer
from magicdec.planning.resolve import resolve
from magicdec.scenarios import Job, run
from magicdec.verification.sampling import Sampling
from tests.checkpoints import make_checkpoint
from tests.peers.conftest import needs
from tests.refusals import refusal
from tests.scenarios.test_run import SMALL, TINY
from tests.small import machine

KINDS = (LlamacppPeer, OpenvinoPeer)
# Answers as llama.cpp's worker does, and says what it was asked on stderr.
WORKER = """
import json, sys
print(json.dumps({"version": input()}), flush=True)
for line in sys.stdin:
    answer = {"tokens": [[1, 2, 3]], "first": [0.5], "decode": [2.0], "rounds": 3, "proposed": 6, "accepted": []}
    print(json.dumps(answer | {"unplaced": 2, "peak_bytes": 7}), flush=True)
"""  # noqa: E501


@pytest.fixture
def peer(peer, monkeypatch):
    """Peers that convert a checkpoint by writing down its folder."""
    copy = "import sys; open(sys.argv[2], 'w').write(sys.argv[1])"
    for kind in KINDS:
        monkeypatch.setattr(
            kind, "conversion", lambda self, folder, made: ["-c", copy, folder, str(made)]
        )
    return peer


@pytest.mark.parametrize(
    ("name", "converted"), [("llamacpp", "float32.gguf"), ("openvino", "float32-ir")]
)
def test_the_models_of_each_way(peer, name, converted):
    draft = str(TINY / "draft")
    one = peer(name=name, draft=IndependentModel(), draft_folder=draft)
    plain, fast = one.options(False), one.options(True)
    assert Path(plain["target"]).read_text() == str(TINY / "target")
    assert plain["target"].endswith(converted)
    assert (plain["rows"], plain["max_len"], plain["threads"]) == (2, 200, torch.get_num_threads())
    assert Path(fast["draft"]).read_text() == draft
    assert fast == plain | {"gamma": 3, "draft": fast["draft"]}
    assert peer(name=name, draft=PromptLookup(max_ngram=4)).options(True) == plain | {
        "gamma": 3,
        "ngram": 4,
    }


def test_another_version_of_an_engine_is_another_run(monkeypatch):
    """The engine may run in this process or in an environment of its own."""
    monkeypatch.setattr(OpenvinoPeer, "modules", ("yaml", "torch"))
    packages = [f"PyYAML {metadata.version('PyYAML')}", f"torch {metadata.version('torch')}"]
    assert OpenvinoPeer.installed(OpenvinoEngine(python=sys.executable)) == ", ".join(packages)
    config = compose([*SMALL, "engine=transformers", "draft=none"])
    before = resolve(config).fingerprints
    # As the engine sees it.
    monkeypatch.setattr("magicdec.peers.transformers.transformers.__version__", "4.0.0")
    assert resolve(config).fingerprints == before | {"engine": "transformers 4.0.0"} != before


def test_the_type_of_openvinos_cache(peer):
    for kind in ("f32", "u8"):
        assert peer(name="openvino", keys={"kv_type": kind}).options(False)["kv_type"] == kind


def test_a_conversion_is_kept_and_a_failed_one_is_not(peer, monkeypatch, capsys):
    one = peer(name="llamacpp")
    kept = one.converted(one.spec.target, ".gguf")
    assert kept.name.startswith(checkpoint.fingerprint(TINY / "target"))
    assert capsys.readouterr().err.startswith(
        f"converting {one.spec.target} for llama.cpp (float32), once, into "
    )
    monkeypatch.setattr(
        LlamacppPeer, "conversion", lambda *_: ["-c", "raise SystemExit('no room')"]
    )
    assert one.converted(one.spec.target, ".gguf") == kept
    half = replace(one.spec, hardware=machine(dtype="float16"))
    with refusal(f"engine.name=llamacpp: {half.target} cannot be converted: no room"):
        LlamacppPeer(half).converted(half.target, ".gguf")
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]


BOTH = """
import sys
from pathlib import Path
made = Path(sys.argv[2])
for folder in (made, made.parents[1] / made.name):
    folder.mkdir()
    (folder / "model").write_text(sys.argv[1])
"""


def test_two_runs_may_convert_a_checkpoint_at_once(peer, monkeypatch):
    """The other one is done first. An IR is a folder, and replaces none that holds files."""
    monkeypatch.setattr(
        OpenvinoPeer, "conversion", lambda self, folder, made: ["-c", BOTH, folder, str(made)]
    )
    one = peer(name="openvino")
    kept = one.converted(one.spec.target, "-ir")
    assert (kept / "model").read_text() == one.spec.target
    assert list(kept.parent.iterdir()) == [kept]


def test_another_converter_converts_again(peer, monkeypatch, tmp_path):
    one = peer(name="llamacpp")
    kept = [one.converted(one.spec.target, ".gguf")]
    newer = classmethod(lambda cls, engine: "an engine 2")
    monkeypatch.setattr(LlamacppPeer, "installed", newer)
    kept.append(one.converted(one.spec.target, ".gguf"))
    assert kept[0] != kept[1]
    edited = tmp_path / "gguf_file.py"
    edited.write_text("the same, without a mistake")
    monkeypatch.setattr(LlamacppPeer, "converters", (edited,))
    kept.append(one.converted(one.spec.target, ".gguf"))
    assert len(set(kept)) == 3


SAMPLED = {"temperature": 0.7, "top_p": 0.9}


@pytest.mark.parametrize(
    ("sampling", "llamacpp", "openvino"),
    [
        ({}, {"samplers": ["top_k"], "top_k": 1}, {"do_sample": False}),
        (
            SAMPLED,
            {"samplers": ["temperature", "top_k", "top_p"], "top_k": 0} | SAMPLED,
            {"do_sample": True} | SAMPLED,
        ),
    ],
)
def test_sampling_and_ends(peer, sampling, llamacpp, openvino):
    options = {"sampling": Sampling(**sampling), "eos_token_ids": (2, 7)}
    ends = {"ignore_eos": False, "stop_token_ids": (2, 7)}
    assert peer(name="llamacpp", **options).sampling() == llamacpp | {"stop": ["[2]", "[7]"]}
    assert peer(name="openvino", **options).sampling() == openvino | ends
    assert peer(name="openvino").sampling()["ignore_eos"] is True


@contextmanager
def llamacpp_worker(monkeypatch, rows: int):
    """llama.cpp's worker, whose server writes the seed of a request and the number of its row; and
    the requests that the server has seen.
    """
    requests = []

    class Completions(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            requests.append(asked)
            timings = {"predicted_ms": 2.0}
            answers = [
                {"index": row, "tokens": [asked["seed"], row], "timings": timings}
                for row in range(len(asked["prompt"]))
            ]
            self.send_response(200)
            self.end_headers()
            if asked.get("stream"):
                body = "".join(f"data: {json.dumps(answer)}\n\n" for answer in answers)
            else:
                body = json.dumps(answers)
            self.wfile.write(body.encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Completions)
    threading.Thread(target=server.serve_forever).start()
    library = Mock(__version__="1", get_system_info=lambda: "AVX2 = 1")
    library.Server.return_value.listening_address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setitem(sys.modules, "xllamacpp", library)
    made = runpy.run_path(str(process.HERE / LlamacppPeer.worker))["WORKER"]
    try:
        yield made("a.gguf", "float32", rows=rows, max_len=64, threads=1), requests
    finally:
        server.shutdown()
        server.server_close()


def test_llamacpp_draws_other_numbers_for_each_sampled_row(monkeypatch):
    """Greedy rows share a request."""
    with llamacpp_worker(monkeypatch, rows=2) as (worker, requests):
        sampled = worker.generate([[5], [5]], 2, seed=7, sampling={"temperature": 0.8})
        assert (sampled["tokens"], sampled["decode"]) == ([[7, 0], [8, 0]], [0.002, 0.002])
        assert len(sampled["first"]) == 2
        assert len(requests) == 4
        greedy = worker.generate([[5], [5]], 2, seed=7, sampling={"top_k": 1})
        assert greedy["tokens"] == [[7, 0], [7, 1]]
        assert len(requests) == 4 + 2


def test_counts_without_positions(peer):
    with peer(WORKER, "llamacpp", draft=PromptLookup()) as one:
        got = one.generate([[1, 2]], 3, speculative=True)
        assert (got.times, got.counts) == (
            [RowTimes(0.5, 2.0, 2)],
            AcceptanceCounts(3, 6, unplaced=2),
        )
        assert '"ngram": 8' in one.version
    found = (got.counts + got.counts).metrics(3)
    assert found == {
        "acceptance_rounds": 6,
        "acceptance_length": 4 / 6 + 1,
        "acceptance_rate": 4 / 12,
    }
    # An engine that counts no proposals.
    assert "acceptance_rate" not in AcceptanceCounts(3, 0, (2, 1)).metrics(2)


HERE = f"engine.python={sys.executable}"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["engine=vllm"],
            "engine.python=null: engine=vllm needs an environment of its own; make one with",
        ),
        (
            ["engine=vllm", "scenario=serve"],
            "engine=vllm needs an environment of its own; make one with",
        ),
        (
            ["engine=vllm", "engine.python=/nowhere/bin/python"],
            "engine.python=/nowhere/bin/python: no such program",
        ),
        (["engine=vllm", HERE], "vLLM is not installed there"),
        (
            ["engine=llamacpp"],
            "engine.python=null: engine=llamacpp needs an environment of its own; make one with",
        ),
        (["engine=openvino", HERE], "OpenVINO GenAI or optimum is not installed there"),
        (["engine=llamacpp", HERE], "llama.cpp or gguf is not installed there"),
        (
            ["engine=openvino", "hardware.dtype=bfloat16"],
            "hardware.dtype=bfloat16: engine=openvino takes float32 here",
        ),
    ],
)
def test_refusals(monkeypatch, overrides, said):
    for kind in (VllmPeer, *KINDS):
        monkeypatch.delenv(kind.variable(), raising=False)
    with refusal(said, "pip install vllm" if "vllm" in overrides[0] else ""):
        resolve(compose([*overrides, "hardware=cpu"]))


def test_refusals_name_the_variable_where_that_chose_the_python(monkeypatch):
    monkeypatch.setenv(VllmPeer.variable(), sys.executable)
    with refusal(f"MAGICDEC_VLLM_PYTHON={sys.executable}: vLLM is not installed there"):
        resolve(compose(["engine=vllm", "hardware=cpu"]))


def test_llamacpp_refuses_what_its_file_does_not_hold():
    config = resolve(compose(["draft=none", "hardware=cpu"])).config
    biased = replace(config.target, architecture=replace(config.target.architecture, qkv_bias=True))
    with refusal("target.name=tiny: engine=llamacpp takes plain Llama, not qkv_bias"):
        LlamacppPeer.check(replace(config, target=biased))


def test_llamacpp_refuses_models_that_are_not_llama(tmp_path):
    gemma = make_checkpoint(tmp_path / "gemma", "gemma2")
    keys = ["engine=llamacpp", HERE, "hardware=cpu", "draft=none", "batch.context_len=64"]
    with refusal("target.name=gemma: engine=llamacpp takes plain Llama, and this model runs as"):
        resolve(compose([*keys, "target=custom", f"target.path={gemma}"]))


@pytest.mark.extra
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 0.0), ("float16", 1e-3)])
def test_a_gguf_file_holds_the_checkpoint(tmp_path, dtype, tolerance):
    gguf = pytest.importorskip("gguf")
    from safetensors.torch import load_file

    from magicdec.peers import gguf_file

    gguf_file.write(TINY / "target", tmp_path / "one.gguf", dtype)
    reader = gguf.GGUFReader(tmp_path / "one.gguf")
    found = {tensor.name: torch.from_numpy(tensor.data.copy()).float() for tensor in reader.tensors}
    weights = load_file(TINY / "target/model.safetensors")
    assert len(found) == len(weights)
    for theirs, ours in (
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.3.ffn_down.weight", "model.layers.3.mlp.down_proj.weight"),
        ("output_norm.weight", "model.norm.weight"),
    ):
        torch.testing.assert_close(
            found[theirs], weights[ours].float(), rtol=tolerance, atol=tolerance
        )
    # Rotary pairs are neighbours: the second row of head 1 is what was the first row of its second
    # half.
    query = weights["model.layers.5.self_attn.q_proj.weight"].float()
    torch.testing.assert_close(
        found["blk.5.attn_q.weight"][65], query[64 + 32], rtol=tolerance, atol=tolerance
    )
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["llama.attention.head_count_kv"] == 2
    assert fields["llama.rope.freq_base"] == 100000.0
    assert (len(fields["tokenizer.ggml.tokens"]), fields["tokenizer.ggml.tokens"][17]) == (
        1024,
        "[17]",
    )


@pytest.mark.parametrize(
    ("changes", "theta"),
    [
        ({"rope_theta": 5e5}, 100000.0),
        ({"rope_parameters": {}, "rope_theta": 5e5}, 500000.0),
        ({"rope_scaling": {"rope_type": "default"}, "rope_theta": None}, 10000.0),
    ],
)
def test_a_gguf_file_has_the_rotary_base_of_the_checkpoint(tmp_path, changes, theta):
    gguf = pytest.importorskip("gguf")
    from magicdec.peers import gguf_file

    plain = json.loads((TINY / "target/config.json").read_text()) | changes
    assert from_hugging_face(plain).rope_theta == theta
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    gguf_file.add_architecture(writer, plain)
    assert writer.kv_data[0]["llama.rope.freq_base"].value == theta


@pytest.mark.parametrize("draft", ["none", "model", "ngram"])
@pytest.mark.parametrize("kind", [VllmPeer, *KINDS], ids=lambda kind: kind.name)
def test_the_real_one_writes_what_ours_writes(tmp_path, kind, draft):
    needs(kind)
    drafts = [] if draft == "none" else ["draft.gamma=3"]
    small = [*SMALL, f"draft={draft}", "cache=full", *drafts, f"runs_dir={tmp_path}"]
    native, other = (
        run(compose([f"engine={engine}", *small]), Job()) for engine in ("native", kind.name)
    )
    assert other["output/fingerprint"] == native["output/fingerprint"]
    assert other["engine/version"].startswith(f"{kind.modules[0]} ")
    assert other["autoregressive/wall_s"] > 0 < other["memory/peak_gib"]
    if draft != "none":
        assert other["lossless/identical"] is True
        assert other["speculative/wall_s"] > 0
        assert 1 <= other.get("acceptance_length", 1) <= 4


def test_attention_in_fp32_over_long_prompts(tmp_path):
    """llama.cpp's flash attention, which is in float16 in part, changes a token of these rows."""
    needs(LlamacppPeer)
    long = [
        *SMALL,
        "draft=none",
        "cache=full",
        "batch.size=8",
        "batch.context_len=1024",
        f"runs_dir={tmp_path}",
    ]
    native, other = (
        run(compose([f"engine={engine}", *long]), Job()) for engine in ("native", "llamacpp")
    )
    assert other["output/fingerprint"] == native["output/fingerprint"]
