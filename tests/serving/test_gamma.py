"""draft.gamma=auto while serving: the choice against the best fixed gamma, and lossless whatever is
chosen.
"""

import random

import pytest

from magicdec.config.omega import omega
from magicdec.serving.gamma import Chooser
from magicdec.serving.request import Params, Request
from magicdec.serving.scheduler import Scheduler
from tests.serving.test_lossless import (
    CROSS,
    ENDLESS,
    GENERATE,
    LENGTHS,
    TARGET,
    expected,
    serve,
    slots_with,
)
from tests.small import random_prompts

GAMMAS = (0, 1, 2, 3, 5, 8)


def scheduler_of(draft: str, policy: str, seed: float, **settings) -> Scheduler:
    """A scheduler whose rounds have any gamma."""
    scheduler = Scheduler(slots_with(draft, policy, gamma="auto", **settings))
    generator = random.Random(seed)
    scheduler._chooser.choose = lambda rows: generator.choice(scheduler.slots.gammas)
    return scheduler


@pytest.mark.parametrize(("draft", "policy"), CROSS)
def test_any_gammas_give_the_tokens_of_each_request_alone(draft, policy):
    scheduler = scheduler_of(draft, policy, 1)
    assert scheduler.slots.gammas == (GAMMAS[1:] if draft == "hierarchical" else GAMMAS)
    requests = [
        Request(p, Params(count, ENDLESS))
        for p, count in zip(random_prompts(LENGTHS), GENERATE, strict=True)
    ]
    serve(scheduler, requests, 2)
    assert [request.tokens for request in requests] == expected()


@pytest.mark.parametrize("draft", ["self", "model"])
def test_a_draft_that_is_always_right_stays_so_after_pauses(draft):
    scheduler = scheduler_of(draft, "full", 3, draft_model=TARGET if draft == "model" else None)
    requests = [Request(p, Params(30, ENDLESS)) for p in random_prompts([20, 31, 12, 44])]
    serve(scheduler, requests, 4)
    rounds = [pair for request in requests for pair in request.rounds]
    assert len(rounds) > 10
    assert all(proposed == accepted for proposed, accepted in rounds)


def test_a_time_is_learned_for_the_rows_that_took_part(monkeypatch):
    """Where the host reads a round late, a request that has ended is still a tenant of the next
    one, and rests.
    """
    scheduler, learned = scheduler_of("self", "full", 5, num_slots=2), []
    scheduler._lag = 1
    monkeypatch.setattr(
        scheduler._chooser, "learn", lambda gamma, seconds, accepted: learned.append(len(accepted))
    )
    prompts = random_prompts([20, 31])
    requests = [
        Request(p, Params(count, ENDLESS)) for p, count in zip(prompts, [24, 60], strict=True)
    ]
    monkeypatch.setattr(Request, "count_round", lambda request, *_: took_part.append(request))
    took_part: list[Request] = []
    serve(scheduler, requests, 0)
    assert 2 in learned
    assert sum(learned) == len(took_part)


class Machine:
    """Rounds that take `fixed` and a share of each row, by parts: in units of an autoregressive
    step of one row.
    """

    def __init__(self, alpha: float, draft: float, row: float, seed: int = 0):
        self.alpha, self.draft, self.row, self.random = alpha, draft, row, random.Random(seed)

    def seconds(self, rows: int, gamma: int) -> float:
        """Verification grows with rows and gamma, a draft step with rows."""
        return (
            1 + self.row * rows * (1 + 0.5 * gamma) + gamma * (self.draft + 0.2 * self.row * rows)
        )

    def round(self, rows: int, gamma: int) -> tuple[float, list[int]]:
        accepted = []
        for _ in range(rows):
            count = 0
            while count < gamma and self.random.random() < self.alpha:
                count += 1
            accepted.append(count)
        return self.seconds(rows, gamma) * self.random.uniform(0.97, 1.03), accepted

    def best(self, rows: int) -> float:
        return min(self.seconds(rows, gamma) / omega(gamma, self.alpha) for gamma in GAMMAS)


@pytest.mark.parametrize("alpha", [0.2, 0.5, 0.7, 0.9])
@pytest.mark.parametrize(("draft", "row"), [(0.1, 0.02), (0.4, 0.02), (0.1, 0.3), (0.7, 0.1)])
@pytest.mark.parametrize("rows", [1, 8, 32])
def test_it_costs_little_more_than_the_best_gamma(alpha, draft, row, rows):
    """Trials included, and from the first round on."""
    machine, chooser, taken, tokens = Machine(alpha, draft, row), Chooser(GAMMAS), 0.0, 0.0
    for _ in range(2000):
        gamma = chooser.choose(rows)
        chooser.learn(gamma, *machine.round(rows, gamma))
        taken, tokens = taken + machine.seconds(rows, gamma), tokens + omega(gamma, alpha)
    assert taken / tokens < 1.05 * machine.best(rows)


def test_it_follows_the_number_of_rows():
    """Speculation pays for few rows only, and they come and go."""
    machine, chooser = Machine(0.55, 0.1, 1.0), Chooser(GAMMAS)
    chosen: dict[int, list[int]] = {1: [], 32: []}
    for number in range(3000):
        rows = 1 if number // 100 % 2 else 32
        gamma = chooser.choose(rows)
        chooser.learn(gamma, *machine.round(rows, gamma))
        chosen[rows].append(gamma)
    assert machine.best(32) == machine.seconds(32, 0)
    assert sum(gamma == 0 for gamma in chosen[32][-300:]) > 280
    assert sum(gamma > 0 for gamma in chosen[1][-300:]) > 280


def test_where_nothing_pays_is_found_soon():
    """Speculation doubles the speed of 32 rows, and halves that of a row that is left."""

    class Memory(Machine):
        def seconds(self, rows, gamma):
            return 10 + 0.5 * gamma if rows == 32 else 1 + 0.9 * gamma

    machine, chooser = Memory(0.7, 0, 0), Chooser(GAMMAS)
    for rows in [32] * 200 + [1] * 20:
        gamma = chooser.choose(rows)
        chooser.learn(gamma, *machine.round(rows, gamma))
    assert chooser.choose(1) == 0
