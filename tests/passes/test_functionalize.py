"""Writes to memory of a step's own become values: the same bits, and only where nothing else looks at the memory."""

import pytest
import torch
from torch.func import functional_call

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import batch_of, build, captured, results, state_of, train_step_of
from zerofn import optim
from zerofn.graph.alias import roots, writes
from zerofn.passes.canonicalize import canonicalize
from zerofn.passes.functionalize import functionalize


def written(gm):
    """Operations in place."""
    return [n for n in gm.graph.nodes if writes(n)]


def test_masks_are_drawn_as_values():
    module, batch = build(4, dropout=0.3), batch_of()
    state, step = state_of(module, 3), train_step_of(module)
    plain = captured(step, state, batch, canonicalize)
    pure = captured(step, state, batch, canonicalize, functionalize)
    assert written(plain.gm) and not written(pure.gm)
    assert_same_trees(results(pure, state, batch), results(plain, state, batch))


def program_of(loss):
    """A step's program, before and after, with `loss(x, w)`."""
    params = {"w": torch.linspace(0.1, 1.0, 8)}

    def step(state, batch):
        value, grads = state.value_and_grad(lambda p, x: loss(x, p["w"]))(batch)
        return state.apply_gradients(grads), value

    state = zerofn.shard(zerofn.TrainState.create(params=params, tx=optim.sgd(0.1)))
    batch = torch.linspace(-1.0, 1.0, 8)
    before = captured(step, state, batch, canonicalize)
    expected = results(before, state, batch)
    after = captured(step, state, batch, canonicalize, functionalize)
    assert_same_trees(results(after, state, batch), expected)
    return before.gm, after.gm


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, w: (x * 2).add_(1).mul_(3).mul(w).sum(),
        lambda x, w: torch.zeros(8).copy_(x).mul(w).sum(),
        lambda x, w: (x.clone().clamp_(min=0) * w).sum(),
        lambda x, w: (x.exp().masked_fill_(x > 0, 2.0) * w).sum(),
    ],
)
def test_what_is_pure_after_all(loss):
    before, after = program_of(loss)
    assert written(before) and not written(after)


def through_a_view(x, w):
    y = x * 2
    y[:4].add_(1)
    return (y * w).sum()


def seen_by_a_view(x, w):
    y = x * 2
    first = y[:4]
    y.add_(1)
    return (y * w).sum() + (first * w[:4]).sum()


def copied_over_twice(x, w):
    y, z = torch.zeros(8), x * 2
    y.copy_(z)
    z.add_(1)
    return (y * w).sum() + (z * w).sum()


def copied_from_what_changes(x, w):
    y, z = torch.zeros(8), x * 2
    y.copy_(z.view(2, 4).view(8))
    z.view(2, 4)[0].add_(1)
    return (y * w).sum() + (z * w).sum()


@pytest.mark.parametrize("loss", [through_a_view, seen_by_a_view, copied_over_twice, copied_from_what_changes])
def test_what_is_looked_at_otherwise_stays(loss):
    _, after = program_of(loss)
    assert written(after)


def test_no_write_into_state_is_touched():
    module = torch.nn.BatchNorm1d(4)

    def step(state, batch):
        def loss_fn(params, x):
            buffers = {k: v.clone() for k, v in state.extra.items()}
            return functional_call(module, {**params, **buffers}, (x,)).square().mean(), buffers

        (loss, buffers), grads = state.value_and_grad(loss_fn, has_aux=True)(batch)
        return state.apply_gradients(grads).replace(extra=buffers), loss

    state = zerofn.shard(
        zerofn.TrainState.create(
            params=dict(module.named_parameters()), tx=optim.sgd(0.1), extra=dict(module.named_buffers())
        )
    )
    batch = torch.randn(6, 4)
    plain, pure = captured(step, state, batch, canonicalize), captured(step, state, batch, canonicalize, functionalize)
    assert_same_trees(results(pure, state, batch), results(plain, state, batch))
    assert len(roots(pure.gm.graph)) <= len(roots(plain.gm.graph))
