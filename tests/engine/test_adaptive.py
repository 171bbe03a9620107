"""Adaptive gamma: the choice against the cost model's arithmetic, and lossless whatever is
chosen.
"""

import itertools
import random
from bisect import bisect_left

import pytest
import torch

from magicdec.cache.verify_guided import VerifyGuidedCache
from magicdec.config import choices
from magicdec.config.omega import omega
from magicdec.costmodel.speedup import speedup
from magicdec.decoding import timers
from magicdec.decoding.state import State
from magicdec.engine.adaptive import AdaptiveCycle, YieldEstimate
from magicdec.engine.native import warm_up
from magicdec.engine.output_audit import audit
from magicdec.measure import metrics
from tests.clock import count_slots
from tests.engine.test_graphs import CASES, TARGET
from tests.small import as_on_cpus, drafting, small_model

ON_CPUS = as_on_cpus(small_model())
GAMMAS = (1, 2, 3, 5, 8)
ROWS, ROUNDS = 8, 150


class Simulated:
    """Rounds of one gamma without a model: they count what a given alpha accepts."""

    def __init__(self, state: State, gamma: int, generator: torch.Generator):
        self.state, self.gamma, self.generator, self.alpha = state, gamma, generator, 1.0

    def __call__(self) -> None:
        holds = torch.rand(ROWS, max(self.gamma, 1), generator=self.generator) < self.alpha
        accepted_B = holds[:, : self.gamma].int().cumprod(1).sum(1, dtype=torch.int32)
        self.state.accepted_RB[self.state.round_1] = accepted_B
        self.state.round_1 += 1

    def restart(self) -> None:
        pass

    def timed(self, state: State) -> list[float]:
        return []


def simulated(
    monkeypatch, alpha: float, draft: float, verify: float, seed: int = 0
) -> AdaptiveCycle:
    """Return rounds of `draft` per draft step, `verify`, and 0.02 per proposal; an autoregressive
    step takes 1.
    """
    seconds = {0: 1.0} | {gamma: gamma * draft + verify + 0.02 * gamma for gamma in GAMMAS}
    monkeypatch.setattr(AdaptiveCycle, "_timed_rounds", lambda self: seconds)
    state = State([[1]] * ROWS, ROUNDS, 9, (), "cpu")
    cycles = {
        gamma: Simulated(state, gamma, torch.Generator().manual_seed(seed))
        for gamma in (0, *GAMMAS)
    }
    for cycle in cycles.values():
        cycle.alpha = alpha
    return AdaptiveCycle(cycles, state)


@pytest.mark.parametrize("alpha", [0.1, 0.4, 0.6, 0.8, 0.9, 0.98])
@pytest.mark.parametrize("draft", [0.01, 0.1, 0.3])
def test_it_ends_at_the_best_gamma_or_where_none_pays_and_learning_it_costs_little(
    monkeypatch, alpha, draft
):
    """It begins with a guess; 64 tokens a row take hardly longer than with the best gamma from the
    start.
    """
    adaptive = simulated(monkeypatch, alpha, draft, verify=1.1)
    for _ in range(ROUNDS):
        adaptive()
    speedups = {
        gamma: speedup(gamma, alpha, 1.0, draft, 1.1 + 0.02 * gamma) for gamma in GAMMAS
    } | {0: 1.0}
    last = adaptive.gammas[-1]
    reached, best = speedups[last], max(speedups.values())
    assert reached >= best * 0.93  # the margin, and an estimate from some forty rounds
    assert adaptive._estimate.tokens(last) == pytest.approx(omega(last, alpha), rel=0.1)
    tokens = list(itertools.accumulate(omega(gamma, alpha) for gamma in adaptive.gammas))
    rounds = bisect_left(tokens, 64) + 1
    seconds = sum(adaptive._seconds[gamma] for gamma in adaptive.gammas[:rounds])
    assert seconds / tokens[rounds - 1] < 1.05 / best


