"""Plans for a GPU, made without one: what the configuration decides there."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch

from magicdec.config.load import compose
from magicdec.costmodel.memory_estimate import memory
from magicdec.errors import UserError
from magicdec.planning import fits
from magicdec.planning.resolve import resolve
from magicdec.planning.setup import held, setup_of
from magicdec.scenarios import _fitting
from tests.checkpoints import make_checkpoint

pytest.importorskip("triton")
LARGE = [
    "target=llama-3.1-8b",
    "target.weights=random",
    "data=random",
    "draft.synthetic_acceptance=0.8",
]
# Which are as wide as all 32, and planned in a moment.
LARGE += ["target.architecture.num_layers=2"]

ONE_ROW = ("batch.size=1", "scenario=serve")


@pytest.fixture
def plan(monkeypatch):
    """`resolve` of overrides, as on a machine with a GPU."""
    monkeypatch.setattr(
        "magicdec.planning.resolve._device", lambda config: (torch.device("cuda"), torch.bfloat16)
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 << 30, 80 << 30))
    monkeypatch.setitem(
        sys.modules, "flashinfer", SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=None)
    )

    def planned(*overrides):
        return resolve(compose([*LARGE, *overrides]))

    return planned


@pytest.fixture
def estimate(plan):
    """The memory of 32 rows of 16,384 tokens."""
    sizes = ("batch.size=32", "batch.context_len=16384")
    return lambda *overrides: fits.estimate(plan(*sizes, *overrides), 32, 16384)


def test_layers_are_compiled_on_a_gpu_unless_told_otherwise(plan):
    assert plan().config.hardware.compile is True
    assert plan("hardware.compile=false").config.hardware.compile is False


def test_what_no_graph_can_capture_is_refused(plan):
    with pytest.raises(
        UserError, match=r"hardware.cuda_graphs=true: attention=flashinfer .*cuda_graphs=false"
    ):
        plan("attention=flashinfer")
    assert (
        plan("attention=flashinfer", "hardware.cuda_graphs=false").config.attention == "flashinfer"
    )


def test_more_kv_heads_than_a_grid_has_programs_are_refused(plan):
    """8 of each row: 65,536 where 65,535 are possible."""
    sizes = ("attention=triton", "batch.context_len=64")
    assert plan(*sizes, "batch.size=8191").config.attention == "triton"
    assert plan("attention=sdpa", "batch.size=8192").config.attention == "sdpa"
    with pytest.raises(UserError, match=r"^batch.size=8192: .* choose batch.size=8191 or less"):
        plan(*sizes, "batch.size=8192")


def test_memory_is_foreseen_with_the_chosen_attention(estimate):
    """In a prefill of long chunks, the mask of sdpa alone is 32 rows x 4,096 tokens x 16,384
    slots.
    """
    choices = (
        ["attention=triton"],
        ["attention=sdpa"],
        ["attention=flashinfer", "hardware.cuda_graphs=false"],
    )
    triton, sdpa, flashinfer = (
        estimate("batch.prefill_chunk=4096", *keys).transient for keys in choices
    )
    assert sdpa - triton > 32 * 4096 * 16384
    assert flashinfer - triton == pytest.approx(128 << 20, rel=0.01), "its workspace"


def test_a_gpu_that_pytorch_cannot_use_is_told(monkeypatch, tmp_path):
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\n"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve(compose([])).warnings() == []
    monkeypatch.setattr("magicdec.measure.system.DRIVER", tmp_path / "version")
    (warning,) = resolve(compose([])).warnings()
    assert warning.startswith("hardware=auto: driver 550.54.15 is loaded, but PyTorch sees no GPU")
    assert "magicdec doctor" in warning
    assert resolve(compose(["hardware=cpu"])).warnings() == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve(compose(["hardware.device=cpu"])).warnings() == []


def test_few_rows_are_prefilled_in_longer_chunks(plan):
    of_own = ["scenario=serve", "batch.prefill_chunk=96"]
    chosen = ([], ["batch.size=1"], ["batch.size=8"], ["scenario=serve"], of_own)
    assert [plan(*keys).config.batch.prefill_chunk for keys in chosen] == [128, 2048, 256, 2048, 96]


@pytest.mark.parametrize(
    ("gib", "keys", "chunk"),
    [
        (80, ["batch.size=1"], 16384),
        (80, ["batch.size=8"], 2048),
        (80, ["batch.size=256"], 128),
        (80, ["batch.size=8", "batch.prefill_chunk=96"], 96),
        (80, ["batch.size=8", "scenario=serve"], 2048),
        (8, ["batch.size=1"], 8192),
        (4, ["batch.size=1"], 2048),
    ],
)
def test_a_gpu_with_room_prefills_in_long_passes(gib, keys, chunk, plan, monkeypatch):
    """By all memory: two layers of Llama-3.1-8B and its vocabulary take 2.8 GiB."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, gib << 30))
    asked = compose([*LARGE, *keys]).batch
    assert fits.fitting(plan(*keys), asked).config.batch.prefill_chunk == chunk


