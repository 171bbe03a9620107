"""Jobs that share weights and prefilled prompts: every token and every count is that of a process
of its own.
"""

import re

import pytest
import torch

from magicdec.config.load import compose
from magicdec.models.kv_cache import KVCache
from magicdec.planning import build
from magicdec.planning.resolve import resolve
from magicdec.planning.shared import SHARED, Prefilled, keys
from magicdec.scenarios import Job, compare
from tests.golden.record import CASES, KEPT
from tests.runs import run_here
from tests.small import small_model

NAMES = (
    "streaming",
    "window",
    "snapkv",
    "h2o",
    "topk",
    "quantized",
    "pyramidkv",
    "quest",
    "verify_guided",
    "model",
)
NAMES += ("model over h2o", "ngram", "layer_skip", "hierarchical", "sampled", "none")
# Need other sizes.
OTHERS = {"quantized": "draft.gamma=2", "pyramidkv": "draft.gamma=2", "quest": "draft.gamma=5"}
CELLS = {name: f"{CASES[name]} attention=auto {OTHERS.get(name, '')}".split() for name in NAMES}
CELLS["quantized weights"] = [*CELLS["streaming"], "draft.quantization=int8"]


@pytest.fixture(autouse=True)
def nothing_kept():
    SHARED.begin("none")
    yield
    SHARED.begin("none")


def cell(tmp_path, name, *overrides, number=0, sweep="one"):
    return run_here(
        tmp_path, *CELLS[name], *overrides, job=Job((), tmp_path / "sweeps" / sweep, number)
    )


def done(tmp_path, name, *overrides, share="prefill", number=0):
    """Run a cell. Return whether it shared a prefill, its tokens and every result that depends on
    no time.
    """
    sweep = f"sweep {len(list(tmp_path.glob('sweeps/*')))}"
    run = cell(
        tmp_path,
        name,
        *overrides,
        f"sweep.share={share}",
        "resume=false",
        number=number,
        sweep=sweep,
    )
    tokens = [
        {key: value for key, value in row.items() if key != "decode_s"} for row in run.generations
    ]
    kept = {
        k: value
        for k, value in run.metrics.items()
        if re.match(KEPT, k) and k not in ("id", "attempt")
    }
    return run.metrics["prefill/shared"], tokens, kept


@pytest.mark.parametrize(
    ("attention", "order"),
    [
        pytest.param("sdpa", list(CELLS), marks=pytest.mark.soak),
        pytest.param("cpp", list(reversed(CELLS)), marks=pytest.mark.slow),
    ],
)
def test_results_equal_those_of_processes_of_their_own_in_any_order(tmp_path, attention, order):
    alone = {
        name: done(tmp_path, name, f"attention={attention}", share="none")[1:] for name in order
    }
    SHARED.begin("none")
    for number, name in enumerate(order):
        shared, *results = done(tmp_path, name, f"attention={attention}")
        # h2o scores by the queries of the whole context, more than a shared prefill keeps.
        assert shared == (number > 0 and name != "h2o"), name
        assert tuple(results) == alone[name], name


@pytest.mark.slow
def test_a_cell_takes_over_what_the_last_one_has_left(tmp_path):
    alone = done(tmp_path, "streaming", share="none")
    assert done(tmp_path, "quest") == (False, *done(tmp_path, "quest", share="none")[1:])
    assert done(tmp_path, "quest")[0] is False, "a run of its own in between has kept nothing"
    assert done(tmp_path, "streaming") == (True, *alone[1:])


def test_the_time_of_the_prefill_is_the_measured_one(tmp_path):
    first, second = (
        cell(tmp_path, name, number=n).metrics for n, name in enumerate(("streaming", "window"))
    )
    assert (first["prefill/shared"], second["prefill/shared"]) == (False, True)
    assert len({run["autoregressive/time_to_first_token_ms"] for run in (first, second)}) == 1


@pytest.mark.parametrize(
    "change",
    [
        "batch.context_len=96",
        "batch.size=3",
        "batch.prefill_chunk=16",
        "data.seed=1",
        "hardware.dtype=bfloat16",
    ],
)
@pytest.mark.slow
def test_another_prefill_is_not_taken_over(tmp_path, change):
    done(tmp_path, "streaming")
    before = set(SHARED._kept)
    assert done(tmp_path, "streaming", change)[0] is False
    assert not {key for key in SHARED._kept if key in before and len(key) > 9}, (
        "and not held any longer"
    )
    assert done(tmp_path, "streaming", change) == (
        True,
        *done(tmp_path, "streaming", change, share="none")[1:],
    )


def test_weights_alone(tmp_path):
    done(tmp_path, "streaming", share="weights")
    weights = list(SHARED._kept.values())
    assert done(tmp_path, "snapkv", share="weights")[0] is False
    assert [id(value) for value in SHARED._kept.values()] == [id(value) for value in weights]


