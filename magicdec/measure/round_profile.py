"""Time the parts of a round one by one: T_T, T_D, T_V, and what the round costs beyond their sum.

Headline numbers come from a loop of their own, without synchronisation. These come from a short
separate pass, in which the parts alternate, so that a machine that slows down slows all of them.
Every row takes part in every step, also where its text has ended: the times are those of the whole
batch.
"""

from collections.abc import Callable
from functools import partial
from math import ceil
from statistics import fmean, median

import torch

from magicdec.decoding.timers import seconds_of_all_rows
from magicdec.drafts.base import Draft
from magicdec.engine.decoder import Decoder
from magicdec.engine.graphs import Step
from magicdec.engine.native import Batch
from magicdec.measure.ceilings import seconds_of

WARMUP = 2
PLAIN_REPEATS = 3
# What is timed, and what undoes it, by name.
Parts = dict[str, tuple[Callable[[], object], Callable[[], None] | None]]


@torch.inference_mode()
def profile_round(batch: Batch, repeats: int, gamma: int = 0) -> dict[str, float]:
    """Return median milliseconds at the end of the prompts (names as in result.json, without the
    prefix `time/`).

    `gamma` is by default the draft's own. draft_ms is one draft step (a proposal over gamma),
    verify_ms the target's pass over gamma + 1 tokens with the acceptance. select_ms is one
    selection of entries by their attention, where the policy makes one: a part of the draft step,
    the round or the draft's prefill that makes it (docs/strategies.md). overhead_ms is what a whole
    round takes beyond gamma draft steps, a verification and its own selection. Where rounds of
    several kinds take turns, a round is their mean.
    """
    batch.restart()
    decoder, draft = batch.decoder, batch.draft
    plain: Parts = {"target_decode_ms": (decoder.decode_token, decoder.restart)}
    if draft is None:
        times = _alternate(decoder, plain, repeats, None)
        decoder.state.check_finite("in the profile")
        return times
    gamma = gamma or draft.gamma
    draft.prepare(decoder.state, gamma)
    parts = plain | _parts_of_round(decoder, draft, gamma)
    selection = draft.selection(decoder.state)
    if selection is not None and selection.at != "prefill":
        parts["select_ms"] = (selection.run, None)
    times = _alternate(decoder, parts, repeats, partial(draft.prepare, decoder.state, gamma))
    if selection is not None and selection.at == "prefill":
        # Once per sequence, without a graph: it may be thousands of passes.
        times["select_ms"] = 1e3 * median(
            seconds_of(selection.run, decoder.device, min(PLAIN_REPEATS, repeats))
        )
    by_phase = [times.pop(f"verify_{phase}") for phase in range(len(draft.phases))]
    times["verify_ms"] = fmean(by_phase, draft.phases)
    times["round_ms"] = _rounds_ms(batch, repeats, gamma)
    propose, selecting = times.pop("propose_ms"), 0.0
    if selection is not None and selection.at == "round":
        selecting = times["select_ms"] / sum(draft.phases)
    overhead = times["round_ms"] - propose - times["verify_ms"] - selecting
    decoder.state.check_finite("in the profile")
    return times | {"draft_ms": propose / gamma, "overhead_ms": overhead}


def _parts_of_round(decoder: Decoder, draft: Draft, gamma: int) -> Parts:
    """Return a proposal, and a verification for each kind of round. Each leaves the caches as they
    were.
    """
    proposal = draft.propose(decoder.state, gamma)
    none_B = torch.zeros_like(decoder.state.num_tokens_B)

    def verify(phase: int) -> None:
        watched = draft.watch(decoder.cache, phase)
        decoder.accept(proposal, decoder.verify(proposal, watched, draft.taps))

    def forget_proposal() -> None:
        draft.commit(none_B, gamma)

    def forget_verification() -> None:
        decoder.cache.commit(gamma + 1, none_B)

    decoder.verify(proposal, decoder.cache, draft.taps)
    forget_verification()
    forget_proposal()
    parts: Parts = {"propose_ms": (lambda: draft.propose(decoder.state, gamma), forget_proposal)}
    for phase in range(len(draft.phases)):
        parts[f"verify_{phase}"] = (partial(verify, phase), forget_verification)
    return parts


def _alternate(
    decoder: Decoder, parts: Parts, repeats: int, prepare: Callable[[], None] | None
) -> dict[str, float]:
    steps = {
        name: Step(run, decoder.captures, undo, prepare if name == "propose_ms" else None)
        for name, (run, undo) in parts.items()
    }
    samples: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(WARMUP + repeats):
        for name, (_, undo) in parts.items():
            samples[name].append(1e3 * seconds_of_all_rows(steps[name], decoder.state))
            if undo is not None:
                undo()
    return {name: median(values[WARMUP:]) for name, values in samples.items()}


def _rounds_ms(batch: Batch, repeats: int, gamma: int) -> float:
    """Time whole rounds of all rows, run as generation runs them: the mean over the kinds that take
    turns.
    """
    assert batch.draft is not None
    cycle = batch.decoder.cycle(batch.draft, gamma)
    batch.restart()
    turns = [
        cycle.timed(batch.decoder.state) for _ in range(WARMUP + ceil(repeats / len(cycle.phases)))
    ]
    return 1e3 * cycle.mean(map(median, zip(*turns[WARMUP:], strict=True)))