def test_a_run_with_a_batch_of_its_own_prefills_in_long_passes(plan):
    config = compose([*LARGE, "batch.size=8"])
    assert _fitting(plan("batch.size=8"), config).config.batch.prefill_chunk == 2048


def test_a_grid_stays_as_it_was_asked_for(plan, monkeypatch):
    """Though less than its largest batch fits: that is refused when it is checked."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 3 << 30))
    largest = {"size": 64, "context_len": 8000}
    planned = plan("scenario=profile", *(f"batch.{key}={value}" for key, value in largest.items()))
    batch = fits.fitting(planned, compose([*LARGE, "scenario=profile"]).batch).config.batch
    assert {key: getattr(batch, key) for key in largest} == largest


def test_memory_is_checked_at_the_largest_gamma_of_a_grid(plan):
    needed = [
        fits.estimate(plan("scenario=profile", f"scenario.gammas={gammas}"), 8, 4096).needed
        for gammas in ("[2]", "[1,16]")
    ]
    logits = 8 * 14 * 128_256 * 2  # of 14 more tokens in a verification
    assert needed[1] - needed[0] > logits


def test_our_server_prefills_as_it_does_under_load():
    keys = ["engine=magicdec", "hardware=cpu", "batch.size=8"]
    chunks = [
        resolve(compose([*keys, f"scenario={name}"])).config.batch.prefill_chunk
        for name in ("serve", "profile")
    ]
    assert chunks == [256, 256]


def test_one_row_is_prefilled_in_long_chunks_on_a_cpu_unless_others_wait():
    assert [resolve(compose([what])).config.batch.prefill_chunk for what in ONE_ROW] == [1024, 256]


def test_memory_is_foreseen_for_the_chunk_of_one_request(estimate):
    """Rounds of all slots, and a prefill of a single row."""
    batched, served = (
        estimate("batch.prefill_chunk=4096", *keys) for keys in ([], ["scenario=serve"])
    )
    assert served.target_kv == pytest.approx(batched.target_kv * 33 / 32)
    assert served.transient < batched.transient / 8


def test_what_graphs_keep_must_be_free_beside_the_rest(estimate):
    captured, plain = (estimate(f"hardware.cuda_graphs={graphs}") for graphs in ("true", "false"))
    # The first in a process also counts the rotary frequencies, which it keeps.
    assert captured.total == pytest.approx(plain.total, abs=1024)
    assert plain.total == plain.needed
    logits = 32 * 3 * 128_256 * 2  # of a verification
    assert logits < captured.captured < 4 * logits


SMALL_CONTEXT = [  # a draft that was trained for 2,048 tokens
    "target=llama-2-7b-32k",
    "target.weights=random",
    "draft.synthetic_acceptance=0.7",
    "batch.context_len=8192",
    "target@draft.model=tinyllama-1.1b",
    "draft.model.weights=random",
    "batch.size=1",
]


@pytest.mark.parametrize(
    ("draft", "cache", "too_large"),
    [("model", "cache", 2041), ("hierarchical", "draft.cache", 2032)],
)
def test_a_draft_stays_within_its_trained_context(draft, cache, too_large):
    def planned(*overrides):
        return resolve(compose([f"draft={draft}", *SMALL_CONTEXT, "draft.gamma=6", *overrides]))

    assert planned(f"{cache}.budget={too_large - 1}")
    with pytest.raises(
        UserError, match=rf"{cache}\.budget={too_large} and the .* tokens of a round"
    ) as refused:
        planned(f"{cache}.budget={too_large}")
    would = re.search(r"(\S+) would", str(refused.value))[1]
    assert planned(would)


@pytest.mark.parametrize("policy", ["verify_guided", "quantized"])
@pytest.mark.parametrize(("draft", "cache"), [("model", "cache"), ("hierarchical", "draft.cache")])
def test_a_model_of_its_own_cannot_draft_over_a_cache_that_needs_the_targets(draft, cache, policy):
    group = "cache" if cache == "cache" else "cache@draft.cache"
    with pytest.raises(
        UserError,
        match=rf"^{cache}\.policy={policy} reads .*{cache}\.policy=streaming, or draft=self",
    ):
        resolve(compose([f"draft={draft}", f"{group}={policy}"]))


def test_a_draft_is_not_shown_distances_that_it_was_not_trained_for():
    with pytest.raises(
        UserError, match=r"cache\.policy=snapkv shows the draft .* use cache\.policy=streaming"
    ):
        resolve(compose(["draft=model", *SMALL_CONTEXT, "cache=snapkv"]))


def test_an_automatic_batch_of_a_run_fits_into_the_machine(monkeypatch):
    """It goes by all memory, not by what is free now: a run's id must not depend on that."""
    keys = ["draft=self", "cache.budget=64", "batch.context_len=1024"]

    def planned(*more):
        config = compose([*keys, *more])
        return fits.fitting(resolve(config), config.batch)

    most = planned()
    assert most.config.batch.size == 24
    monkeypatch.setattr(
        "magicdec.measure.memory_use.total_bytes", lambda _: held(most, 10, 1024).total / 0.9
    )
    found = planned()
    assert found.config.batch.size == 10
    assert found.config.batch.prefill_chunk == 128
    assert planned("batch.size=24").config.batch.size == 24  # which building it refuses


