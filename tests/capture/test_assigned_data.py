"""`x.data = y` in a captured step does what it does in the eager step, or is refused."""

import pytest
import torch

import zerofn
from zerofn import optim
from zerofn.capture.capture import CaptureError

OUTSIDE = torch.full((3, 4), 1.5)
W = torch.tensor([[0.1, -0.2, 0.3, -0.4], [0.5, 0.6, -0.7, 0.8]])
X = torch.arange(12.0).view(3, 4) / 10 + 0.1


def loss_of(x, w):
    return (x @ w.t()).square().mean()


def binary_weight(w, x):
    w = w.clone()
    w.data = w.data.sign()
    return loss_of(x, w)


def straight_through(w, x):
    q = w * 1
    q.data = torch.round(w.data * 4) / 4
    return loss_of(x, q)


def lent_and_put_back(w, x):
    old = w.data
    w.data = w.data.sign()
    loss = loss_of(x, w)
    w.data = old
    return loss + w.sum()


def another_shape_and_dtype(w, x):
    x = x.clone()
    x.data = x.data[:2].double()
    return loss_of(x, w.double()).float()


def memory_is_shared(w, x):
    h, y = x.clone(), x * 2
    h.data = y
    y.add_(1)
    h.mul_(3)
    return loss_of(h + y, w)


def a_view(w, x):
    h = x.clone()
    flat = h.view(-1)
    flat.data = torch.arange(12.0)
    return loss_of(h + flat.view(3, 4), w)


def from_outside(w, x):
    x = x.clone()
    torch.Tensor.data.__set__(x, OUTSIDE)
    return loss_of(x, w)


def set_(w, x):
    x = x.clone()
    x.set_((x * 3).detach())
    return loss_of(x, w)


def set_to_itself(w, x):
    with torch.no_grad():
        w.set_(w)
    return loss_of(x, w)


CASES = (
    binary_weight,
    straight_through,
    lent_and_put_back,
    another_shape_and_dtype,
    memory_is_shared,
    a_view,
    from_outside,
    set_,
    set_to_itself,
)


def step_of(loss):
    def step(state, x):
        vg = zerofn.accumulate(state.value_and_grad(lambda p, x: loss(p["w"], x[0])), 2)
        value, grads = vg(x)
        return state.apply_gradients(grads), (value, grads["w"])

    return step


@pytest.mark.parametrize("loss", CASES, ids=lambda f: f.__name__)
def test_an_assignment_is_that_of_plain_torch(loss):
    w = W.clone().requires_grad_()
    expected = loss(w, X)
    (gradient,) = torch.autograd.grad(expected, w)
    state = zerofn.TrainState.create(params={"w": W.clone()}, tx=optim.sgd(0.1))
    _, (value, found) = zerofn.compile(step_of(loss))(state, torch.stack([X, X]))
    torch.testing.assert_close(value, expected.detach(), rtol=0, atol=0)
    torch.testing.assert_close(found, gradient, rtol=0, atol=0)


def outer(w, x):
    OUTSIDE.data = OUTSIDE.data * 1
    return loss_of(x + OUTSIDE, w)


def storage(w, x):
    x = x.clone()
    x.untyped_storage().fill_(0)
    return loss_of(x, w)


def swapped(w, x):
    a, b = x.clone(), x * 3
    torch.utils.swap_tensors(a, b)
    return loss_of(a, w)


@pytest.mark.parametrize(
    ("loss", "error", "says"),
    [
        (outer, CaptureError, "assigns to .data of a tensor of shape .3, 4. from outside"),
        (storage, RuntimeError, "write to the tensor, x.copy_"),
        (swapped, RuntimeError, "assign x.data = y, or use the other variable"),
    ],
)
def test_what_cannot_be_captured_is_refused(loss, error, says):
    state = zerofn.TrainState.create(params={"w": W.clone()}, tx=optim.sgd(0.1))
    with pytest.raises(error, match=says):
        zerofn.compile(step_of(loss))(state, torch.stack([X, X]))


def test_an_assignment_outside_of_a_capture_is_torchs():
    x = torch.zeros(2)
    x.data = torch.ones(2)
    assert x.tolist() == [1.0, 1.0]
    assert type(torch.Tensor.data) is type(torch.Tensor.grad)
