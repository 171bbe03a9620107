"""Recurrent states against a slow twin: token by token, row by row."""

import pytest
import torch
from torch import Tensor

from magicdec.architectures.layer_facts import Recurrence
from magicdec.models.recurrent_states import Computed, RuleInputs, States, new_states

ROWS, LAYERS, FEATURES, WIDTH, HEADS, K, V = 5, (0, 2, 3), 6, 4, 2, 3, 4
KINDS = ("keep", "replay")


def rule(inputs: RuleInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """The gated delta rule as it is defined."""
    outputs = []
    for q, k, v, decay, rate in zip(*(x.unbind(1) for x in inputs), strict=True):
        state = state * decay.exp()[..., None, None]
        correction = (v - torch.einsum("rhkv,rhk->rhv", state, k)) * rate[..., None]
        state = state + torch.einsum("rhk,rhv->rhkv", k, correction)
        outputs.append(torch.einsum("rhkv,rhk->rhv", state, q))
    return torch.stack(outputs, 1), state


def states_of(kind: str) -> States:
    recurrence = Recurrence(LAYERS, FEATURES, WIDTH, HEADS, K, V, kind)  # type: ignore[arg-type]
    return new_states(recurrence, ROWS, torch.float32, "cpu")


def tokens(num_new: int, seed: int, num_rows: int = ROWS) -> tuple[RuleInputs, Tensor]:
    """Random inputs of the rule, and columns."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(num_rows, num_new, *shape, generator=generator)

    inputs = RuleInputs(
        random(HEADS, K), random(HEADS, K), random(HEADS, V), -random(HEADS).abs(), random(HEADS)
    )
    return inputs, random(FEATURES).transpose(1, 2)


def run(states: States, inputs: RuleInputs, columns: Tensor, computed: Computed) -> Tensor:
    """Run a pass through the layers, all with the same inputs."""
    for layer in LAYERS:
        assert torch.equal(states.extended(layer, columns, computed)[..., WIDTH - 1 :], columns)
        out = states.apply(layer, rule, inputs, computed)
    states.end_pass()
    return out


def expected(
    passes: list[tuple[RuleInputs, Tensor]], counts: list[list[int]], row: int
) -> tuple[Tensor, Tensor]:
    """The states of a row behind the first tokens of each pass, as many as `counts` say."""
    state, seen = torch.zeros(1, HEADS, K, V), torch.zeros(FEATURES, WIDTH - 1)
    for (inputs, columns), count in zip(passes, counts, strict=True):
        part = RuleInputs(*(x[row : row + 1, : count[row]] for x in inputs))
        if count[row]:
            _, state = rule(part, state)
        seen = torch.cat((seen, columns[row, :, : count[row]]), dim=1)
    return seen[:, 1 - WIDTH :], state[0]


def check(states: States, passes: list, counts: list[list[int]]) -> None:
    for row in range(ROWS):
        columns, matrix = expected(passes, counts, row)
        for place in range(len(LAYERS)):
            assert torch.equal(states.columns_LBFC[place, row], columns)
            torch.testing.assert_close(states.matrix_LBHKV[place, row], matrix)


@pytest.mark.parametrize("kind", KINDS)
def test_a_commit_keeps_the_first_tokens_of_each_row(kind):
    states, passes = states_of(kind), [tokens(7, 0), tokens(4, 1), tokens(4, 2)]
    run(states, *passes[0], Computed())
    counts = [[7] * ROWS, [0, 1, 2, 3, 4], [4, 0, 3, 1, 2]]
    for given, count in zip(passes[1:], counts[1:], strict=True):
        before = [x.clone() for x in states.now]
        with states.tentative():
            run(states, *given, Computed())
        for now, then in zip(states.now, before, strict=True):
            assert torch.equal(now, then)
        states.commit(4, torch.tensor(count))
    check(states, passes, counts)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_rows_that_rest_change_nothing(kind):
    states, passes = states_of(kind), [tokens(7, 0), tokens(3, 1)]
    counts = [[7, 2, 1, 5, 3], [3, 0, 2, 0, 0]]
    run(states, *passes[0], Computed(None, torch.tensor(counts[0])))
    inputs, columns = passes[1]
    rows_R = torch.tensor([0, 2])
    of_rows = RuleInputs(*(x[rows_R] for x in inputs))
    with states.tentative():
        run(states, of_rows, columns[rows_R], Computed(rows_R))
    states.commit(3, torch.tensor(counts[1]))
    check(states, passes, counts)


@pytest.mark.parametrize("kind", KINDS)
def test_a_commit_without_a_tentative_pass_changes_nothing(kind):
    """A single token without a draft, also behind a verification that was not committed."""
    states, passes = states_of(kind), [tokens(2, 0), tokens(1, 1)]
    run(states, *passes[0], Computed())
    with states.tentative():
        run(states, *tokens(1, 2), Computed())
    run(states, *passes[1], Computed())
    states.commit(1, torch.zeros(ROWS, dtype=torch.int32))
    check(states, passes, [[2] * ROWS, [1] * ROWS])


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_begins_with_the_states_of_its_target(kind):
    target, draft, passes = states_of(kind), states_of(kind), [tokens(5, 0), tokens(1, 1)]
    run(target, *passes[0], Computed())
    run(draft, *tokens(3, 9), Computed())
    draft.source = target
    run(draft, *passes[1], Computed())
    check(draft, passes, [[5] * ROWS, [1] * ROWS])
    check(target, passes[:1], [[5] * ROWS])


def test_states_return_to_the_mark():
    states, passes = states_of("keep"), [tokens(3, 0)]
    with pytest.raises(RuntimeError, match="none were marked"):
        states.return_to_mark()
    run(states, *passes[0], Computed())
    states.mark()
    run(states, *tokens(4, 1), Computed())
    states.return_to_mark()
    check(states, passes, [[3] * ROWS])
    states.clear()
    assert not any(x.any() for x in states.now)