def test_a_prediction_holds_latents_as_engines_do(tmp_path):
    """An automatic batch is chosen by the memory that the prediction then states."""
    keys = ["scenario=predict", "hardware=h100", "batch.size=3", "batch.context_len=100"]
    path = make_checkpoint(tmp_path, "deepseek-v3")
    plan = resolve(compose([*keys, f"target.path={path}"]))
    stated = memory(setup_of(plan), max(plan.config.gammas), plan.config.batch.generate_len)
    assert held(plan, 3, 100) == stated


def test_predictions_keep_the_windows_of_sliding_layers_and_our_runs_every_token():
    """Mistral-7B-v0.1: a key and a value of 8 heads of 128 in each of 32 layers, a window of 4096;
    a round of gamma 4 has 5 tokens beyond those of the text.
    """
    keys = ["target=mistral-7b-v0.1", "target.weights=random", "data=random", "batch.size=2"]
    keys += ["draft=self", "draft.synthetic_acceptance=0.5", "draft.gamma=4", "cache.budget=64"]
    keys += ["batch.context_len=32000", "batch.generate_len=64"]
    of_token = 2 * 8 * 128 * 32 * 2
    served = resolve(compose([*keys, "scenario=predict", "hardware=h100"]))
    assert held(served, 1, 32_000).target_kv == 4096 * of_token
    assert memory(setup_of(served), 4, 64).target_kv == 2 * 4096 * of_token
    ours = resolve(compose([*keys, "hardware.dtype=bfloat16", "hardware.device=cpu"]))
    assert held(ours, 1, 32_000).target_kv == (32_000 + 64 + 5) * of_token
    assert memory(setup_of(ours, 100.0, 1.0), 4, 64).target_kv == 2 * (32_000 + 64 + 5) * of_token


def test_a_predicted_draft_keeps_latents_as_its_target_does(tmp_path):
    """A draft of DeepSeek's kind over every entry: latents of 16 and 8 features in each layer."""
    path = make_checkpoint(tmp_path, "deepseek-v3")
    keys = ["scenario=predict", "hardware=h100", "batch.size=3", "batch.context_len=100"]
    keys += ["draft=model", f"draft.model.path={path}", "draft.model.name=latents", "cache=full"]
    plan = resolve(compose([*keys, f"target.path={path}", "draft.gamma=4"]))
    config = plan.target.config
    slots = 100 + plan.config.batch.generate_len + 4 + 1
    kept = held(plan, 3, 100).draft_kv
    assert kept == 3 * slots * config.num_layers * (16 + 8) * plan.dtype.itemsize
