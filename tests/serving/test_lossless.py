"""Served tokens equal those of the same request alone: any draft, policy, arrival order, gamma and
neighbours.
"""

import functools
import gc
import random
import weakref
from dataclasses import replace

import pytest
import torch

from magicdec.config.registry import DRAFTS, POLICIES
from magicdec.errors import UserError
from magicdec.measure.metrics import Rounds, acceptance, acceptance_metrics
from magicdec.models.transformer import Transformer
from magicdec.serving.request import Params, Request
from magicdec.serving.scheduler import Scheduler
from magicdec.serving.slots import Slots
from magicdec.verification.sampling import Sampling
from tests import small
from tests.small import (
    as_on_cpus,
    new_engine,
    noisy_copy,
    open_batch,
    random_prompts,
    small_drafter,
    small_model,
)

PAIRS = [pair for pair in small.PAIRS if DRAFTS[pair[0]].facts.serves]
CROSS = [pair for pair in small.CROSS if DRAFTS[pair[0]].facts.serves]
TARGET = as_on_cpus(small_model())
LENGTHS = [34, 3, 49, 16, 1, 33, 40]
ENDLESS = Sampling(ignore_eos=True)  # of requests that go on after an end of sequence
GENERATE = [7, 11, 1, 5, 9, 12, 3]
MAX_LEN = 101


def slots_with(draft: str, policy: str, num_slots: int = 3, target=TARGET, **settings) -> Slots:
    model = small_drafter(draft, target, 0.05)
    keys = {
        "gamma": 4,
        "budget": 16,
        "num_sink": 2,
        "page_size": 4,
        "refresh": 2,
        "prefill_chunk": 16,
    }
    keys |= {"draft_model": model} | settings
    return Slots(new_engine(target, draft_name=draft, policy=policy, **keys), num_slots, MAX_LEN)


def serve(scheduler: Scheduler, requests: list[Request], seed: float) -> None:
    """Requests arrive at random times, a few at once."""
    generator, left = random.Random(seed), list(requests)
    while left or not scheduler.idle:
        for _ in range(generator.choice([0, 0, 1, 3])):
            if left:
                scheduler.submit(left.pop())
        scheduler.step()


def alone(prompt: list[int], count: int, target=TARGET) -> list[int]:
    """The independent oracle: the offline decoder without a draft, on this prompt only."""
    batch = open_batch(target, [prompt], generate_len=max(2, count), ignore_eos=False)
    return batch.decoder.generate().tokens[0][:count]


@functools.cache
def expected() -> list[list[int]]:
    return [
        alone(prompt, count)
        for prompt, count in zip(random_prompts(LENGTHS), GENERATE, strict=True)
    ]


@pytest.mark.parametrize(("draft", "policy"), PAIRS)
def test_a_slot_that_is_given_back_reads_next_to_nothing(draft, policy):
    slots, (prompt,) = slots_with(draft, policy), random_prompts(LENGTHS[2:3])
    for slot in range(2):
        slots.prefill(prompt, Params(20), True, lambda _: None)
        slots.seat(slot)
    slots.step(slots.gamma)
    slots.release(0)
    drafts = [slots.batch.draft, getattr(slots.batch.draft, "inner", None)]
    caches = [slots.batch.decoder.cache, *(one.cache for one in drafts if hasattr(one, "cache"))]
    caches = [part for whole in caches for part in getattr(whole, "levels", [whole])]
    for cache in caches:
        assert cache.seqlens_B[0] == 0
        assert cache.seqlens_B[1] > 0
    with torch.inference_mode():
        slots.batch.draft.propose(slots.state, 4)
    assert all(cache.seqlens_B[0] < 16 for cache in caches)


@pytest.mark.parametrize(("draft", "policy"), [*PAIRS, ("none", "full")])
def test_any_arrival_order_gives_the_tokens_of_each_alone(draft, policy):
    generator = random.Random(f"{draft} {policy}")
    slots = slots_with(draft, policy) if draft != "none" else slots_with("none", "full", gamma=0)
    gammas = [None, 0, 1, 4] if draft != "none" else [None]
    params = [Params(count, ENDLESS, gamma=generator.choice(gammas)) for count in GENERATE]
    requests = [
        Request(prompt, p) for prompt, p in zip(random_prompts(LENGTHS), params, strict=True)
    ]
    serve(Scheduler(slots), generator.sample(requests, len(requests)), generator.random())
    assert [request.tokens for request in requests] == expected()
    assert {request.end for request in requests} == {"length"}
    assert all(
        accepted <= proposed for request in requests for proposed, accepted in request.rounds
    )


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("policy", ["streaming", "quest", "snapkv"])
def test_requests_served_on_a_gpu_get_the_tokens_of_each_alone(policy, graphs):
    target = small_model().cuda()
    slots = slots_with("self", policy, target=target, graphs=graphs)
    prompts = random_prompts(LENGTHS)
    requests = [
        Request(prompt, Params(count, ENDLESS))
        for prompt, count in zip(prompts, GENERATE, strict=True)
    ]
    serve(Scheduler(slots), requests[:], 1.0)
    assert [request.tokens for request in requests] == [
        alone(prompt, count, target) for prompt, count in zip(prompts, GENERATE, strict=True)
    ]


