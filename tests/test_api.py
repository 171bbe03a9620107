"""The Python API: the same tokens as elsewhere, one line for every mistake, and a model that
outlives all of them.
"""

import doctest
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import zip_longest
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

import magicdec
from magicdec.data.tokenizer import encode_prompt, load_tokenizer
from magicdec.planning.shared import SHARED
from magicdec.verification.sampling import Sampling
from tests.checkpoints import load_reference
from tests.programs import ROOT
from tests.runs import TINY, one_line

TARGET = TINY / "target"
SETTINGS = {
    "device": "cpu",
    "batch_size": 2,
    "context_len": 256,
    "progress": False,
}
SMALL = [
    "batch.size=2",
    "batch.context_len=64",
    "batch.generate_len=12",
    "cache.budget=16",
    "scenario.repeats=1",
]
SMALL += ["hardware=cpu", "tracker=[]"]
TEXTS = [
    "def __init__(self, name):\n    self.name = ",
    "import os\n",
    "class Slots:\n    def close(self):\n" * 4,
]
LONG = "for number, line in enumerate(lines):\n    if line.startswith('#'):\n        continue\n" * 4


@pytest.fixture(scope="module")
def model():
    with magicdec.load("tiny", budget=16, gamma=3, **SETTINGS) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def expected(model):
    """Return what transformers writes after each text, alone."""
    reference, tokenizer = load_reference(TARGET), load_tokenizer(TARGET)
    written = []
    for text in TEXTS:
        ids = torch.tensor([tokenizer.encode(text)])
        out = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
        )
        written.append(out[0, ids.shape[1] :].tolist())
    return written


def written(model, prompts, max_tokens, **options):
    """The tokens of the continuations."""
    return [one.ids for one in model.generate(prompts, max_tokens, **options)]


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Neither Hydra's state, nor another working directory, nor another log."""

    def state():
        return os.getcwd(), logging.root.level, list(logging.root.handlers)

    before = state()
    yield
    assert state() == before
    assert not GlobalHydra.instance().is_initialized()


def idle(model) -> bool:
    """Wait until no slot is taken; False if that takes too long."""
    deadline = time.monotonic() + 30
    while not model._engine.scheduler.idle and time.monotonic() < deadline:
        time.sleep(0.005)
    return model._engine.scheduler.idle


def test_greedy_text_is_that_of_transformers(model, expected):
    out = model.generate(TEXTS, max_tokens=24)  # more prompts than slots
    assert [one.ids for one in out] == expected
    assert [one.text for one in out] == [
        model.tokenizer.decode(ids, skip_special_tokens=True) for ids in expected
    ]
    assert {one.end for one in out} == {"length"}
    assert written(model, TEXTS[0], 24) == expected[:1]
    encoded = [model.tokenizer.encode(text) for text in TEXTS[:2]]
    assert written(model, encoded[1], 24) == expected[1:2]
    assert written(model, [torch.tensor(ids) for ids in encoded], 24) == expected[:2]


def test_a_model_says_what_it_is(model):
    title = (
        "tiny, self-speculation, gamma 3, streaming cache, budget 16, 4 sinks; 2 slots of 320"
        " tokens"
    )
    assert repr(model) == f"<Model: {title}>"


def test_an_end_of_sequence_ends_a_continuation(model, expected, monkeypatch):
    slots = model._engine.scheduler.slots
    monkeypatch.setattr(slots, "eos_token_ids", (expected[0][5],))
    for state in (slots.state, slots.single.decoder.state):
        monkeypatch.setattr(state, "_eos", torch.tensor([expected[0][5]]))
    out = model.generate(TEXTS[0], max_tokens=24)
    first = expected[0].index(expected[0][5])
    assert (out[0].ids, out[0].end) == (expected[0][: first + 1], "stop")
    assert written(model, TEXTS[0], 24, ignore_eos=True) == expected[:1]


def test_acceptance_and_times_of_each_prompt_and_of_all(model):
    out = model.generate([LONG, TEXTS[0]], max_tokens=40)
    stats = [one.stats for one in out]
    assert [s.tokens for s in stats] == [40, 40]
    assert [s.prompt_tokens for s in stats] == [
        len(model.tokenizer.encode(text)) for text in (LONG, TEXTS[0])
    ]
    assert all(0 < s.time_to_first_token_s < s.request_latency_s for s in stats)
    proposed, accepted = (sum(getattr(s, name) for s in stats) for name in ("proposed", "accepted"))
    assert 0 < accepted < proposed
    assert out.metrics["acceptance_rate"] == pytest.approx(accepted / proposed)
    assert out.metrics["acceptance_length"] == pytest.approx(1 + 3 * accepted / proposed)
    mean = sum(s.time_per_output_token_s for s in stats) / 2
    assert out.metrics["time_per_output_token_ms"] == pytest.approx(1e3 * mean)
    assert model.generate(LONG, 40, gamma=0)[0].stats.proposed == 0


