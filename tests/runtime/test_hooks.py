"""Hooks before compiled steps."""

import pytest
import torch

import zerofn
from tests.support.same import assert_same_trees
from zerofn import optim
from zerofn.runtime.hooks import StepPreHooks
from zerofn.util.process import the


@pytest.fixture
def training():
    def train_step(state, batch):
        grads, loss = torch.func.grad_and_value(lambda p: (p["w"] * batch).square().mean())(state.params)
        return state.apply_gradients(grads), loss

    return zerofn.TrainState.create(params={"w": torch.ones(3)}, tx=optim.sgd(0.1)), zerofn.compile(train_step)


def test_hooks_are_called_in_order_until_they_are_removed(training):
    (state, step), calls = training, []
    first = zerofn.register_step_pre_hook(lambda: calls.append("first"))
    second = zerofn.register_step_pre_hook(lambda: calls.append("second"))
    try:
        state, _ = step(state, torch.ones(3))
        first.remove()
        state, _ = step(state, torch.ones(3))
    finally:
        second.remove()
    step(state, torch.ones(3))
    assert calls == ["first", "second", "second"]


def test_one_that_raises_leaves_the_state_as_it_was(training):
    state, step = training
    kept = zerofn.copy(state)

    def stop():
        raise KeyboardInterrupt("enough")

    with zerofn.register_step_pre_hook(stop), pytest.raises(KeyboardInterrupt, match="enough"):
        step(state, torch.ones(3))
    assert_same_trees(state, kept)
    assert int(step(state, torch.ones(3))[0].step) == 1


@pytest.mark.parametrize("hook", [3, None, "x", [], lambda x: None, int.__add__])
def test_what_cannot_be_called_is_refused_at_once(hook):
    before = dict(the(StepPreHooks))
    with pytest.raises(TypeError, match="^register_step_pre_hook: hook must be a function that can be called without"):
        zerofn.register_step_pre_hook(hook)
    assert dict(the(StepPreHooks)) == before
