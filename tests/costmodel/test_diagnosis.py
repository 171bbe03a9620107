"""The diagnosis finds what is wrong with steps whose cause is known in closed form."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from magicdec.config.omega import omega
from magicdec.costmodel.bounded_fit import fit_bounded
from magicdec.costmodel.diagnosis import (
    ACCEPTANCE,
    DRAFTING,
    PAYS,
    SCHEDULING,
    UNKNOWN,
    VERIFICATION,
    diagnose,
)
from magicdec.costmodel.step_fit import CellSteps, Limit
from magicdec.errors import UserError

OVERHEAD, SLOW, TOKENS = 1e-3, 1.4, 100
GRID = list(product((1, 8), (1024, 8192, 31000), (2, 4, 8)))


def cell(
    batch: int, context: int, gamma: int, alpha: float = 0.8, overhead_s: float = OVERHEAD
) -> CellSteps:
    """A healthy engine's cell: weights of 4 ms, a cache of 0.1 us a token, a draft of 0.4 ms."""
    entries = Limit(1e-7 * batch * context, 1e-9 * batch * context)
    target = Limit(4e-3 + entries.bytes_s, 2e-5 * batch + entries.flops_s)
    verify = Limit(target.bytes_s, (gamma + 1) * target.flops_s)
    draft = Limit(4e-4, 2e-6 * batch)
    step_s, verify_s, draft_s = (
        depth * overhead_s + SLOW * limit.bytes_s + limit.flops_s
        for depth, limit in ((1, target), (1, verify), (0.25, draft))
    )
    length = omega(gamma, alpha)
    return CellSteps(
        batch,
        context,
        gamma,
        step_s,
        verify_s + gamma * draft_s,
        length,
        target,
        verify,
        entries,
        verify_s,
        draft,
        0.25,
        length,
    )


HEALTHY = [cell(*point) for point in GRID]


def slower(cells: list[CellSteps], verify=None, draft=None) -> list[CellSteps]:
    """Cells whose verifications and drafts take longer by what these functions of a cell return."""
    found = []
    for one in cells:
        more, drafts = (seconds(one) if seconds else 0.0 for seconds in (verify, draft))
        assert one.verify_s is not None
        found.append(
            replace(one, verify_s=one.verify_s + more, round_s=one.round_s + more + drafts)
        )
    return found


FAULTS = {
    VERIFICATION: lambda cells: slower(cells, lambda c: 0.9 * c.gamma * SLOW * c.entries.bytes_s),
    DRAFTING: lambda cells: slower(cells, draft=lambda c: 2 * c.gamma * c.draft_s),
    SCHEDULING: lambda cells: slower(cells, lambda c: 5e-3),
    ACCEPTANCE: lambda cells: [replace(c, length=omega(c.gamma, 0.4)) for c in cells],
}


def test_a_healthy_engine_pays():
    found = diagnose(HEALTHY, TOKENS)
    assert (found.cause, found.named) == (PAYS, ())
    assert found.engine.overhead_s == pytest.approx(OVERHEAD)
    assert found.engine.of_bytes == pytest.approx(SLOW)
    assert found.engine.residual < 1e-6
    assert len(found.paying) == len(HEALTHY)
    assert found.sentence.startswith("pays in 18 of 18 cells")
    assert max(loss.share for loss in found.losses) < 1e-6


@pytest.mark.parametrize("cause", FAULTS)
def test_each_fault_is_named_alone_and_its_repair_is_worth_what_it_costs(cause):
    found = diagnose(FAULTS[cause](HEALTHY), TOKENS)
    assert (found.cause, found.named) == (cause, (cause,))
    loss = found.losses[0]
    place = [(c.batch, c.context, c.gamma) for c in found.cells].index(
        (loss.cell.batch, loss.cell.context, loss.cell.gamma)
    )
    healthy = HEALTHY[place]
    assert loss.speedup == pytest.approx(healthy.speedup, rel=0.02)
    gain = healthy.requests_per_second(TOKENS) - loss.cell.requests_per_second(TOKENS)
    assert loss.gain_rps == pytest.approx(gain, rel=0.05)


@pytest.mark.parametrize("both", [(VERIFICATION, DRAFTING), (SCHEDULING, ACCEPTANCE)])
def test_two_faults_at_once_are_both_named(both):
    cells = FAULTS[both[1]](FAULTS[both[0]](HEALTHY))
    assert set(diagnose(cells, TOKENS).named) == set(both)


def test_acceptance_that_speculation_needs_is_named_where_nothing_is_wrong():
    """It is what was expected, and too low for this gamma."""
    cells = [cell(*point, alpha=0.2) for point in product((1, 8), (1024, 8192), (8,))]
    found = diagnose(cells, TOKENS)
    assert (found.cause, found.named, found.paying) == (ACCEPTANCE, (), ())
    best = max(cells, key=lambda one: one.speedup)
    assert f"needs {best.round_s / best.target_s:.2f}" in found.sentence


def test_a_loss_that_no_cause_explains_has_no_reason():
    """Without T_V, what a round loses cannot be told apart."""
    cells = [replace(c, round_s=1.5 * c.round_s, verify_s=None) for c in HEALTHY]
    found = diagnose(cells, TOKENS)
    assert (found.cause, found.named) == (UNKNOWN, ())
    assert "33% less than predicted, reason unknown (T_V and T_D cannot" in found.sentence