def test_it_follows_a_change_and_does_not_flutter(monkeypatch):
    adaptive = simulated(monkeypatch, 0.95, 0.1, verify=1.1)
    for number in range(ROUNDS):
        if number == 60:
            for cycle in adaptive._cycles.values():
                cycle.alpha = 0.55
        adaptive()
    settled, changed = adaptive.gammas[30:60], adaptive.gammas[-40:]
    assert min(settled) > max(changed)
    for part in (settled, changed):
        assert sum(a != b for a, b in itertools.pairwise(part)) <= 2


def test_a_hopeless_draft_is_given_up_soon_and_for_good(monkeypatch):
    adaptive = simulated(monkeypatch, 0.0, 0.3, verify=1.1)
    for _ in range(20):
        adaptive()
    assert 0 < sum(gamma > 0 for gamma in adaptive.gammas) <= 4
    assert adaptive.gammas[-1] == 0
    adaptive.restart()
    assert adaptive.gammas == []
    adaptive()
    assert adaptive.gammas[0] > 0


@pytest.mark.parametrize(("gain", "chosen"), [(0.02, 3), (0.04, 5)])
def test_another_gamma_must_be_better_by_a_margin(monkeypatch, gain, chosen):
    adaptive = simulated(monkeypatch, 0.8, 0.1, verify=1.1)
    adaptive._gamma = 3
    adaptive._seconds = {
        0: 9.0,
        3: adaptive._estimate.tokens(3),
        5: (1 - gain) * adaptive._estimate.tokens(5),
    }
    adaptive._choose()
    assert adaptive._gamma == chosen


@pytest.mark.parametrize(("judged", "chosen"), [(15.9, 3), (16.0, 0)])
def test_speculation_is_given_up_on_evidence_alone(monkeypatch, judged, chosen):
    adaptive = simulated(monkeypatch, 0.8, 0.1, verify=1.1)
    adaptive._gamma, adaptive._estimate.judged = 3, judged
    adaptive._estimate._tried.update(dict.fromkeys((1, 2, 3), 100.0))
    adaptive._seconds = {0: 1.0, 3: 2.0}
    adaptive._choose()
    assert adaptive._gamma == chosen


@pytest.mark.parametrize("alpha", [0.3, 0.7, 0.95])
def test_tokens_of_a_round_are_those_of_equal_rows(alpha):
    """Also of gammas that were not tried."""
    estimate, generator = YieldEstimate(), random.Random(0)
    for _ in range(400):
        estimate.learn(
            3, [next((i for i in range(3) if generator.random() > alpha), 3) for _ in range(8)]
        )
    for gamma in (1, 3, 5):
        assert estimate.tokens(gamma) == pytest.approx(omega(gamma, alpha), rel=0.1)


def test_tokens_of_a_round_where_rows_differ():
    """Half of the rows accept everything, the others nothing: alpha is 5/6, of which omega would
    make 4.0 tokens.
    """
    estimate = YieldEstimate()
    for _ in range(200):
        estimate.learn(5, [5, 5, 0, 0])
    assert estimate.tokens(5) == pytest.approx(3.5, abs=0.25)


# Of rows: their prompts, and tokens until they end.
LENGTHS, ENDS = [100, 130, 110, 120], [2, 40, 5, 40]


