"""llama.cpp and OpenVINO GenAI as engines: what their workers are asked for, and the real ones where there are any.

MAGICDEC_LLAMACPP_PYTHON and MAGICDEC_OPENVINO_PYTHON name the Pythons of their environments. The protocol is the one
that test_vllm.py tests.
"""

import os
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch

from magicdec.config.load import compose
from magicdec.drafts.model import IndependentModel
from magicdec.drafts.ngram import PromptLookup
from magicdec.errors import UserError
from magicdec.measure.metrics import RowTimes
from magicdec.models import checkpoint
from magicdec.peers import process
from magicdec.peers.base import Counts, PeerSpec
from magicdec.peers.llamacpp import LlamacppEngine, LlamacppPeer
from magicdec.peers.openvino import OpenvinoEngine, OpenvinoPeer
from magicdec.planning.resolve import resolve
from magicdec.scenarios import Job, run
from magicdec.verification.sampling import Sampling
from tests.small import machine
from tests.test_run import SMALL, TINY

PEERS = {"llamacpp": (LlamacppPeer, LlamacppEngine), "openvino": (OpenvinoPeer, OpenvinoEngine)}
CONVERTED = {"llamacpp": "float32.gguf", "openvino": "float32-ir"}
# Answers as llama.cpp's worker does, and says what it was asked on stderr.
WORKER = """
import json, sys
print(json.dumps({"version": input()}), flush=True)
for line in sys.stdin:
    answer = {"tokens": [[1, 2, 3]], "first": [0.5], "decode": [2.0], "rounds": 3, "proposed": 6, "accepted": []}
    print(json.dumps(answer | {"unplaced": 2, "peak_bytes": 7}), flush=True)
"""


