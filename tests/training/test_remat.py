"""Recomputation against the same function without it, under every transform, with the same dropout mask."""

import pytest
import torch
from torch.func import grad, jvp, vjp, vmap

import zerofn
from zerofn.random import key, randomness
from zerofn.training import remat


def _f(x, w):
    return (torch.tanh(x @ w) @ w.T).sin().sum()


def _inputs():
    torch.manual_seed(0)
    return torch.randn(3, 4, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: grad(f, argnums=(0, 1)),
        lambda f: lambda x, w: vjp(f, x, w)[1](torch.tensor(2.0, dtype=torch.float64)),
        lambda f: lambda x, w: jvp(f, (x, w), (x.cos(), w.sin())),
        lambda f: lambda x, w: vmap(f, in_dims=(0, None))(x[:, None], w),
        lambda f: lambda x, w: vmap(grad(f), in_dims=(0, None))(x[:, None], w),
        lambda f: lambda x, w: jvp(grad(f), (x, w), (x.cos(), w.sin())),
        lambda f: grad(lambda x, w: grad(f)(x, w).square().sum(), argnums=(0, 1)),
        lambda f: lambda x, w: torch.autograd.grad(f(x.requires_grad_(), w.requires_grad_()), (x, w)),
    ],
    ids=["grad", "vjp", "jvp", "vmap", "vmap-grad", "hvp", "grad-grad", "autograd"],
)
def test_every_transform_gives_the_plain_value(transform):
    plain, ours = transform(_f)(*_inputs()), transform(zerofn.remat(_f))(*_inputs())
    for a, b in zip(zerofn.tree.leaves(plain), zerofn.tree.leaves(ours), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("functional", [True, False])
def test_dropout_is_drawn_again(functional):
    def drop(x):
        return (torch.dropout(x.sin(), 0.5, True) * x).sum()

    def gradient(f):
        with randomness(key(3)):
            x = torch.linspace(0.1, 2, 64)
            return grad(f)(x) if functional else torch.autograd.grad(f(x.requires_grad_()), x)[0]

    assert torch.equal(gradient(drop), gradient(zerofn.remat(drop)))


@pytest.mark.parametrize("transform", [grad, lambda f: lambda x: jvp(f, (x,), (torch.ones(3),))])
def test_a_device_draws_again_too(monkeypatch, transform):
    """Its generator here: a number that each draw adds one to."""
    drawn, device = [0], torch.device("cuda", 0)

    def draw():
        drawn[0] += 1
        return drawn[0]

    monkeypatch.setattr(remat, "_devices", lambda tensors: {device} if len(tensors) == 1 else set())
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: drawn[0])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: drawn.__setitem__(0, state))
    f = lambda x: (x.sin() * draw()).sum()  # noqa: E731
    x = torch.ones(3)
    drawn[0] = 4
    expected = transform(f)(x)
    drawn[0] = 4
    found = transform(zerofn.remat(f))(x)
    assert drawn[0] == 5
    for a, b in zip(zerofn.tree.leaves(found), zerofn.tree.leaves(expected), strict=True):
        assert torch.equal(a, b)


def test_activations_are_not_kept():
    kept = []

    def pack(x):
        kept.append(x.numel())
        return x

    x = torch.randn(8, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        zerofn.remat(lambda x: x.sin().cos().tanh().exp())(x).sum().backward()
    assert sum(kept) <= 64  # the input alone; before torch 2.13 something without elements, too


def test_what_is_closed_over_and_differentiated_raises():
    with pytest.raises(ValueError, match="closes over 'w'.*Pass 'w' to the function"):
        grad(lambda w: zerofn.remat(lambda x: (x * w).sum())(torch.ones(3)))(torch.ones(3))


def test_a_variable_that_is_closed_over_may_have_its_value_later():
    def loss(w):
        if w.sum() < 0:
            return later(w)
        return w.sin().sum()

    w = torch.ones(3)
    assert torch.equal(grad(zerofn.remat(loss))(w), w.cos())
    later = torch.sum


def test_a_module_whose_parameters_are_differentiated():
    layer = torch.nn.Linear(3, 3, bias=False)

    class Model(torch.nn.Module):
        def __init__(self, remat):
            super().__init__()
            self.layer, self.remat = layer, remat

        def forward(self, x):
            return (zerofn.remat(self.layer) if self.remat else self.layer)(x).sin().sum()

    def loss(remat):
        return lambda w: torch.func.functional_call(Model(remat), {"layer.weight": w}, (torch.ones(2, 3),))

    w = torch.randn(3, 3)
    _, expected = zerofn.value_and_grad(loss(False))(w)
    _, ours = zerofn.value_and_grad(loss(True))(w)  # recomputed with w, not with the layer's own weight
    assert torch.equal(ours, expected)
    with pytest.raises(ValueError, match="parameters of Linear need gradients, but are not arguments"):
        grad(loss(True))(w)