@pytest.mark.parametrize("generate_len", [4, 40])
@pytest.mark.parametrize(
    ("draft", "policy"), [("self", "streaming"), ("self", "full"), ("model", "streaming")]
)
def test_timed_rounds_are_those_of_all_rows(draft, policy, generate_len, monkeypatch):
    """A bound: each takes what the first round of decoding takes, or more by the growth of a
    context at most.

    Most rows end while gammas are timed. Time is what is read.
    """
    count_slots(monkeypatch)
    keys = {"policy": policy, "budget": 16, "num_sink": 2, "generate_len": generate_len}
    batch = drafting(draft, TARGET, LENGTHS, gamma="auto", **keys)
    decoder, state = batch.decoder, batch.decoder.state
    state.limit_B.copy_(state.prompt_len_B + torch.tensor(ENDS).clamp(max=generate_len))
    warm_up(batch)
    adaptive = decoder.cycle_for(batch.draft)
    assert set(adaptive._seconds) == {0, *choices.AUTO_GAMMAS}
    state.limit_B.copy_(state.prompt_len_B + 2)  # of the decoding, which ends with its first round
    for gamma, seconds in adaptive._seconds.items():
        decoded = decoder.generate(batch.draft, gamma=gamma) if gamma else decoder.generate()
        truth = metrics.round_history(decoded)[0]
        assert truth["rows"] == len(LENGTHS)
        assert 1 <= seconds / truth["seconds"] <= 1 + generate_len / min(LENGTHS)


def test_rounds_of_every_kind_are_timed(monkeypatch):
    """A choice that takes a second by a clock of its own, in one round of three: a third of it, for
    each gamma.
    """
    late, refresh = [0.0], VerifyGuidedCache._refresh
    monkeypatch.setattr(timers.time, "perf_counter", lambda: late[0])

    def slow(*arguments):
        late[0] += 1.0
        refresh(*arguments)

    monkeypatch.setattr(VerifyGuidedCache, "_refresh", slow)
    keys = {"policy": "verify_guided", "budget": 16, "refresh": 3, "generate_len": 20}
    batch = drafting("self", TARGET, [40, 50], gamma="auto", **keys)
    warm_up(batch)
    seconds = batch.decoder.cycle_for(batch.draft)._seconds
    assert seconds == pytest.approx({0: 0.0} | dict.fromkeys(choices.AUTO_GAMMAS, 1 / 3))


class Scripted(AdaptiveCycle):
    """Every gamma in turn, and in the end none."""

    def _choose(self) -> None:
        order = [1, 5, 2, 5, 1, 2]
        self._gamma = order[len(self.gammas) % 6] if len(self.gammas) < 8 else 0


@pytest.mark.parametrize(("draft", "policy"), CASES)
def test_every_change_of_gamma_is_lossless(draft, policy, monkeypatch):
    monkeypatch.setattr("magicdec.engine.adaptive.AdaptiveCycle", Scripted)
    monkeypatch.setattr(choices, "AUTO_GAMMAS", (1, 2, 5))
    settings = {"budget": 16, "num_sink": 2, "page_size": 4, "refresh": 2, "generate_len": 48}
    batch = drafting(draft, ON_CPUS, [50, 61, 70], gamma="auto", policy=policy, **settings)
    warm_up(batch)
    plain, fast = batch.decoder.generate(), batch.decoder.generate(batch.draft)
    assert audit(batch.decoder, plain.tokens, fast.tokens).passed
    assert fast.gammas[:8] == [1, 5, 2, 5, 1, 2, 1, 5]
    assert set(fast.gammas[8:]) <= {0}
    assert len(fast.gammas) == len(fast.accepted_RB)


def test_acceptance_counts_what_was_proposed(monkeypatch):
    """A draft that is the target accepts all, at any gamma; alpha is 1 and the length a mean over
    the rounds.
    """
    monkeypatch.setattr(choices, "AUTO_GAMMAS", (1, 2, 5))
    batch = drafting("self", TARGET, [40, 50], gamma="auto", policy="full", generate_len=40)
    generation = batch.decoder.generate(batch.draft)
    result = metrics.acceptance_metrics([generation])
    speculative = [gamma for gamma in generation.gammas if gamma]
    assert result["acceptance_rate"] == 1.0
    assert result["alpha"] == 1.0
    assert 2 <= result["acceptance_length"] <= 6
    assert metrics.usual_gamma([generation]) in speculative
    assert [row["gamma"] for row in metrics.round_history(generation)] == generation.gammas
