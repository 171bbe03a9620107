"""transformers as an engine: it writes what ours writes, and its times and counts are what
`generate` did.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from magicdec.config.load import compose
from magicdec.decoding.timers import Stopwatch
from magicdec.drafts.layer_skip import LayerSkip
from magicdec.drafts.model import IndependentModel
from magicdec.drafts.ngram import PromptLookup
from magicdec.peers.base import AcceptanceCounts, PeerSpec
from magicdec.peers.transformers import TokenBursts, TransformersEngine, TransformersPeer
from magicdec.scenarios import Job, run
from magicdec.verification.sampling import Sampling
from tests.checkpoints import load_model, make_checkpoint
from tests.scenarios.test_run import SMALL
from tests.small import machine, open_batch, random_prompts
from tests.tracking.sample import lines

NEW, GAMMA, VOCAB = 24, 3, 96
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, and a draft of the same vocabulary with fewer layers."""
    folder = tmp_path_factory.mktemp("peers")
    draft = make_checkpoint(folder / "draft", seed=1, num_hidden_layers=1)
    return str(make_checkpoint(folder / "target")), str(draft)


def spec(folders, **changes) -> PeerSpec:
    engine = TransformersEngine()
    plain = PeerSpec(
        folders[0], machine(), num_rows=2, max_len=128, sampling=Sampling(), engine=engine
    )
    return replace(plain, **changes)


def ours(folder: str, prompts: list[list[int]]) -> list[list[int]]:
    return open_batch(load_model(Path(folder)), prompts, generate_len=NEW).decoder.generate().tokens


@pytest.mark.filterwarnings("error")  # of what a later version no longer takes
@pytest.mark.parametrize("cache", ["static", "dynamic"])
@pytest.mark.parametrize("lengths", [[40, 40, 40], [40, 17, 1]], ids=["even", "ragged"])
def test_it_writes_what_ours_writes(folders, cache, lengths):
    prompts = random_prompts(lengths, vocab=VOCAB)
    with (
        TransformersPeer(spec(folders, engine=TransformersEngine(kv_cache=cache))) as peer,
        Stopwatch(CPU) as watch,
    ):
        got = peer.generate(prompts, NEW, speculative=False)
    assert got.tokens == ours(folders[0], prompts)
    assert [row.decoded for row in got.times] == [NEW - 1] * 3
    assert all(row.first > 0 and row.decode > 0 for row in got.times)
    assert max(row.first + row.decode for row in got.times) <= watch.seconds


