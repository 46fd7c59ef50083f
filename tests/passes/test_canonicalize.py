import torch

from tests.support.same import assert_same_trees
from tests.support.small_steps import (
    batch_of,
    build,
    captured,
    fake_ranks,
    gathers,
    loss_of,
    results,
    state_of,
    step_with,
    train_step_of,
)
from zerofn.passes.canonicalize import canonicalize

aten, ops = torch.ops.aten, torch.ops.zerofn


def count(program, *targets):
    return sum(n.target in targets for n in program.gm.graph.nodes)


def test_nodes_that_do_nothing_are_dropped_and_values_stay():
    module = build(dropout=0.1)
    state, batch = state_of(module, 3), batch_of()
    before = captured(train_step_of(module), state, batch)
    after = captured(train_step_of(module), state, batch, canonicalize)
    nothing = (aten.detach.default, aten.alias.default, ops.as_whole.default, ops.as_shard.default)
    assert count(before, *nothing) > 0 and count(after, *nothing) == 0
    assert len(after.gm.graph.nodes) < len(before.gm.graph.nodes)
    assert_same_trees(results(after, state, batch), results(before, state, batch))


def transposes(state, batch):
    x = batch["x"]
    return [
        x.t().t() + 1,
        x.transpose(0, 1).transpose(-1, -2) + 1,
        x.transpose(0, 1).t() + 1,
        x.view(4, 16) + 1,
        x.view(16, 4) + 1,
        x.expand(4, 16) + 1,
        x[None].transpose(0, 1).transpose(1, 2) + 1,
    ]


def test_transposes_that_cancel_and_views_that_change_nothing():
    state, batch = state_of(build(1), 3), batch_of()
    program = captured(transposes, state, batch, canonicalize)
    added = [n for n in program.gm.graph.nodes if n.target is aten.add.Tensor]
    untouched = [k for k, n in enumerate(added) if n.args[0].op == "placeholder"]
    assert untouched[:2] == [0, 1] and 3 in untouched and 5 in untouched
    assert not {4, 6} & set(untouched)
    assert_same_trees(results(program, state, batch), transposes(state, batch))


def test_a_unit_gathered_twice_is_gathered_once():
    module = build()
    loss_fn = loss_of(module)

    def step(state, batch):
        first, _ = state.value_and_grad(loss_fn)(batch)
        second, grads = state.value_and_grad(loss_fn)(batch)
        return state.apply_gradients(grads), first + second

    with fake_ranks(2):
        state = state_of(module, 3)
        assert len(gathers(captured(step, state, batch_of()).gm)) == 8
        assert len(gathers(captured(step, state, batch_of(), canonicalize).gm)) == 4


def test_of_two_casts_one_that_is_written_stays_its_own():
    def step(state, batch):
        a, b, c = (batch["x"].double() for _ in range(3))
        b.view(-1).mul_(2)
        return a, b, c

    state, batch = {"params": torch.ones(2)}, batch_of()
    program = captured(step, state, batch, canonicalize)
    assert count(program, aten._to_copy.default) == 2
    assert_same_trees(results(program, state, batch), step(state, batch))


def test_recomputation_is_not_merged():
    module = build()
    loss_fn = loss_of(module)

    def recomputed(params, batch):
        return torch.utils.checkpoint.checkpoint(loss_fn, params, batch, use_reentrant=False)

    step = step_with(recomputed)

    program = captured(step, state_of(module, 3), batch_of())
    num_products = count(program, aten.addmm.default)
    assert num_products == 8  # four layers, twice
    assert count(captured(step, state_of(module, 3), batch_of(), canonicalize), aten.addmm.default) == num_products