@pytest.fixture
def peer(tmp_path, monkeypatch):
    """A peer that converts by writing down its arguments, in a cache of the test's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def new(name: str, **changes):
        kind, engine = PEERS[name]
        copy = "import sys; open(sys.argv[2], 'w').write(sys.argv[1])"
        monkeypatch.setattr(kind, "conversion", lambda self, folder, made: ["-c", copy, folder, str(made)])
        engine = engine(python=sys.executable, time_limit_s=30, **changes.pop("engine", {}))
        settings = {"num_rows": 2, "max_len": 100, "sampling": Sampling(), "gamma": 3, "engine": engine}
        return kind(PeerSpec(str(TINY / "target"), machine(), **settings | changes))

    return new


@pytest.mark.parametrize("name", PEERS)
def test_the_models_of_each_way(peer, name):
    draft = str(TINY / "draft")
    one = peer(name, draft=IndependentModel(), draft_folder=draft)
    plain, fast = one.options(False), one.options(True)
    assert Path(plain["target"]).read_text() == str(TINY / "target")
    assert plain["target"].endswith(CONVERTED[name])
    assert (plain["rows"], plain["max_len"], plain["threads"]) == (2, 100, torch.get_num_threads())
    assert Path(fast["draft"]).read_text() == draft
    assert fast == plain | {"gamma": 3, "draft": fast["draft"]}
    assert peer(name, draft=PromptLookup(max_ngram=4)).options(True) == plain | {"gamma": 3, "ngram": 4}


def test_another_version_of_an_engine_is_another_run(monkeypatch):
    """Whether it runs in this process or in an environment of its own."""
    monkeypatch.setattr(OpenvinoPeer, "modules", ("yaml", "torch"))
    packages = [f"PyYAML {metadata.version('PyYAML')}", f"torch {metadata.version('torch')}"]
    assert OpenvinoPeer.installed(OpenvinoEngine(python=sys.executable)) == ", ".join(packages)
    plan = resolve(compose([*SMALL, "engine=transformers", "draft=none"]))
    before = plan.fingerprints
    monkeypatch.setattr("transformers.__version__", "4.0.0")
    assert plan.fingerprints == before | {"engine": "transformers 4.0.0"} != before


def test_the_type_of_openvinos_cache(peer):
    assert [peer("openvino", engine={"kv_type": kind}).options(False)["kv_type"] for kind in ("f32", "u8")] == [
        "f32",
        "u8",
    ]


def test_a_conversion_is_kept_and_a_failed_one_is_not(peer, monkeypatch, capsys):
    one = peer("llamacpp")
    kept = one.converted(one.spec.target, ".gguf")
    assert kept.name.startswith(checkpoint.fingerprint(TINY / "target"))
    assert capsys.readouterr().err.startswith(f"converting {one.spec.target} for llama.cpp (float32), once, into ")
    monkeypatch.setattr(LlamacppPeer, "conversion", lambda *_: ["-c", "raise SystemExit('no room')"])
    assert one.converted(one.spec.target, ".gguf") == kept
    half = replace(one.spec, hardware=machine(dtype="float16"))
    with pytest.raises(UserError, match=r"^engine.name=llamacpp: .*target cannot be converted: no room$"):
        LlamacppPeer(half).converted(half.target, ".gguf")
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]


@pytest.mark.parametrize(
    ("sampling", "llamacpp", "openvino"),
    [
        (Sampling(), {"samplers": ["top_k"], "top_k": 1}, {"do_sample": False}),
        (
            Sampling(temperature=0.7, top_p=0.9),
            {"samplers": ["temperature", "top_k", "top_p"], "temperature": 0.7, "top_k": 0, "top_p": 0.9},
            {"do_sample": True, "temperature": 0.7, "top_p": 0.9},
        ),
    ],
)
def test_sampling_and_ends(peer, sampling, llamacpp, openvino):
    options = {"sampling": sampling, "eos_token_ids": (2, 7)}
    assert peer("llamacpp", **options).sampling() == llamacpp | {"stop": ["[2]", "[7]"]}
    assert peer("openvino", **options).sampling() == openvino | {"ignore_eos": False, "stop_token_ids": (2, 7)}
    assert peer("openvino").sampling()["ignore_eos"] is True


def test_counts_without_positions(peer, monkeypatch, tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setattr(process, "MAIN", tmp_path / "worker.py")
    with peer("llamacpp", draft=PromptLookup()) as one:
        got = one.generate([[1, 2]], 3, speculative=True)
        assert (got.times, got.counts) == ([RowTimes(0.5, 2.0, 2)], Counts(3, 6, unplaced=2))
        assert '"ngram": 8' in one.version
    found = (got.counts + got.counts).metrics(3)
    assert found == {"acceptance_rounds": 6, "acceptance_length": 4 / 6 + 1, "acceptance_rate": 4 / 12}
    assert "acceptance_rate" not in Counts(3, 0, (2, 1)).metrics(2)  # an engine that counts no proposals


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["engine=llamacpp"], "engine.python=null: engine=llamacpp needs an environment of its own; make one with"),
        (["engine=openvino", f"engine.python={sys.executable}"], "OpenVINO GenAI or optimum is not installed there"),
        (["engine=llamacpp", f"engine.python={sys.executable}"], "llama.cpp or gguf is not installed there"),
        (["engine=openvino", "hardware.dtype=bfloat16"], "hardware.dtype=bfloat16: engine=openvino takes float32 here"),
    ],
)
def test_refusals(monkeypatch, overrides, said):
    for kind, _ in PEERS.values():
        monkeypatch.delenv(kind.variable(), raising=False)
    with pytest.raises(UserError) as raised:
        resolve(compose([*overrides, "hardware=cpu"]))
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_llamacpp_refuses_what_its_file_does_not_hold():
    config = resolve(compose(["draft=none", "hardware=cpu"])).config
    biased = replace(config.target, architecture=replace(config.target.architecture, qkv_bias=True))
    with pytest.raises(UserError, match=r"target.name=tiny: engine=llamacpp takes plain Llama, not qkv_bias"):
        LlamacppPeer.check(replace(config, target=biased))


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
        torch.testing.assert_close(found[theirs], weights[ours].float(), rtol=tolerance, atol=tolerance)
    # Rotary pairs are neighbours: the second row of head 1 is what was the first row of its second half.
    query = weights["model.layers.5.self_attn.q_proj.weight"].float()
    torch.testing.assert_close(found["blk.5.attn_q.weight"][65], query[64 + 32], rtol=tolerance, atol=tolerance)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["llama.attention.head_count_kv"] == 2
    assert fields["llama.rope.freq_base"] == 100000.0
    assert (len(fields["tokenizer.ggml.tokens"]), fields["tokenizer.ggml.tokens"][17]) == (1024, "[17]")


def real(name: str) -> None:
    """Skip the test where there is no environment with this engine."""
    variable = PEERS[name][0].variable()
    if not os.environ.get(variable):
        pytest.skip(f"{variable} names no Python of an environment with {name}")


@pytest.mark.parametrize("draft", ["none", "model", "ngram"])
@pytest.mark.parametrize("name", PEERS)
def test_the_real_one_writes_what_ours_writes(tmp_path, name, draft):
    real(name)
    drafts = [] if draft == "none" else ["draft.gamma=3"]
    small = [*SMALL, f"draft={draft}", "cache=full", *drafts, f"runs_dir={tmp_path}"]
    native, other = (run(compose([f"engine={engine}", *small]), Job()) for engine in ("native", name))
    assert other["output/fingerprint"] == native["output/fingerprint"]
    assert other["autoregressive/wall_s"] > 0 < other["memory/peak_gib"]
    if draft != "none":
        assert other["lossless/identical"] is True
        assert 1 <= other.get("acceptance_length", 1) <= 4


def test_attention_in_fp32_over_long_prompts(tmp_path):
    """llama.cpp's flash attention, which is in float16 in part, changes a token of these rows."""
    real("llamacpp")
    long = [*SMALL, "draft=none", "cache=full", "batch.size=8", "batch.context_len=1024", f"runs_dir={tmp_path}"]
    native, other = (run(compose([f"engine={engine}", *long]), Job()) for engine in ("native", "llamacpp"))
    assert other["output/fingerprint"] == native["output/fingerprint"]