def test_reading_later_prompts_is_no_part_of_a_first_tokens_time(model, monkeypatch):
    """The clock counts texts that were encoded."""
    encoded = []

    def encode(tokenizer, text):
        encoded.append(text)
        return encode_prompt(tokenizer, text)

    monkeypatch.setattr("magicdec.serving.loaded_model.encode_prompt", encode)
    monkeypatch.setattr("magicdec.serving.request.perf_counter", lambda: len(encoded))
    out = model.generate(TEXTS, max_tokens=4)
    assert [one.stats.time_to_first_token_s for one in out] == [0, 0, 0]


def test_samples_are_those_of_a_run_and_do_not_depend_on_neighbours(model):
    ids = [model.tokenizer.encode(text) for text in TEXTS]
    options = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "ignore_eos": True}
    out = model.generate(TEXTS, 12, **options)
    engine = model._engine.scheduler.slots.engine
    batch = engine.open(ids)  # the offline decoder: three rows, with the same draft
    batch.decoder.sampling = batch.draft.sampling = Sampling(0.9, None, 0.95, seed=7)
    batch.decoder.state.limit_B.copy_(torch.tensor([len(row) + 12 for row in ids]))
    batch.decoder.prefill(engine.prefill_chunk)
    assert [one.ids for one in out] == batch.decoder.generate(batch.draft).tokens
    assert written(model, [TEXTS[2], TEXTS[1]], 12, **options)[1] == out[1].ids
    assert written(model, TEXTS[0], 12, **options) == [out[0].ids]
    assert written(model, TEXTS[0], 12, **(options | {"seed": 8})) != [out[0].ids]
    assert "".join(piece.text for piece in model.stream(TEXTS[0], 12, **options)) == out[0].text


def test_a_stream_is_what_generate_writes(model, expected):
    pieces = list(model.stream(TEXTS[0], max_tokens=24))
    assert [token for piece in pieces for token in piece.ids] == expected[0]
    assert (
        "".join(piece.text for piece in pieces) == model.generate(TEXTS[0], max_tokens=24)[0].text
    )
    assert len(pieces) < 24
    # Half a character at the end comes with a last piece.
    assert len(model.tokenizer.encode("→")) > 1
    assert "".join(piece.text for piece in model.stream("x", 1)) == model.generate("x", 1)[0].text


def test_streams_take_turns(model, expected):
    turns = zip_longest(*(model.stream(text, max_tokens=24) for text in TEXTS[:2]))
    for pieces, ids in zip(zip(*turns, strict=True), expected[:2], strict=True):
        assert [token for piece in pieces if piece for token in piece.ids] == ids


def test_leaving_a_stream_frees_its_slot(model, expected):
    for _ in range(5):
        for piece in model.stream(LONG, max_tokens=100):
            assert piece.ids
            break
    never_begun = model.stream(LONG, max_tokens=100)
    assert idle(model)
    del never_begun
    assert written(model, TEXTS, 24) == expected


