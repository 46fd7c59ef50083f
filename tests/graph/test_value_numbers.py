"""Numbers of values: equal where two ranks compute the same expression, and in no other case."""

import pytest
import torch

import zerofn
from tests.support.small_steps import batch_of, build, captured, fake_ranks, loss_of, state_of, step_with
from zerofn import optim, tree
from zerofn.capture.between_ranks import NumberedStep
from zerofn.graph.node_text import written
from zerofn.graph.value_numbers import expressions

MODULE = build(2)


def told(change, rank, stage=3, n=1, tx=None, size=2):
    """What a rank tells of a step with `change(grads, state)` before the update."""

    def step(state, batch):
        vg = state.value_and_grad(loss_of(MODULE))
        loss, grads = (zerofn.accumulate(vg, n) if n > 1 else vg)(batch)
        return state.apply_gradients(change(grads, state)), loss

    with fake_ranks(size, rank):
        state = state_of(MODULE, stage, tx, extra=torch.tensor([1.0, 2.0]))
        return NumberedStep(captured(step, state, batch_of(rank))).told()


def scaled(factor):
    return lambda grads, state: tree.tree_map(lambda g: g * factor(state), grads)


@pytest.mark.part(n=[2], stage=[3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    "tx",
    [
        optim.adamw(1e-2, weight_decay=0.1, mask=lambda leaf: leaf.name.endswith("weight")),
        optim.muon(1e-2),
        optim.chain(optim.add_decayed_weights(0.1, lambda leaf: leaf.name.startswith("0")), optim.sgd(0.1)),
        optim.lamb(1e-2),
        optim.adafactor(1e-2),
    ],
    ids=lambda tx: tx.about.name or "own",
)
def test_ranks_with_other_parts_of_the_state_have_the_same_numbers(tx, n, stage):
    assert told(lambda g, s: g, 0, stage, n, tx) == told(lambda g, s: g, 1, stage, n, tx)


@pytest.mark.parametrize("stage", [0, 3])
def test_noise_in_the_shape_of_shards_has_the_same_numbers(stage):
    def noisy(grads, state):
        noise = zerofn.normal_like(grads, zerofn.random.fold_in(state.rng_at(), 1))
        return tree.tree_map(torch.add, grads, noise)

    assert told(noisy, 0, stage) == told(noisy, 1, stage)


@pytest.mark.parametrize(
    "factor",
    [
        lambda r: lambda s: 0.5 + r,
        lambda r: lambda s: s.extra[r],
        lambda r: lambda s: torch.tensor([1.0, 2.0 + r]).sum(),
        lambda r: lambda s: s.extra.clone()[r:].mul_(2).sum(),
        lambda r: lambda s: torch.ones(1 + r).sum(),
    ],
)
def test_numbers_indices_constants_and_sizes_are_seen(factor):
    first, again, other = (told(scaled(factor(r)), r) for r in (0, 0, 1))
    assert first == again != other


def test_an_order_is_seen_that_no_count_of_operations_shows():
    swapped = lambda r: lambda g, s: tree.tree_map(lambda x: x * s.extra[r] - s.extra[1 - r], g)  # noqa: E731
    assert told(swapped(0), 0) != told(swapped(1), 1)


def test_a_write_through_a_view_changes_what_is_read_later():
    def factor(r):
        def of(state):
            table = state.extra.clone()
            table[r] = 3.0
            return table.sum()

        return of

    assert told(scaled(factor(0)), 0) != told(scaled(factor(1)), 1)


def test_what_the_loss_of_a_ranks_own_rows_is_multiplied_by_may_differ():
    def step_of(rank):
        step = step_with(lambda p, b: loss_of(MODULE)(p, b) * (0.5 + rank))

        with fake_ranks(2, rank):
            return NumberedStep(captured(step, state_of(MODULE, 3), batch_of(rank)))

    steps = [step_of(rank) for rank in range(2)]
    common = {"data": set.intersection(*(step.told()["data"] for step in steps))}
    assert [step.difference(common, {}) for step in steps] == ["", ""]


def test_an_evaluation_and_one_rank_have_none():
    with fake_ranks(2):
        program = captured(lambda s, b: loss_of(MODULE)(zerofn.gather(s.params), b), state_of(MODULE, 3), batch_of())
        assert NumberedStep(program).told() == {}
    program = captured(lambda s, b: s, state_of(MODULE, 3), batch_of())
    assert expressions(program, written(program)) == {}