def damped(model: Transformer) -> Transformer:
    """A model whose layers add little to a token's embedding: what a small head can predict."""
    model = noisy_copy(model, 0.0)
    for layer in model.layers:
        for linear in (layer.output, layer.down):
            linear.weight.mul_(0.1)
    return model


@pytest.mark.parametrize(("draft", "policy"), CROSS)
def test_a_slot_drafts_what_the_request_alone_would(draft, policy):
    """The draft's state moves with the request: as many proposals are accepted as on a slot of its
    own.
    """
    target = damped(TARGET) if DRAFTS[draft].facts.listens else TARGET
    # Cycles of rounds, where they are longer, are of all rows together.
    settings = {"refresh": 1, "budget": 24, "target": target}
    if draft == "suffix":
        settings["history"] = 0  # or requests that have ended would propose, too
    prompts = random_prompts([30, 45, 27], seed=4)
    apart, together = (
        [Request(prompt, Params(8, ENDLESS)) for prompt in prompts] for _ in range(2)
    )
    for request in apart:
        serve(Scheduler(slots_with(draft, policy, 1, **settings)), [request], 0)
    serve(Scheduler(slots_with(draft, policy, 2, **settings)), together, 1)
    counts = [[request.rounds for request in requests] for requests in (apart, together)]
    assert counts[0] == counts[1]
    assert draft in ("ngram", "layer_skip") or any(
        accepted for rounds in counts[0] for _, accepted in rounds
    )


def test_acceptance_is_counted_as_offline():
    """Rows that stop at an end of sequence, at the limit, and at both: the same metrics for the
    same tokens.
    """
    prompts = random_prompts([30, 41, 52, 33, 28, 36, 45, 31])
    settings = {"policy": "streaming", "gamma": 4}
    plain = [alone(prompt, 24) for prompt in prompts]
    target = small_model(eos_token_ids=(plain[1][5],))
    settings |= {"draft_name": "self", "budget": 32, "num_sink": 2}
    batch = open_batch(target, prompts, ignore_eos=False, **settings)
    offline = batch.decoder.generate(batch.draft)
    requests = [Request(prompt, Params(24)) for prompt in prompts]
    serve(Scheduler(slots_with("self", "streaming", 2, target, budget=32)), requests, 1)
    assert [request.tokens for request in requests] == offline.tokens
    assert {request.end for request in requests} == {"stop", "length"}
    cut_RB = (offline.committed_RB != offline.accepted_RB + 1) & (offline.accepted_RB >= 0)
    ended_B = torch.tensor([request.end == "stop" for request in requests])
    assert cut_RB[:, ended_B].any()  # there is something to leave out,
    assert cut_RB[:, ~ended_B].any()  # and something to count
    assert acceptance(
        sum((request.rounds for request in requests), Rounds())
    ) == acceptance_metrics([offline])
    accepted = [sum(accepted for _, accepted in request.rounds.elements()) for request in requests]
    assert [request.stats.accepted for request in requests] == accepted


@pytest.mark.parametrize(
    ("draft", "policy", "trained"),
    [*(("self", p, 512) for p in POLICIES), ("model", "streaming", 64)],
)
def test_every_tensor_with_rows_changes_hands(draft, policy, trained):
    """The names of tensors say where rows are, so that no policy can forget one of its own. A draft
    that was trained for less than its slots hold keeps more of them.
    """
    window = {"sliding_window": 16, "sliding_layers": (1,)}
    model = small_model(max_position_embeddings=trained, **window)
    slots = slots_with(draft, policy, target=small_model(**window), draft_model=model)
    cache, single = slots.batch.draft.cache, slots.single.draft.cache
    assert cache.spec.in_cache_positions == (trained < MAX_LEN)
    cache.reselect(TARGET.attention)
    mine, theirs = dict(tensors(cache)), dict(tensors(single))
    assert set(mine) == set(theirs)
    for tensor in theirs.values():
        tensor.copy_(torch.ones_like(tensor))
    for tensor in mine.values():
        tensor.zero_()
    cache.copy_row(1, single)
    for name, tensor in mine.items():
        rows = tensor.movedim(name.rpartition("_")[2].index("B"), 0)
        copied = rows[1]
        if name.endswith(("k_LBKSD", "v_LBKSD")):  # one entry is valid
            copied, behind = copied[:, :, :1], copied[:, :, 1:]
            assert (behind == 0).all(), name
        assert (copied == 1).all(), name
        assert (rows[[0, 2]] == 0).all(), name


