"""The scheduler: whose turn it is, and what becomes of requests that leave, fail, or cannot be
served.
"""

from unittest.mock import Mock

import pytest

from magicdec.errors import UserError
from magicdec.serving.request import Params, Request
from magicdec.serving.scheduler import Scheduler
from magicdec.verification.sampling import Sampling
from tests.serving.test_lossless import (
    ENDLESS,
    GENERATE,
    LENGTHS,
    TARGET,
    alone,
    expected,
    serve,
    slots_with,
)
from tests.small import VOCAB, noisy_copy, random_prompts

TOO_LARGE = OverflowError("too large")


def endless(lengths, count, **settings) -> list[Request]:
    """Requests for so many tokens, whose prompts have these lengths."""
    return [
        Request(prompt, Params(count, ENDLESS, **settings)) for prompt in random_prompts(lengths)
    ]


def submitted(slots, requests, speculative=True) -> Scheduler:
    """A scheduler to which requests were submitted."""
    scheduler = Scheduler(slots, speculative)
    for request in requests:
        scheduler.submit(request)
    return scheduler


def on_chunks(monkeypatch, slots, told) -> None:
    """Call `told` with the tokens of each chunk of a prefill, before the scheduler hears of it."""
    prefill = slots.prefill

    def prefill_with(*arguments):
        *others, progress = arguments
        return prefill(*others, lambda count: (told(count), progress(count)))

    monkeypatch.setattr(slots, "prefill", prefill_with)


def test_the_drafts_prefill_counts_like_the_targets():
    scheduler = Scheduler(slots_with("model", "h2o", num_slots=2, prefill_chunk=8))
    first = Request([1, 2, 3], Params(40, ENDLESS, gamma=0))
    scheduler.submit(first)
    scheduler.step()
    scheduler.submit(Request(random_prompts([64])[0], Params(2)))
    before = len(first.tokens)
    # A whole prefill: 64 tokens of the target, 63 of the draft, and at least one of h2o's scoring.
    scheduler.step()
    assert len(first.tokens) - before >= 16


@pytest.mark.parametrize("speculative", [False, True])
def test_a_round_follows_a_chunk_for_every_free_slot(speculative, monkeypatch):
    """The rest of a chunk goes to the next request; no round is due while no request has a slot."""
    slots, events = slots_with("self", "streaming", num_slots=4, prefill_chunk=8), []
    step = slots.step
    on_chunks(monkeypatch, slots, events.append)
    monkeypatch.setattr(slots, "step", lambda way: (events.append("round"), step(way))[1])
    scheduler = submitted(slots, endless([40, 64, 5, 20], 30, gamma=0), speculative)
    for _ in range(5):
        scheduler.step()
    first, second = [8] * 5, [8, 8, 8, "round"] * 2 + [8, 8]  # nobody runs; three slots are free
    # Two are free; one is, and then none.
    third, fourth = [5, "round"], [8, "round", 8, "round", 4, "round"]
    assert events == first + second + third + fourth


def test_a_cancelled_request_frees_its_slot_before_the_next_round(monkeypatch):
    slots, chunks = slots_with("self", "streaming", num_slots=1), []
    first, second, third = endless([30, 70, 33], 20)
    scheduler = submitted(slots, [first, second, third])
    scheduler.step()
    scheduler.step()
    first.cancelled = True

    def told(count):
        chunks.append(count)
        second.cancelled = len(chunks) == 2

    with monkeypatch.context() as patch:
        on_chunks(patch, slots, told)
        # Frees the first's slot, and drops the second in the middle of its prefill.
        scheduler.step()
    assert (first.end, second.end) == ("cancelled", "cancelled")
    assert chunks == [16, 16]
    assert second.tokens == []
    while not scheduler.idle:
        scheduler.step()
    assert third.tokens == alone(third.prompt, 20)


def test_a_cancelled_request_leaves_the_queue_at_once():
    requests = endless([30, 70, 33], 20)
    scheduler = submitted(slots_with("self", "streaming", num_slots=1), requests)
    scheduler.step()
    requests[1].cancelled = True
    scheduler.step()  # a round: the only slot is taken
    assert [request.end for request in requests] == [None, "cancelled", None]
    assert list(scheduler.waiting) == requests[2:]


def test_proposals_are_counted_by_the_gamma_of_their_request():
    slots = slots_with("self", "full")  # every proposal is accepted, and no round is cut
    gammas = [None, 0, 1, 2]
    prompts = random_prompts([30] * 4)
    requests = [
        Request(p, Params(31, ENDLESS, gamma=gamma))
        for p, gamma in zip(prompts, gammas, strict=True)
    ]
    serve(Scheduler(slots), list(requests), 0)
    counts = [
        (request.stats.proposed, request.stats.accepted, request.stats.acceptance_length)
        for request in requests
    ]
    assert counts == [(24, 24, 5), (0, 0, None), (15, 15, 2), (20, 20, 3)]


def test_closing_ends_a_prefill_at_its_next_chunk(monkeypatch):
    slots, chunks = slots_with("self", "streaming", num_slots=1), []  # chunks of 16 tokens
    (request,) = endless([70], 2)
    scheduler = submitted(slots, [request])

    def told(count):
        assert list(scheduler.waiting) == [request]  # until it has a slot
        chunks.append(count)
        scheduler.closing = len(chunks) == 2

    on_chunks(monkeypatch, slots, told)
    scheduler.step()
    assert chunks == [16, 16]
    scheduler.end_all("cancelled")
    assert request.end == "cancelled"