@pytest.mark.parametrize("way", ["generate", "stream"])
def test_an_interrupt_leaves_the_model_usable(model, expected, monkeypatch, way):
    slots, rounds = model._engine.scheduler.slots, []
    step, main = slots.step, threading.main_thread().ident

    def interrupted(speculative):
        rounds.append(step(speculative))
        if len(rounds) == 2:
            signal.pthread_kill(main, signal.SIGINT)
        return rounds[-1]

    monkeypatch.setattr(slots, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.generate([LONG, *TEXTS], 150) if way == "generate" else list(model.stream(LONG, 150))
    assert idle(model)
    assert len(rounds) < 50
    assert model._engine.scheduler.slots is slots
    assert written(model, TEXTS, 24) == expected


def test_a_failed_round_is_raised_and_the_next_call_works(model, expected, monkeypatch):
    slots = model._engine.scheduler.slots
    stream = model.stream(LONG, 150)
    next(stream)
    monkeypatch.setattr(slots, "step", Mock(side_effect=MemoryError("no more")))
    for call in (lambda: model.generate(LONG, 150), lambda: list(stream)):
        with pytest.raises(MemoryError, match="no more"):
            call()
    assert written(model, TEXTS, 24) == expected
    assert model._engine.scheduler.slots is not slots


@pytest.mark.parametrize(
    ("prompts", "options", "said"),
    [
        ("", {}, "the prompt is empty"),
        ([], {}, "the prompt is empty"),
        (["x", ""], {}, "prompts[1]: the prompt is empty"),
        ([1, 5000], {}, "the prompt holds a token outside of the vocabulary of 1,024"),
        (["x", 5], {}, "prompt=5: must be a text or a list of token ids"),
        ("a\ud800", {}, r"prompt='a\ud800': holds half of a surrogate pair"),
        (None, {}, "prompt=None: must be a text or a list of token ids"),
        (b"Hello", {}, "prompt=b'Hello': must be a text or a list of token ids"),
        (
            [1] * 300,
            {"max_tokens": 21},
            "300 prompt tokens and max_tokens=21 exceed the limit of 320 tokens",
        ),
        ("x", {"max_tokens": 0}, "max_tokens=0: must be at least 1"),
        ("x", {"max_tokens": 2.5}, "max_tokens=2.5: must be a whole number"),
        ("x", {"top_p": 2}, "top_p=2: must be from 1e-30 to 1"),
        ("x", {"temperature": "hot"}, "temperature=hot: must be 0 (greedy) or from 0.0001"),
        ("x", {"ignore_eos": 1}, "ignore_eos=1: must be true or false"),
        ("x", {"gamma": 4}, "gamma=4: must be at most 3, which the engine was made for"),
        ("x", {"temprature": 1.0}, "did you mean temperature?"),
    ],
)
def test_mistakes_in_a_request(model, prompts, options, said):
    calls = (
        [model.generate]
        if isinstance(prompts, list) and "x" in prompts
        else [model.generate, model.stream]
    )
    for call in calls:
        with pytest.raises(magicdec.UserError, match=one_line(said)):
            call(prompts, **options)
    assert idle(model)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"target": "tny"}, "did you mean tiny?"),
        ({"target": "/nowhere/at all"}, "target.path=/nowhere/at all"),
        ({"draft": "slef"}, "draft=slef: no such option; one of: "),
        (
            {"draft_model": "tiny-draft"},
            "target@draft.model: this draft has no model of its own; use draft=model",
        ),
        ({"budget": 3}, "cache.budget=3: must be above cache.num_sink=4"),
        ({"cache": "full", "budget": 300}, "cache.budget=300 has no effect with cache=full"),
        ({"overrides": ["cache.budgt=3"]}, "unknown key cache.budgt; did you mean cache.budget?"),
    ],
)
def test_mistakes_in_a_configuration(arguments, said):
    with pytest.raises(magicdec.UserError, match=one_line(said)):
        magicdec.load(device="cpu", progress=False, **arguments)


def test_a_model_that_does_not_fit(monkeypatch):
    monkeypatch.setattr("magicdec.measure.memory_use.available_bytes", lambda _: 1 << 20)
    with pytest.raises(
        magicdec.UserError,
        match=r"batch.size=2 at batch.context_len=256 needs about .* not even one",
    ):
        magicdec.load("tiny", **SETTINGS)


def test_a_folder_and_a_second_model_at_once(model, expected, tmp_path):
    folder = tmp_path / "it's a copy, with=signs"
    folder.symlink_to(TARGET)
    draft = TINY / "draft"
    SHARED.begin("prefill")  # as a sweep in this process leaves it
    second = magicdec.load(
        folder, draft="model", draft_model=draft, cache="full", gamma=2, **SETTINGS
    )
    with ThreadPoolExecutor() as pool:
        assert (
            list(pool.map(lambda one: written(one, TEXTS, 24), (model, second, model)))
            == [expected] * 3
        )
    weights = weakref.ref(second._engine.scheduler.slots.engine.target)
    del second
    until = time.monotonic() + 10
    while weights() is not None and time.monotonic() < until:  # its thread ends by itself
        gc.collect()
        time.sleep(0.05)
    assert weights() is None
    # The first one's.
    assert "magicdec-scheduler" in {thread.name for thread in threading.enumerate()}


def test_a_closed_model_says_so():
    with magicdec.load(draft="none", **SETTINGS) as model:
        stream = model.stream(LONG, 150)
        next(stream)
    with pytest.raises(RuntimeError, match="the model was closed"):
        list(stream)
    with pytest.raises(RuntimeError, match="the engine is closed"):
        model.generate("x")


def test_a_study_shares_what_its_cells_have_in_common(tmp_path):
    cells = [
        [*SMALL, f"runs_dir={tmp_path}", "draft.gamma=2", f"cache.budget={budget}"]
        for budget in (16, 32, 16)
    ]
    results = magicdec.study(cells)
    assert [one.metrics["prefill/shared"] for one in results] == [
        False,
        True,
        False,
    ], "the last was done already"
    assert results[2].folder == results[0].folder
    assert [one.metrics["overrides"] for one in results] == [cells[0], cells[1], cells[0]]
    (sweep,) = (tmp_path / "sweeps").iterdir()
    assert len(magicdec.runs(tmp_path, sweep.name)) == 2
    with pytest.raises(magicdec.UserError, match=r"cache\.budget=0"):
        magicdec.study([cells[0], [*SMALL, "cache.budget=0"]])