def test_rows_end_at_their_end_of_sequence_and_are_timed_to_it(folders):
    prompts = random_prompts([30] * 4, vocab=VOCAB)
    outputs = ours(folders[0], prompts)
    eos = outputs[0][NEW // 2]  # so that a row, at least, ends early
    peer = TransformersPeer(spec(folders, eos_token_ids=(eos,)))
    got = peer.generate(prompts, NEW, speculative=False)
    assert got.tokens == [row[: row.index(eos) + 1] if eos in row else row for row in outputs]
    shortest, longest = (choose(got.times, key=lambda row: row.decoded) for choose in (min, max))
    assert shortest.decoded < NEW - 1
    assert shortest.decode < longest.decode or shortest.decoded == longest.decoded


@pytest.mark.parametrize(
    "draft",
    [IndependentModel(), PromptLookup(max_ngram=2), LayerSkip(num_layers=2)],
    ids=lambda draft: draft.name,
)
def test_speculation_is_lossless_and_counted(folders, draft):
    model = folders[1] if draft.needs_model else None
    prompt = [random_prompts([12], vocab=VOCAB)[0] * 4]  # something to look up
    peer = TransformersPeer(spec(folders, draft_folder=model, gamma=GAMMA, draft=draft))
    plain, fast = (peer.generate(prompt, NEW, speculative) for speculative in (False, True))
    assert fast.tokens == plain.tokens == ours(folders[0], prompt)
    assert plain.counts == AcceptanceCounts()
    assert fast.counts.rounds > 0
    assert list(fast.counts.accepted) == sorted(fast.counts.accepted, reverse=True)
    assert sum(fast.counts.accepted) <= fast.counts.proposed <= GAMMA * fast.counts.rounds
    if draft.is_model:  # which may find nothing
        assert fast.counts.proposed == GAMMA * fast.counts.rounds
    (row,) = fast.times
    assert 0 < row.decoded < NEW


def test_a_draft_that_is_the_target_is_always_accepted(folders):
    """The counts against what must come out: every round takes gamma + 1 tokens."""
    peer = TransformersPeer(
        spec(folders, draft_folder=folders[0], draft=IndependentModel(), gamma=GAMMA)
    )
    got = peer.generate(random_prompts([20], vocab=VOCAB), NEW, speculative=True)
    rounds = NEW // (GAMMA + 1)
    assert got.counts == AcceptanceCounts(rounds, GAMMA * rounds, (rounds,) * GAMMA)
    assert got.times[0].decoded == NEW - (GAMMA + 1)  # the first round's came with the prefill
    found = got.counts.metrics(GAMMA)
    assert (found["acceptance_rate"], found["acceptance_length"]) == (1.0, GAMMA + 1)
    assert found["alpha"] == pytest.approx(1.0)


def test_a_passage_is_counted_by_hand(folders):
    """Three rounds behind a prompt of 10: all of 3 accepted, none, and one that the limit of 10 cut
    to 2 proposals.
    """
    bursts = TokenBursts(CPU)
    bursts.start()
    for length, width in ((14, 13), (15, 4), (17, 4), (20, 3)):
        bursts.watch(None, None, {"input_ids": torch.zeros(1, width)})
        bursts(torch.zeros(1, length), None)
    peer = TransformersPeer.__new__(TransformersPeer)
    peer.spec = spec(folders, gamma=GAMMA)
    assert peer._counts(bursts, 10, 10) == AcceptanceCounts(3, 9, (2, 1, 1))


def test_counts_without_proposals():
    assert AcceptanceCounts().metrics(GAMMA) == {"acceptance_rounds": 0}
    # Two rounds proposed fewer.
    some = (AcceptanceCounts(2, 6, (2, 1, 1)) + AcceptanceCounts(2, 4, (1,))).metrics(GAMMA)
    assert some["acceptance_rate"] == 5 / 10
    assert some["acceptance_length"] == 5 / 4 + 1
    assert [some[f"acceptance_rate/position_{i}"] for i in range(3)] == [3 / 4, 1 / 4, 1 / 4]
    assert "alpha" not in some


def test_the_checkpoints_own_sampling_does_not_count(folders, tmp_path):
    """A generation_config.json with a temperature and a penalty, as some models ship."""
    copy = shutil.copytree(folders[0], tmp_path / "copy")
    own = {
        "do_sample": True,
        "temperature": 3.0,
        "top_k": 2,
        "repetition_penalty": 5.0,
        "eos_token_id": 2,
    }
    (copy / "generation_config.json").write_text(json.dumps(own))
    prompts = random_prompts([20, 20], vocab=VOCAB)
    peers = (TransformersPeer(spec(folders, target=str(folder))) for folder in (copy, folders[0]))
    one, two = (peer.generate(prompts, NEW, speculative=False).tokens for peer in peers)
    assert one == two


def test_sampling_is_repeatable(folders):
    peer = TransformersPeer(spec(folders, sampling=Sampling(temperature=1.0, top_p=0.9, seed=3)))
    prompts = random_prompts([20, 20], vocab=VOCAB)
    one, two, later = (
        peer.generate(prompts, NEW, speculative=False, first=first).tokens for first in (0, 0, 2)
    )
    assert one == two != ours(folders[0], prompts)
    assert later != one


def test_a_run_leaves_what_a_run_of_ours_leaves(tmp_path, monkeypatch):
    """The bundled pair: the same prompts, tokens, files and names of metrics, but for what only we
    can look into.
    """
    keys = [
        *SMALL,
        "batch.size=1",
        "batch.num_batches=2",
        "draft=model",
        "cache=full",
        f"runs_dir={tmp_path}",
    ]
    native, other = (
        run(compose([f"engine={engine}", *keys]), Job()) for engine in ("native", "transformers")
    )
    alike = (
        "data/fingerprint",
        "output/fingerprint",
        "lossless/identical",
        "acceptance/source",
        "gamma",
        "status",
    )
    assert [other[key] for key in alike] == [native[key] for key in alike]
    only_ours = ("time/", "agreement/", "noisy", "disturbed", "roofline/", "limit/", "formula/")
    only_ours += (
        "predicted/",
        "published/",
        "memory/",
        "lossless/",
        "weights/",
        "prefill/",
        "repeats_",
    )
    assert all(key.startswith(only_ours) for key in native.keys() - other.keys())
    assert other["engine/version"].startswith("transformers ")
    # Every round is the same but the first, which here follows the prefill at once, and there is a
    # part of it.
    assert other["acceptance_length"] == pytest.approx(native["acceptance_length"], rel=0.35)
    ours, theirs = (
        lines(tmp_path / found["id"] / "generations.jsonl") for found in (native, other)
    )
    assert all(row.pop("rounds") and row.pop("decode_s") for row in ours)
    assert ours == theirs