@pytest.mark.parametrize("part", ["prefill", "seat"])
def test_a_request_that_fails_fails_alone(part, monkeypatch):
    slots = slots_with("self", "streaming", num_slots=2)
    requests = [
        Request(p, Params(n, ENDLESS))
        for p, n in zip(random_prompts(LENGTHS), GENERATE, strict=True)
    ]
    guilty = requests[3]
    works = getattr(slots, part)

    def fail_once(*arguments):
        monkeypatch.setattr(slots, part, works)
        works(*arguments)  # or half of it: what is left in the slot is nobody's
        raise TOO_LARGE

    monkeypatch.setattr(slots, part, fail_once)
    scheduler = submitted(slots, [guilty])
    scheduler.step()
    assert bool(slots.state.finished_B.all())
    serve(scheduler, [request for request in requests if request is not guilty], 1)
    assert (guilty.end, guilty.tokens) == ("failed", [])
    assert guilty.error is TOO_LARGE
    assert [r.tokens for r in requests if r is not guilty] == [
        e for e in expected() if e is not expected()[3]
    ]


def test_a_failure_ends_slots_that_other_processes_share(monkeypatch):
    slots = slots_with("self", "streaming")
    monkeypatch.setattr(slots, "is_shared", True, raising=False)
    monkeypatch.setattr(slots, "prefill", Mock(side_effect=TOO_LARGE))
    with pytest.raises(OverflowError, match="too large"):
        submitted(slots, endless([3], 2)).step()


def test_a_failure_between_chunks_is_not_blamed_on_the_prompt(monkeypatch):
    slots = slots_with("self", "streaming", num_slots=2)
    scheduler = submitted(slots, endless([20, 60], 20))
    scheduler.step()
    (other,) = scheduler.waiting
    monkeypatch.setattr(slots, "step", Mock(side_effect=TOO_LARGE))
    with pytest.raises(OverflowError, match="too large"):
        scheduler.step()
    assert list(scheduler.waiting) == [other]
    assert other.end is None  # the engine, which sees the error, ends them all


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_p=0.9)])
def test_a_request_whose_logits_are_not_finite_fails_alone(sampling):
    """It fails in its prefill or in a round; the next request in its slot is served as usual."""
    prompts = random_prompts([30, 20, 30, 20])
    expected = [alone(prompt, 12) for prompt in prompts]
    strange = min(set(range(VOCAB)).difference(*expected, *prompts))
    target = noisy_copy(TARGET, 0.0)
    target.embed.weight.data[strange] = float("nan")
    slots = slots_with("self", "streaming", 1, target)
    bad = Request([*prompts[0], strange], Params(12, sampling))
    requests = [Request(prompt, Params(12, ENDLESS)) for prompt in prompts]
    scheduler = Scheduler(slots)
    for request in (requests[0], bad, requests[1]):
        serve(scheduler, [request], 0)
    scheduler.submit(requests[2])
    scheduler.step()
    slots.state.tokens_BS[0, slots.state.num_tokens_B[0] - 1] = strange  # as if it had written that
    while not scheduler.idle:
        scheduler.step()
    serve(scheduler, [requests[3]], 0)
    assert [request.end for request in (bad, requests[2])] == ["failed", "failed"]
    assert all("NaN or infinite" in str(request.error) for request in (bad, requests[2]))
    served = [0, 1, 3]
    assert [requests[i].tokens for i in served] == [expected[i] for i in served]


def test_a_request_whose_logits_are_not_finite_fails_next_to_a_sampled_one():
    """Top-p cuts all rows together. The neighbour gets what it would get alone."""
    prompts = random_prompts([30, 20])
    params = Params(12, Sampling(1.0, top_p=0.9, seed=5, ignore_eos=True))
    apart, sampled = (Request(prompts[0], params) for _ in range(2))
    serve(Scheduler(slots_with("self", "streaming", 1)), [apart], 0)
    slots, bad = slots_with("self", "streaming", 2), Request(prompts[1], Params(12, ENDLESS))
    scheduler = submitted(slots, [sampled, bad])
    while scheduler.waiting:
        scheduler.step()
    slot = next(slot for slot, request in scheduler.running.items() if request is bad)
    slots.batch.decoder.cache.v_LBKSD[:, slot, :, 0] = float("nan")
    while not scheduler.idle:
        scheduler.step()
    assert (sampled.end, bad.end) == ("length", "failed")
    assert "NaN or infinite" in str(bad.error)
    assert sampled.tokens == apart.tokens


@pytest.mark.parametrize(
    ("prompt", "params", "said"),
    [
        ([], {}, "the prompt is empty"),
        (
            [1] * 90,
            {"max_tokens": 12},
            "90 prompt tokens and max_tokens=12 exceed the limit of 101 tokens",
        ),
        ([61], {}, "outside of the vocabulary of 61"),
        ([1], {"gamma": 5}, "gamma=5: must be at most 4"),
        ([1], {"max_tokens": 0}, "max_tokens=0: must be at least 1"),
        ([1], {"sampling": Sampling(temperature=-1.0)}, "temperature=-1.0: must be 0"),
        ([1], {"sampling": Sampling(temperature=float("nan"))}, "temperature=nan: must be 0"),
        ([1], {"sampling": Sampling(top_p=0.0)}, "top_p=0.0: must be from 1e-30 to 1"),
        ([1], {"sampling": Sampling(top_p=1e-300)}, "top_p=1e-300: must be from 1e-30 to 1"),
        (
            [1],
            {"sampling": Sampling(top_k=1 << 63)},
            "top_k=9223372036854775808: must be at least 1 and below",
        ),
        (
            [1],
            {"sampling": Sampling(seed=1 << 63)},
            "seed=9223372036854775808: must be at least 0 and below",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(prompt, params, said):
    with pytest.raises(UserError, match=said):
        Scheduler(slots_with("self", "streaming")).submit(Request(prompt, Params(**params)))