def test_run_is_what_the_command_line_does(model, tmp_path, capsys):
    typed = [*SMALL, f"runs_dir={tmp_path}", "data.save_prompts=true", "draft.gamma=3"]
    result = magicdec.run(typed)
    assert "lossless          yes" in capsys.readouterr().out
    assert result.folder == tmp_path / result.metrics["id"]
    assert repr(result) == f"Result(folder={result.folder!r})"
    assert result.metrics["lossless/identical"] is True
    assert result.metrics["overrides"] == typed
    assert {row["gamma"] for row in result.history} == {3}
    out = model.generate(
        [row["prompt"] for row in result.generations], max_tokens=12, ignore_eos=True
    )
    assert [one.ids for one in out] == [row["speculative"] for row in result.generations]
    predicted = magicdec.run(
        ["scenario=predict", "hardware=a100", f"runs_dir={tmp_path}", "wandb.mode=disabled"]
    )
    ids = [result.metrics["id"], predicted.metrics["id"]]
    names = magicdec.runs(tmp_path)[["id", "scenario.name"]].values.tolist()
    assert names == [[ids[0], "compare"], [ids[1], "predict"]]
    rounds = magicdec.histories(tmp_path).groupby("id")["gamma"]
    assert rounds.count().to_dict() == {ids[0]: len(result.history), ids[1]: len(predicted.history)}
    assert rounds.max().to_dict() == {ids[0]: 3, ids[1]: 16}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["draft.gamm=3"], "unknown key draft.gamm; did you mean draft.gamma?"),
        (["+sweeps=gamma_x_budget"], "a grid needs the command line"),
        (["cache=full", "cache.budget=3"], "cache.budget=3 has no effect with cache=full"),
        (["sweep.dry_run=true"], "a dry run has no result"),
        (["target.path=/nowhere"], "target.path=/nowhere"),
    ],
)
def test_mistakes_in_a_run_leave_nothing(overrides, said, tmp_path):
    with pytest.raises(magicdec.UserError, match=one_line(said)):
        magicdec.run([f"runs_dir={tmp_path}/runs", *overrides])
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "function", [magicdec.run, magicdec.load, partial(magicdec.predict, "tiny", "a100")]
)
def test_overrides_are_a_list(function):
    with pytest.raises(
        magicdec.UserError, match=r"^overrides='draft.gamma=1': must be a list, as in"
    ):
        function(overrides="draft.gamma=1")


def test_runs_that_are_not_there(tmp_path):
    with pytest.raises(magicdec.UserError, match="holds no runs"):
        magicdec.runs(tmp_path)


def test_a_prediction_is_that_of_the_command_line(tmp_path):
    arguments = {
        "budget": 512,
        "batch_size": 64,
        "context_len": 32000,
        "alpha": 0.85,
        "gammas": [2, 3],
    }
    prediction = magicdec.predict("llama-3.1-8b", "8xa100", **arguments)
    typed = [
        "scenario=predict",
        "target=llama-3.1-8b",
        "hardware=8xa100",
        "cache.budget=512",
        "batch.size=64",
    ]
    typed += [
        "batch.context_len=32000",
        "scenario.alpha=0.85",
        "scenario.gammas=[2,3]",
        "wandb.mode=disabled",
    ]
    stored = magicdec.run([*typed, f"runs_dir={tmp_path}"]).metrics
    assert prediction.best.gamma == stored["predicted/gamma"] == 3
    assert prediction.best.speedup == pytest.approx(stored["predicted/speedup"])
    what = "llama-3.1-8b on 8xa100, 64 x 32,000, draft self, streaming 512"
    both = (
        f"{prediction.best.speedup:.2f}x per row and {stored['predicted/speedup_wall']:.2f}x per"
        " batch"
    )
    assert repr(prediction) == f"<Prediction: {what}: {both}, with gamma 3>"
    with pytest.raises(magicdec.UserError, match=r"^cache\.budget=512 has no effect"):
        magicdec.predict("llama-3.1-8b", "8xa100", cache="full", **arguments)
    with pytest.raises(magicdec.UserError, match="did you mean a100"):
        magicdec.predict("llama-3.1-8b", "a10")


def test_importing_is_cheap():
    code = "import sys, magicdec; assert not {'torch', 'hydra', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert set(magicdec.__all__) <= set(dir(magicdec))
    assert not hasattr(magicdec, "lode")


def test_the_page_of_the_api(here):
    """Its examples run as they stand, and print what it says."""
    flags = {
        "optionflags": doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE,
        "globs": {"Path": Path},
    }
    found = doctest.testfile(str(ROOT / "docs/python.md"), module_relative=False, **flags)
    assert (found.failed, found.attempted > 10) == (0, True)