def test_few_cells_cannot_tell_verification_from_scheduling():
    """A fit of a few cells explains anything."""
    for cause in (VERIFICATION, SCHEDULING):
        found = diagnose(FAULTS[cause](HEALTHY)[:4], TOKENS)
        assert found.named == ()
        assert found.cause in (UNKNOWN, PAYS, ACCEPTANCE)
    cells = FAULTS[SCHEDULING](HEALTHY)[:4]
    assert "at least 8 cells can tell it" in diagnose(cells, TOKENS).sentence


@pytest.mark.parametrize("overhead_s", [1e-3, 2e-3, 4e-3, 8e-3, 16e-3])
def test_one_batch_and_context_cannot_tell_a_slow_draft_from_overhead(overhead_s):
    """Of T_T, the draft has a quarter of the overhead and a tenth of the bytes, and steps that
    read the same bytes fit any split of T_T into the two.
    """
    perfect = [cell(8, 8192, gamma, overhead_s=overhead_s) for gamma in (1, 2, 4, 8)]
    assert DRAFTING not in diagnose(perfect, TOKENS).named
    assert diagnose(FAULTS[DRAFTING](perfect), TOKENS).named == ()


def test_what_could_tell_a_slow_draft_is_said():
    perfect = [cell(8, 8192, gamma, overhead_s=16e-3) for gamma in (1, 2, 4, 8)]
    found = diagnose(FAULTS[DRAFTING](perfect), TOKENS)
    assert found.cause == UNKNOWN
    assert "8 cells can tell it, of more different batches and contexts)" in found.sentence


def test_a_fifth_more_bytes_tells_a_slow_draft_from_overhead():
    """Reading 8 x 16,384 entries takes 4 ms + 13.1 ms, and 8 x 21,000 of them 4 ms + 16.8 ms."""
    grid = [(8, context, gamma) for context in (16384, 21000) for gamma in (2, 4)]
    for overhead_s in (1e-3, 16e-3):
        perfect = [cell(*point, overhead_s=overhead_s) for point in grid]
        assert DRAFTING not in diagnose(perfect, TOKENS).named
        found = diagnose(slower(perfect, draft=lambda c: 8 * c.gamma * c.draft_s), TOKENS)
        assert found.cause == DRAFTING


def test_a_slow_lookup_is_named_with_one_batch_and_context():
    """It should take no time, whatever the overhead of a pass."""
    cells = [cell(8, 8192, gamma) for gamma in (2, 4)]
    free = [
        replace(c, round_s=c.verify_s, draft_limit=Limit(0.0, 0.0), draft_depth=0.0) for c in cells
    ]
    assert diagnose(slower(free, draft=lambda c: c.gamma * 4e-3), TOKENS).cause == DRAFTING


def test_an_overhead_that_was_timed_is_scheduling_and_not_drafting():
    """Of a lookup that takes no time. It needs no fit, so that two cells are enough."""
    cells = []
    for one in (cell(8, 8192, 2), cell(8, 8192, 4)):
        lookup = replace(one, round_s=one.verify_s + 9e-3, draft_limit=Limit(0.0, 0.0))
        cells.append(replace(lookup, overhead_s=9e-3))
    assert [one.draft_s for one in cells] == pytest.approx([0.0, 0.0])
    found = diagnose(cells, TOKENS)
    assert (found.cause, found.named) == (SCHEDULING, (SCHEDULING,))
    assert "each round waits 9.0 ms" in found.sentence
    assert found.losses[0].share == pytest.approx(9e-3 / min(one.round_s for one in cells))


def test_an_overhead_of_noise_below_nothing_is_no_loss():
    cells = [replace(c, overhead_s=-1e-4, round_s=c.round_s - 1e-4) for c in HEALTHY]
    found = diagnose(cells, TOKENS)
    assert found.named == ()
    assert min(loss.share for loss in found.losses) == 0.0


def test_rounds_that_wait_under_load_are_scheduling():
    cells = [replace(c, wait_s=c.round_s) for c in HEALTHY]
    found = diagnose(cells, TOKENS)
    assert found.cause == SCHEDULING
    assert found.losses[0].share == pytest.approx(0.5)


def test_a_slow_kernel_of_many_flops_is_not_taken_for_reading_again():
    """Where FLOPs take as long as reading, an engine that is slow at them is no fault."""
    flops = [replace(c, entries=Limit(c.entries.bytes_s, c.entries.bytes_s / 3)) for c in HEALTHY]
    cells = slower(flops, lambda c: 0.9 * c.gamma * c.entries.bytes_s)
    assert VERIFICATION not in diagnose(cells, TOKENS).named


def test_without_a_round_there_is_nothing_to_diagnose():
    with pytest.raises(UserError, match="nothing to diagnose"):
        diagnose([], TOKENS)


def test_the_bounded_fit_is_that_of_scipy():
    optimize = pytest.importorskip("scipy.optimize")
    random = np.random.default_rng(0)
    most = (np.inf, np.inf, 0.5)
    for _ in range(20):
        matrix, values = random.random((9, 3)), random.random(9) + 0.5
        found, _ = fit_bounded(matrix, values, most)
        scaled = matrix / values[:, None]
        expected = optimize.lsq_linear(scaled, np.ones(9), (0, most)).x
        assert found == pytest.approx(expected, abs=1e-6)
