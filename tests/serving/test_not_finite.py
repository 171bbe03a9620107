"""A request whose numbers are not finite fails alone: what it leaves in the caches reaches no other
request.
"""

from dataclasses import replace

import pytest
import torch

from magicdec.attention.sdpa import SdpaAttention
from magicdec.config.registry import DRAFTS
from magicdec.errors import NonFinite
from magicdec.serving.request import Params, Request
from magicdec.serving.scheduler import Scheduler
from magicdec.serving.slots import Slots
from tests.serving.test_lossless import ENDLESS, TARGET, alone, slots_with
from tests.small import VOCAB, noisy_copy, random_prompts, small_drafter

LONG, SHORT = 60, [33, 10, 12]  # a long neighbour makes attention read behind the shorter rows
PROMPTS = random_prompts([LONG, *SHORT])
COUNTS = [25, 20, 5, 5]
EXPECTED = [alone(prompt, count) for prompt, count in zip(PROMPTS, COUNTS, strict=True)]
STRANGE = min(set(range(VOCAB)).difference(*EXPECTED, *PROMPTS))


class WholeCapacity(SdpaAttention):
    """The reference as on a GPU, where it reads all slots of every row."""

    def plan(self, seqlens_B, shape, window, positions_BKS=None):
        lengths_B = torch.cat((seqlens_B, seqlens_B.new_tensor([shape.capacity])))
        plan = super().plan(lengths_B, shape, window, positions_BKS)
        if plan.mask is None:  # all rows are full
            return super().plan(seqlens_B, shape, window, positions_BKS)
        return replace(plan, mask=plan.mask[:-1], seqlens_B=seqlens_B)


BACKENDS = {"up to the longest row": SdpaAttention, "the whole capacity": WholeCapacity}
WAYS = [
    ("self", "full"),
    ("self", "streaming"),
    ("self", "h2o"),
    ("self", "quest"),
    ("self", "verify_guided"),
    ("model", "full"),
    ("model", "quest"),
    ("model", "snapkv"),
    ("eagle3", "full"),
    ("hierarchical", "full"),
    ("suffix", "full"),
]
EVERYWHERE = pytest.mark.parametrize("attention", BACKENDS.values(), ids=BACKENDS)


def poisoned(model):
    """Let a model compute NaN for one token, which it never writes."""
    model.embed.weight.data[STRANGE] = float("nan")
    model.head.weight.data[STRANGE] = 0.0
    return model


def slots_of(draft: str, policy: str, attention) -> Slots:
    """Two slots on models that compute NaN for one token."""
    target = poisoned(noisy_copy(TARGET, 0.0))
    target.attention = attention()
    model = small_drafter(draft, TARGET, 0.05)
    if DRAFTS[draft].facts.needs_model:
        model.attention = target.attention
        if not DRAFTS[draft].facts.listens:
            poisoned(model)
    return slots_with(draft, policy, 2, target, draft_model=model, history=0)


def requests_with(index: int | None) -> list[Request]:
    """The requests, one of them with the strange token in the middle of its prompt."""
    prompts = [list(prompt) for prompt in PROMPTS]
    if index is not None:
        prompts[index][len(prompts[index]) // 2] = STRANGE
    return [
        Request(prompt, Params(count, ENDLESS))
        for prompt, count in zip(prompts, COUNTS, strict=True)
    ]


def check_that_one_failed(requests: list[Request], index: int) -> None:
    failed = requests[index]
    assert failed.end == "failed"
    assert isinstance(failed.error, NonFinite)
    others = [i for i in range(len(requests)) if i != index]
    assert [requests[i].end for i in others] == ["length"] * len(others)
    assert [requests[i].tokens for i in others] == [EXPECTED[i] for i in others]


def finish(scheduler: Scheduler) -> None:
    while not scheduler.idle:
        scheduler.step()


@EVERYWHERE
@pytest.mark.parametrize(("draft", "policy"), WAYS)
def test_a_prefill_that_is_not_finite_fails_alone(draft, policy, attention):
    slots = slots_of(draft, policy, attention)
    scheduler, requests = Scheduler(slots), requests_with(1)
    for request in requests:
        scheduler.submit(request)
    finish(scheduler)
    check_that_one_failed(requests, 1)


@EVERYWHERE
@pytest.mark.parametrize(("draft", "policy"), WAYS)
def test_a_round_that_is_not_finite_fails_alone(draft, policy, attention):
    slots = slots_of(draft, policy, attention)
    scheduler, requests = Scheduler(slots), requests_with(None)
    for request in requests[:2]:
        scheduler.submit(request)
    scheduler.step()
    scheduler.step()
    slot = next(slot for slot, request in scheduler.running.items() if request is requests[1])
    # As if the target had written it.
    slots.state.tokens_BS[slot, slots.state.num_tokens_B[slot] - 1] = STRANGE
    for request in requests[2:]:
        scheduler.submit(request)
    finish(scheduler)
    check_that_one_failed(requests, 1)


@EVERYWHERE
def test_a_request_that_leaves_in_its_prefill_spoils_no_other(attention):
    slots = slots_of("self", "streaming", attention)
    scheduler, requests = Scheduler(slots), requests_with(1)
    requests[1].prompt[0] = STRANGE
    prefill = slots.prefill

    def leave():
        requests[1].cancelled = True

    def cancelling(prompt, *arguments):
        *others, progress = arguments
        if prompt is not requests[1].prompt:
            return prefill(prompt, *arguments)
        return prefill(prompt, *others, lambda count: (leave(), progress(count)))

    slots.prefill = cancelling
    for request in requests:
        scheduler.submit(request)
    finish(scheduler)
    assert requests[1].end == "cancelled"
    others = [0, 2, 3]
    assert [requests[i].tokens for i in others] == [EXPECTED[i] for i in others]


def test_a_row_is_copied_up_to_its_valid_entries_and_zeros_are_behind():
    slots = slots_with("none", "full", 2)
    batch, single = slots.batch.decoder.cache, slots.single.decoder.cache
    for cache in (batch, single):
        cache.k_LBKSD.fill_(float("nan"))
        cache.v_LBKSD.fill_(float("nan"))
    single.k_LBKSD[:, :, :, :3], single.v_LBKSD[:, :, :, :3] = 5.0, 7.0
    single.seqlens_B.fill_(3)
    batch.copy_row(1, single)
    for entries, value in ((batch.k_LBKSD, 5.0), (batch.v_LBKSD, 7.0)):
        assert (entries[:, 1, :, :3] == value).all()
        assert (entries[:, 1, :, 3:] == 0).all()
        assert entries[:, 0].isnan().all()
