"""Two gradients with the same random numbers are told; recomputed ones, and those with keys of their own, are not."""

import logging

import pytest
import torch
from torch.func import functional_call

import zerofn
from tests.support.small_steps import batch_of, build, loss_of, state_of

MODULE = build(2, dropout=0.5)
loss_fn = loss_of(MODULE)


def twice(state, batch):
    first, grads = state.value_and_grad(loss_fn)(batch)
    second, _ = state.value_and_grad(loss_fn)(batch)
    return state.apply_gradients(grads), (first, second)


def with_own_keys(state, batch):
    first, grads = state.value_and_grad(loss_fn)(batch)
    key = zerofn.random.fold_in(state.rng_at(), 1)
    second, _ = zerofn.value_and_grad(loss_fn, rng=key)(state.params, batch)
    return state.apply_gradients(grads), (first, second)


def recomputed(state, batch):
    def loss(params, batch):
        h = torch.utils.checkpoint.checkpoint(
            lambda x: functional_call(MODULE, params, (x,)), batch["x"], use_reentrant=False
        )
        return (h - batch["y"]).square().mean()

    value, grads = zerofn.accumulate(state.value_and_grad(loss), 2)(batch)
    return state.apply_gradients(grads), value


@pytest.mark.parametrize(("step", "told"), [(twice, True), (with_own_keys, False), (recomputed, False)])
def test_equal_draws_are_told(caplog, step, told):
    with caplog.at_level(logging.WARNING, "zerofn"):
        _, aux = zerofn.compile(step)(state_of(MODULE, 3), batch_of())
    assert any("draw the same random numbers (zerofn.bernoulli" in x.message for x in caplog.records) == told
    if step is not recomputed:
        assert torch.equal(*aux) == told
