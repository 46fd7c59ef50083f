"""Losses that train nothing, and what is no gradient, are refused; metrics in the place of a weight are told."""

import pytest
import torch
from torch.func import functional_call

import zerofn
from tests.support.small_steps import batch_of, build, loss_of, state_of, step_with
from zerofn import optim

MODULE = build(2)
loss_fn = loss_of(MODULE)


def under_no_grad(params, batch):
    with torch.no_grad():
        return loss_fn(params, batch)


WITHOUT = {
    "detached": lambda params, batch: loss_fn(params, batch).detach(),
    "no_grad": under_no_grad,
    "integers": lambda params, batch: (100 * loss_fn(params, batch)).long(),
    "of the batch alone": lambda params, batch: batch["x"].mean(),
}


def runs(step, compiled):
    return (zerofn.compile(step) if compiled else step)(state_of(MODULE, 3), batch_of())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("which", WITHOUT)
def test_a_loss_without_a_gradient_is_refused(which, compiled):
    with pytest.raises(ValueError, match="the loss has no gradient, so no parameter would be trained"):
        runs(step_with(WITHOUT[which]), compiled)


def test_a_state_without_trained_parameters_needs_no_gradient():
    state = state_of(MODULE, 3, frozen=lambda name: True)
    loss, _ = state.value_and_grad(loss_fn)(batch_of())
    assert loss == loss_fn(dict(MODULE.named_parameters()), batch_of())


def accuracy(params, batch):
    out = functional_call(MODULE, params, (batch["x"],))
    return out.square().sum(), (out.argmax(-1) == batch["y"].argmax(-1)).float().mean() + 1


def second_loss(params, batch):
    out = functional_call(MODULE, params, (batch["x"],))
    return out.square().sum(), out.exp().sum()


@pytest.mark.parametrize(("loss_fn", "compiled"), [(accuracy, True), (second_loss, False), (second_loss, True)])
def test_a_weight_that_is_computed_from_the_parameters_is_told(loss_fn, compiled):
    with pytest.warns(UserWarning, match=r"x depends on the parameters.*value_and_grad\(loss_fn, has_aux=True\)"):
        runs(step_with(loss_fn), compiled)
    runs(step_with(loss_fn, has_aux=True), compiled)


@pytest.mark.parametrize(
    "weight",
    [
        lambda params, batch: batch["x"].shape[0],
        lambda params, batch: (batch["y"] > 0).sum(),
        lambda params, batch: (batch["y"] > 0).float().sum(),
        lambda params, batch: (functional_call(MODULE, params, (batch["x"],)) > 0).sum(),  # a count
        lambda params, batch: torch.ones(()),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_weight_of_the_batch_or_of_counts_brings_no_warning(weight, compiled):
    runs(step_with(lambda params, batch: (loss_fn(params, batch), weight(params, batch))), compiled)


W, V = torch.ones(4), torch.ones(3)
NO_GRADIENTS = {
    "nothing": (None, "got None instead of a tree"),
    "a number": (3, "got 3 instead of a tree"),
    "the loss": (torch.tensor(1.0), r"got one tensor of shape \(\)"),
    "one missing": ({"w": W}, "the gradient of 'v' is missing"),
    "one of None": ({"w": W, "v": None}, "the gradient of 'v' is missing"),
    "one more": ({"w": W, "v": V, "u": V}, "a gradient of 'u', which is not a parameter"),
    "another shape": ({"w": W, "v": W}, r"'v' has shape \[4\], but the parameter has shape \[3\]"),
    "another tree": ([W, V], "the gradient of 'v', 'w' is missing"),
}


@pytest.mark.parametrize("name", NO_GRADIENTS)
def test_what_is_no_gradient_of_the_parameters_is_refused(name):
    grads, says = NO_GRADIENTS[name]
    state = zerofn.TrainState.create(params={"w": W, "v": V}, tx=optim.adamw(0.1))
    with pytest.raises(TypeError, match=says):
        state.apply_gradients(grads)


def test_gradients_of_other_shards_and_whole_ones_are_no_gradients_of_shards():
    state, other = (
        zerofn.shard(zerofn.TrainState.create(params={name: W, "v": V}, tx=optim.adamw(0.1))) for name in ("w", "u")
    )
    with pytest.raises(TypeError, match="parameters with other names, shapes or shards"):
        state.apply_gradients(other.params)
    with pytest.raises(TypeError, match=r"zerofn\.scatter\(grads, like=state\.params\) shards full"):
        state.apply_gradients({"w": W, "v": V})
    state.apply_gradients(zerofn.scatter({"w": W, "v": V}, like=state.params))