def test_a_policy_that_scores_by_more_queries_than_were_kept_prefills_again(tmp_path):
    change = "cache.observation_window=48"
    alone = done(tmp_path, "snapkv", change, share="none")
    done(tmp_path, "streaming")
    assert done(tmp_path, "snapkv")[0] is True
    assert done(tmp_path, "snapkv", change) == (False, *alone[1:])
    assert done(tmp_path, "snapkv", change) == (True, *alone[1:])


@pytest.mark.parametrize(("draft", "num_kept"), [("self", 1), ("eagle3", 0)])
def test_a_prefill_is_not_held_for_a_draft_that_has_to_hear_its_own(tmp_path, draft, num_kept):
    """Otherwise two of the target's caches are held at once."""
    done(tmp_path, "streaming")
    SHARED.keep_only(keys(resolve(compose([*CELLS["streaming"], f"draft={draft}"]))))
    kept = [value for value in SHARED._kept.values() if isinstance(value, Prefilled)]
    assert len(kept) == num_kept


def test_several_batches(tmp_path):
    changes = ("batch.num_batches=3", "sampling.ignore_eos=false")
    alone = done(tmp_path, "streaming", *changes, share="none")
    done(tmp_path, "window", *changes)
    assert done(tmp_path, "streaming", *changes) == (True, *alone[1:])


def test_a_run_that_fails_leaves_nothing(tmp_path, monkeypatch):
    done(tmp_path, "streaming")
    monkeypatch.setattr(compare, "profile_round", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        done(tmp_path, "window")
    assert SHARED.num_bytes == 0


def test_small_facts_are_found_once_and_not_after_a_failure(tmp_path, monkeypatch):
    found = []
    for module, name in (
        (build, "load_tokenizer"),
        (compare, "read_bandwidth"),
    ):
        own = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, own=own, name=name: found.append(name) or own(*a)
        )
    for number, name in enumerate(("streaming", "window")):
        done(tmp_path, name, number=number)
    assert sorted(found) == ["load_tokenizer", "read_bandwidth"]
    SHARED.clear()
    done(tmp_path, "streaming", number=2)
    assert len(found) == 4


def turn_of(tmp_path, name, turn, *overrides, number=0):
    """Measure a cell until it has so many repeats, as the launcher does with sweep.turns=true."""
    return cell(tmp_path, name, f"scenario.repeats={turn}", *overrides, number=number)


def num_decoded(run):
    """The number of repeats of the first row."""
    return len(run.generations[0]["decode_s"]["speculative"])


@pytest.mark.parametrize("resume", ["true", "false"])
@pytest.mark.slow
def test_runs_that_take_turns_end_with_all_repeats(tmp_path, resume):
    """Each turn is on disk when it ends, and the last one has what a run of its own has."""
    cells = list(enumerate(("streaming", "quest")))
    for number, name in cells:
        assert turn_of(tmp_path, name, 1, f"resume={resume}", number=number).metrics["repeats"] == 1
    ends = [turn_of(tmp_path, name, 2, f"resume={resume}", number=number) for number, name in cells]
    for (number, name), end in zip(cells, ends, strict=True):
        assert (end.metrics["repeats"], end.metrics["prefill/shared"], num_decoded(end)) == (
            2,
            True,
            2,
        )
        alone = done(tmp_path / "alone", name, "scenario.repeats=2", share="none", number=number)[2]
        others = alone.keys() - {"prefill/shared"}
        assert {key: end.metrics[key] for key in others} == {key: alone[key] for key in others}
    assert {path.parent for path in tmp_path.glob("*/result.json")} == {end.folder for end in ends}


def test_turns_of_a_run_that_is_done_are_skipped_and_those_of_an_interrupted_one_go_on(
    tmp_path, capsys
):
    first = turn_of(tmp_path, "streaming", 1)
    other = turn_of(tmp_path, "streaming", 2, number=1)  # of another sweep
    assert (other.folder, other.metrics["repeats"], num_decoded(other)) == (first.folder, 2, 2)
    for turn in (1, 2):
        assert turn_of(tmp_path, "streaming", turn, number=2).folder == other.folder
    assert capsys.readouterr().err.count("skipped") == 1


@pytest.mark.parametrize("slots", [7, 20, 30])
def test_a_kept_prefill_has_the_slots_that_the_next_job_needs(slots):
    """Fewer, as many or more, of which seven are valid."""
    cache = KVCache(small_model().config, 2, 20, torch.float32, "cpu")
    cache.simulate()
    cache.seqlens_B.fill_(7)
    SHARED.begin("prefill")
    SHARED.keep("key", Prefilled(cache, torch.zeros(2, 32), 1.0), num_batches=1)
    taken = SHARED.prefilled("key", slots).cache
    assert (taken.capacity, taken.seqlens_B.tolist()) == (slots, [7, 7])
    assert torch.equal(taken.k_LBKSD[..., :7, :], cache.k_LBKSD[..., :7, :])
    assert torch.equal(taken.v_LBKSD[..., :7, :], cache.v_LBKSD[..., :7, :])
