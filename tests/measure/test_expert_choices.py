"""What a run records of the experts that its tokens choose, and predictions that take it."""

import json
import math

import pytest
import torch

from magicdec.attention.cpp import CppAttention
from magicdec.config.load import compose
from magicdec.costmodel.growth import experts_touched
from magicdec.errors import UserError
from magicdec.kernels.library import compiler
from magicdec.measure.expert_choices import distinct_of, layer_lines, line_of, metrics_of
from magicdec.planning.resolve import resolve
from magicdec.planning.setup import setup_of
from tests.checkpoints import load_modules, load_reference, make_checkpoint
from tests.small import open_batch, random_prompts, small_model
from tests.tracking.stores import write_run

TOKENS, ROWS = 20, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("moe"), "qwen3-moe", eos_token_id=None)


def chosen_by_transformers(folder, rows: list[list[int]], num_new: int) -> list[torch.Tensor]:
    """Return the experts of each layer that the last `num_new` tokens of each row choose."""
    reference, chosen = load_reference(folder), []
    for row in rows:
        with torch.no_grad():
            logits = reference(torch.tensor([row]), output_router_logits=True).router_logits
        per_token = reference.config.num_experts_per_tok
        chosen.append([layer[-num_new:].topk(per_token).indices for layer in logits])
    return [torch.stack(layer) for layer in zip(*chosen, strict=True)]


@pytest.mark.parametrize(
    "attention",
    [
        None,
        pytest.param(
            CppAttention,
            marks=pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler"),
        ),
    ],
)
def test_choices_are_those_of_transformers(folder, attention):
    target = load_modules(folder, attention=attention() if attention else None)
    prompts = random_prompts([17, 30, 9], vocab=96)
    batch = open_batch(target, prompts, generate_len=TOKENS)
    written = batch.decoder.generate().tokens
    lines = layer_lines(batch.decoder, written, 4)
    rows = [prompt + new for prompt, new in zip(prompts, written, strict=True)]
    expected = chosen_by_transformers(folder, rows, TOKENS)
    assert [line["layer"] for line in lines] == [0, 1, 2]
    for line, chosen_BTK in zip(lines, expected, strict=True):
        assert line == {"layer": line["layer"]} | line_of(chosen_BTK, 8, 4)
    assert batch.decoder.generate().tokens == written, "the recording leaves a trace"


def test_a_dense_target_records_nothing():
    batch = open_batch(small_model(), random_prompts([9, 12]), generate_len=8)
    assert layer_lines(batch.decoder, batch.decoder.generate().tokens, 4) == []
    assert metrics_of([]) == {}


def test_a_line_by_hand():
    chosen_BTK = torch.tensor([[[0, 1], [0, 1], [2, 3]], [[1, 0], [1, 2], [0, 1]]])
    line = line_of(chosen_BTK, 4, 8)
    assert line["popularity"] == pytest.approx([5 / 12, 4 / 12, 2 / 12, 1 / 12])
    entropy = -sum(share * math.log(share, 4) for share in line["popularity"])
    assert line["entropy"] == pytest.approx(entropy)
    assert line["distinct"] == [2.0, (2 + 4 + 3 + 3) / 4, (4 + 3) / 2]
    assert distinct_of(chosen_BTK, 1) == 2.0
    figures = metrics_of([line, line])
    assert figures["routing/experts_of_2"] == 3.0 / 4


def test_a_prediction_takes_the_choices_of_a_run(tmp_path):
    """Of a run whose consecutive tokens agree and whose experts differ in popularity."""
    run = tmp_path / "runs" / "abc"
    write_run(run.parent, run.name)
    alike = torch.tensor([[[0, 1]] * 9, [[0, 2]] * 9])
    (run / "routing.jsonl").write_text(json.dumps({"layer": 0} | line_of(alike, 8, 4)) + "\n")
    sizes = ["batch.size=8", "batch.context_len=4096", "scenario.alpha=0.8", "hardware=h100"]
    keys = ["scenario=predict", *sizes, f"runs_dir={run.parent}"]

    def setup(*more):
        return setup_of(resolve(compose([*keys, *more])))

    target = "target=qwen3-30b-a3b"
    uniform, recorded = setup(target), setup(target, "scenario.routing=ab")
    assert recorded.routing.novelty == pytest.approx(0, abs=1e-6)
    assert experts_touched(recorded, 4) == pytest.approx(experts_touched(recorded, 1))
    assert experts_touched(recorded, 4) < experts_touched(uniform, 1)
    with pytest.raises(UserError, match="the target has no experts"):
        setup("target=llama-3.1-8b", "scenario.routing=abc")
    (run / "routing.jsonl").unlink()
    with pytest.raises(UserError, match="this run has recorded none"):
        setup(target, "scenario.routing=abc")
