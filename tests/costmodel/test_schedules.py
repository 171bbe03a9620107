"""Schedules of gamma by batch and context, and the forms in which engines take them."""

import json
import os
import subprocess
import sys
from bisect import bisect_left, bisect_right
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import magicdec
from magicdec.config.choices import ModelChoice
from magicdec.config.load import compose
from magicdec.config.registry import DRAFTS
from magicdec.costmodel.acceptance import Curves
from magicdec.costmodel.engine_settings import FORMS, read_vllm
from magicdec.costmodel.hardware import hardware_named
from magicdec.costmodel.prediction import predict
from magicdec.costmodel.round import Setup
from magicdec.costmodel.schedules import (
    Cell,
    Entry,
    Schedule,
    batches_up_to,
    predicted_cells,
    schedule,
)
from magicdec.errors import UserError
from magicdec.planning.acceptances import draft_named

TINY = Path(magicdec.__file__).parent / "models" / "tiny"
GAMMAS = (0, 1, 2, 3)
SPEEDS = st.lists(st.floats(0.5, 2.0), min_size=len(GAMMAS), max_size=len(GAMMAS))


@pytest.fixture
def setup(model):
    draft = draft_named(compose([]), "llama-3.2-1b")
    draft = replace(draft, model=replace(draft.model, path="meta-llama/Llama-3.2-1B"))
    return Setup(
        model("llama-3.1-8b"), hardware_named("h100"), 8, 8000, draft, target_name="llama-3.1-8b"
    )


def fewest(rows, tolerance):
    """The fewest ranges by trying every split: the slow twin."""
    best = [0] + [len(rows)] * len(rows)
    for end in range(1, len(rows) + 1):
        for start in range(end):
            some = rows[start:end]
            if any(all(cell.share(gamma) >= 1 - tolerance for cell in some) for gamma in GAMMAS):
                best[end] = min(best[end], best[start] + 1)
    return best[-1]


@given(st.lists(SPEEDS, min_size=1, max_size=9), st.floats(0, 0.5))
def test_few_ranges_within_the_tolerance(speeds, tolerance):
    rows = [
        Cell(batch, 1000, dict(zip(GAMMAS, row, strict=True)))
        for batch, row in enumerate(speeds, start=1)
    ]
    found = schedule(rows, tolerance)
    assert all(found.share(cell) >= 1 - tolerance - 1e-12 for cell in rows)
    assert len(found.entries) <= fewest(rows, tolerance)
    assert found.entries[0].batch[0] == 1
    assert found.entries[-1].batch[1] == len(rows)
    assert all(before.batch[1] + 1 == after.batch[0] for before, after in pairwise(found.entries))


@given(
    st.lists(st.lists(SPEEDS, min_size=2, max_size=4), min_size=1, max_size=3), st.floats(0, 0.5)
)
def test_contexts_share_the_ranges_of_batches(speeds, tolerance):
    contexts = (1000, 4000, 9000)
    rows = [
        Cell(batch, context, dict(zip(GAMMAS, row, strict=True)))
        for context, column in zip(contexts, speeds, strict=False)
        for batch, row in enumerate(column[: len(speeds[0])], start=1)
    ]
    found = schedule(rows, tolerance)
    assert all(found.share(cell) >= 1 - tolerance - 1e-12 for cell in rows)
    by_context = {}
    for entry in found.entries:
        by_context.setdefault(entry.context, []).append(entry.batch)
    assert len({tuple(batches) for batches in by_context.values()}) == 1, "a rectangular grid"
    assert min(by_context)[0] == 1
    one = schedule(rows, tolerance, by_context=False)
    assert not one.by_context
    single = schedule(rows, tolerance, by_batch=False, by_context=False)
    assert len(single.entries) == 1
    assert one.share(one.worst) >= single.share(single.worst) - 1e-12


def least_of_one_gamma(cells):
    """What the best single gamma reaches in each of some cells: the slow twin."""
    return max(min(cell.share(gamma) for cell in cells) for gamma in cells[0].speedups)


@given(
    st.lists(st.lists(SPEEDS, min_size=2, max_size=2), min_size=1, max_size=6), st.floats(0, 0.5)
)
def test_each_batch_reaches_what_one_gamma_can(speeds, tolerance):
    """One gamma for two contexts: a batch for which these disagree lowers what it reaches itself,
    and no other.
    """
    cells = [
        Cell(batch, context, dict(zip(GAMMAS, row, strict=True)))
        for batch, pair in enumerate(speeds, start=1)
        for context, row in zip((1000, 8000), pair, strict=True)
    ]
    found = schedule(cells, tolerance, by_context=False)
    for pair in zip(cells[::2], cells[1::2], strict=True):
        assert min(map(found.share, pair)) >= min(1 - tolerance, least_of_one_gamma(pair))