def tensors(node, prefix=""):
    """Tensors with a B in the legend of their name, of an object and of what it is made of."""
    for name, value in vars(node).items():
        if name.startswith("_"):
            continue
        if torch.is_tensor(value) and "B" in name.rpartition("_")[2]:
            yield f"{prefix}{name}", value
        for index, part in enumerate(value if isinstance(value, list) else [value]):
            if (
                type(part).__module__.startswith("magicdec.cache")
                and type(part).__name__ != "CacheSpec"
            ):
                yield from tensors(part, f"{prefix}{name}{index}.")


def test_closed_slots_hold_no_memory():
    gc.collect()
    gc.disable()  # counting references must suffice: the next level's slots are opened at once
    try:
        slots = slots_with("self", "streaming")
        slots.step(slots.gamma)
        cache = weakref.ref(slots.batch.decoder.cache)
        slots.close()
        assert cache() is None
    finally:
        gc.enable()


def test_sampling_depends_on_the_seed_of_a_request_alone():
    """Greedy and sampled requests share rounds; each gets what the offline decoder writes with its
    settings.
    """
    prompts = random_prompts([20, 31, 12, 44, 27])
    settings = [Sampling(), Sampling(1.0, seed=3), Sampling(0.7, top_k=5, seed=4)]
    settings += [Sampling(1.3, top_p=0.8, seed=4), Sampling()]
    pairs = list(zip(prompts, settings, strict=True))
    plain = [
        open_batch(TARGET, [p], generate_len=15, sampling=s).decoder.generate().tokens[0]
        for p, s in pairs
    ]
    slots, tokens = slots_with("model", "streaming", num_slots=2), []
    for seed, speculative in ((0, False), (1, True), (2, True)):
        requests = [Request(p, Params(15, replace(s, ignore_eos=True))) for p, s in pairs]
        serve(Scheduler(slots, speculative), random.Random(seed).sample(requests, 5), seed)
        tokens.append([request.tokens for request in requests])
    assert tokens[0] == plain
    assert tokens[1] == tokens[2]  # whatever the order
    assert [tokens[1][row] for row in (0, 4)] == [plain[0], plain[4]], "greedy"


def test_a_sampled_request_is_the_same_when_it_is_asked_again():
    """Suffix decoding reads the texts of earlier requests. One with the same random numbers would
    tell what they are going to be, and the sample would not have the target's distribution.
    """
    scheduler = Scheduler(slots_with("suffix", "full"))
    for seed in range(10):
        sampling = Sampling(1.0, top_k=5, seed=seed, ignore_eos=True)
        asked = [Request(prompt, Params(12, sampling)) for prompt in random_prompts([20]) * 2]
        for request in asked:
            serve(scheduler, [request], seed)
        assert asked[0].tokens == asked[1].tokens


def test_rounds_are_greedy_again_once_the_sampled_requests_have_gone():
    """Sorting the vocabulary for nobody would cost every round to come."""
    slots, (prompt,) = slots_with("self", "streaming"), random_prompts([20])
    for slot, sampling in enumerate(
        (Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0))
    ):
        slots.prefill(prompt, Params(20, replace(sampling, ignore_eos=True)), True, lambda _: None)
        slots.seat(slot)
    for slot, is_greedy in ((1, False), (2, True)):
        slots.release(slot)
        slots.step(slots.gamma)
        assert slots.sampling.greedy == is_greedy


def test_an_end_of_sequence_frees_the_slot():
    prompts = random_prompts([30, 41, 52])
    eos = alone(prompts[0], 24)[7]
    target = small_model(eos_token_ids=(eos,))
    requests = [Request(p, Params(24)) for p in prompts] + [
        Request(prompts[0], Params(24, ENDLESS))
    ]
    serve(Scheduler(slots_with("self", "full", 1, target=target)), list(requests), 0)
    assert [r.tokens for r in requests] == [
        *(alone(p, 24, target) for p in prompts),
        alone(prompts[0], 24),
    ]
    assert requests[0].end == "stop"
    assert requests[3].end == "length"


def test_a_draft_that_cannot_be_served_is_refused(monkeypatch):
    from magicdec.drafts.ngram import PromptLookup

    monkeypatch.setattr(PromptLookup, "serves", False)
    with pytest.raises(UserError, match=r"draft.name=ngram cannot be served; one of: none, "):
        slots_with("ngram", "full")