def test_cells_are_predictions_as_far_as_memory_goes(setup):
    found = list(predicted_cells(setup, 300, [8000, 100_000], (1, 3), 0.8, Curves([]), 100))
    for cell in found[:: len(found) // 5]:
        middle = setup.at(batch=cell.batch, context=cell.context + 50)
        expected = predict(middle, (1, 3), 0.8, generate_len=100)
        assert cell.speedups == {0: 1.0} | {at.gamma: at.speedup for at in expected.by_gamma}
    assert max(cell.batch for cell in found if cell.context == 100_000) < 10, "80 GiB"
    with pytest.raises(
        UserError, match=r"scenario.alpha=null: no acceptance is known .*; give one"
    ):
        list(predicted_cells(setup, 4, [8000], (1, 3), None, Curves([]), 100))
    with pytest.raises(UserError, match="not even one row of 1000000 tokens fits"):
        list(
            predicted_cells(
                setup.at(hardware=hardware_named("l40")), 4, [1_000_000], (1,), 0.8, Curves([]), 100
            )
        )


def test_batches_to_predict():
    assert batches_up_to(3) == [1, 2, 3]
    found = batches_up_to(256)
    assert found[:16] == list(range(1, 17))
    assert found[-1] == 256
    assert all(after <= 1.2 * before for before, after in pairwise(found[15:]))


ROWS = (Entry((1, 4), (1, 8000), 5), Entry((5, 32), (1, 8000), 2), Entry((33, 64), (1, 8000), 0))


def with_rows(rows):
    """A schedule whose predictions agree with it."""
    found = [
        Cell(batch, row.context[1], {0: 1.0, row.gamma: 1.5}) for row in rows for batch in row.batch
    ]
    return Schedule(tuple(found), tuple(rows))


def sglang(slots, batch):
    """SGLang's rule: the slot with the largest lower bound that the batch reaches."""
    bounds = sorted(map(int, slots))
    (gamma,) = slots[str(bounds[bisect_right(bounds, batch) - 1])]["candidate_steps"]
    return gamma


def tensorrt_llm(lengths, batch):
    """TensorRT-LLM's rule: the smallest upper bound that holds the batch; none beyond the last."""
    bounds = sorted(lengths)
    index = bisect_left(bounds, batch)
    return lengths[bounds[index]] if index < len(bounds) else 0


def test_engines_read_the_schedule_as_it_is(setup):
    """Compare with each engine's rules, and with a recording of vLLM reading the same schedule."""
    recorded = json.loads(Path(__file__).with_name("vllm_lookup.json").read_text())
    found = with_rows(ROWS)
    config = json.loads(FORMS["vllm"].settings(found, setup).content)
    slots = json.loads(FORMS["sglang"].write(found, setup, "EAGLE3").content)
    trt = yaml.safe_load(FORMS["tensorrt_llm"].settings(found, setup).content)["speculative_config"]
    assert (config["method"], config["model"]) == ("draft_model", "meta-llama/Llama-3.2-1B")
    assert config["num_speculative_tokens"] == trt["max_draft_len"] == 5
    assert config["num_speculative_tokens_per_batch_size"] == recorded["schedule"]
    for batch, read in zip(range(1, 65), recorded["gammas"], strict=True):
        gamma = found.gamma(batch, 4000)
        assert gamma == read
        assert sglang(slots, batch) == gamma
        assert tensorrt_llm(trt["draft_len_schedule"], batch) == gamma
    assert read_vllm(config).entries == tuple(
        row._replace(context=(1, sys.maxsize)) for row in ROWS
    )
    assert 64 not in trt["draft_len_schedule"], "beyond the last entry it does not speculate anyway"


VLLM = os.environ.get("MAGICDEC_VLLM_PYTHON", "")
ACCEPT = """
import json, sys
from vllm.config import ModelConfig, ParallelConfig
from vllm.config.speculative import SpeculativeConfig

target, draft, file = sys.argv[1:]
given = json.load(open(file)) | {"model": draft}
model = ModelConfig(model=target, dtype="float32", max_model_len=1024)
config = SpeculativeConfig(**given, target_model_config=model, target_parallel_config=ParallelConfig())
print([list(entry) for entry in config.num_speculative_tokens_per_batch_size])
"""  # noqa: E501


@pytest.mark.skipif(
    not VLLM, reason="MAGICDEC_VLLM_PYTHON names no Python of an environment with vLLM"
)
def test_vllms_own_configuration_accepts_the_file(setup, tmp_path):
    file = tmp_path / "schedule.json"
    file.write_text(FORMS["vllm"].settings(with_rows(ROWS), setup).content)
    command = [VLLM, "-c", ACCEPT, str(TINY / "target"), str(TINY / "draft"), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[*row.batch, row.gamma] for row in ROWS]


def test_a_context_range_stands_between_batch_and_gamma(setup):
    rows = [Entry((1, 8), (1, 3999), 2), Entry((1, 8), (4000, 32_000), 4)]
    config = json.loads(FORMS["vllm_by_context"].settings(with_rows(rows), setup).content)
    assert config["num_speculative_tokens_per_batch_size"] == [
        [1, 8, 1, 3999, 2],
        [1, 8, 4000, 32_000, 4],
    ]


def test_what_an_engine_cannot_express_is_a_note(setup):
    rising = with_rows([Entry((1, 8), (1, 8000), 2), Entry((9, 64), (1, 8000), 4)])
    found = FORMS["tensorrt_llm"].settings(rising, setup)
    assert yaml.safe_load(found.content)["speculative_config"]["draft_len_schedule"] == {
        8: 2,
        64: 2,
    }
    assert "at most 2" in found.note
    late = with_rows([Entry((1, 8), (1, 8000), 0), Entry((9, 64), (1, 8000), 4)])
    found = FORMS["tensorrt_llm"].settings(late, setup)
    assert found.content is None
    assert "first entry is the largest" in found.note
    never = with_rows([Entry((1, 64), (1, 8000), 0)])
    for name, form in FORMS.items():
        found = form.write(never, setup, form.methods.get("model", ""))
        assert (found.content, "serve without it" in found.note) == (None, True), name
        assert "spec" not in found.command("FILE"), name


def of_kind(setup, kind, path):
    """The setup with a draft over the target's hidden states."""
    facts = DRAFTS[kind].facts
    architecture = facts().assumed_model(setup.target)
    return setup.at(draft=facts(model=ModelChoice(kind, path=path, architecture=architecture)))


@pytest.mark.parametrize(
    ("kind", "path", "method", "trt", "words"),
    [
        ("mtp", None, "mtp", "MTP", "--spec-type draft-mtp"),
        ("dflash", "z-lab/draft", "dflash", "DFlash", "--spec-type draft-dflash -md DRAFT.gguf"),
        ("eagle3", "lab/head", "eagle3", "Eagle3", "--spec-type draft-eagle3 -md DRAFT.gguf"),
    ],
)
def test_drafts_over_hidden_states_have_the_engines_names(setup, kind, path, method, trt, words):
    """Modules of the target's own checkpoint have no model to name."""
    own, found = of_kind(setup, kind, path), with_rows(ROWS)
    config = json.loads(FORMS["vllm"].settings(found, own).content)
    assert (config["method"], config.get("model")) == (method, path)
    settings = yaml.safe_load(FORMS["tensorrt_llm"].settings(found, own).content)
    assert settings["speculative_config"]["decoding_type"] == trt
    assert settings["speculative_config"].get("speculative_model") == path
    assert words in " ".join(FORMS["llamacpp"].settings(found, own).words)


def test_sglang_runs_modules_as_an_eagle_head_and_no_draft_of_blocks(setup):
    found = with_rows(ROWS)
    command = FORMS["sglang"].settings(found, of_kind(setup, "mtp", None)).command("FILE")
    assert "--speculative-algorithm EAGLE" in " ".join(command.split())
    assert "draft-model-path" not in command
    with pytest.raises(UserError, match="draft=dflash: SGLang's adaptive speculation cannot"):
        FORMS["sglang"].settings(found, of_kind(setup, "dflash", "z-lab/draft"))


def test_engines_look_up_the_suffixes_that_our_own_lookup_does(setup):
    """From one token up to max_ngram, the latest match of the request's own text."""
    lookup = DRAFTS["ngram"].facts
    own, found = setup.at(draft=lookup(max_ngram=6)), with_rows(ROWS)
    config = json.loads(FORMS["vllm"].settings(found, own).content)
    assert (config["prompt_lookup_min"], config["prompt_lookup_max"]) == (1, 6)
    settings = yaml.safe_load(FORMS["tensorrt_llm"].settings(found, own).content)
    keys = ("max_matching_ngram_size", "is_use_oldest", "is_public_pool")
    assert [settings["speculative_config"][key] for key in keys] == [6, False, False]
    default = json.loads(FORMS["vllm"].settings(found, setup.at(draft=lookup())).content)
    assert default["prompt_lookup_max"] == lookup().max_ngram
    for other in (setup, of_kind(setup, "mtp", None)):
        for name in ("vllm", "tensorrt_llm"):
            content = FORMS[name].settings(found, other).content
            assert "ngram" not in content, name
            assert "lookup" not in content, name


def test_an_engine_without_the_draft_refuses_it(setup):
    own = setup.at(draft=draft_named(compose([]), "self"))
    for name, form in FORMS.items():
        with pytest.raises(
            UserError, match=f"draft=self: {form.label} cannot be set to it; choose draft="
        ):
            form.settings(with_rows(ROWS), own)
        assert form.label, name
