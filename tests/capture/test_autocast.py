"""Autocast in a captured step: a weight is cast once for all its uses, as plain torch does, and never once more."""

import contextlib

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import zerofn
from zerofn import optim


def half(**options):
    return torch.autocast("cpu", dtype=torch.bfloat16, **options)


class Layers(nn.Module):
    """Layers of one weight. `run(layer, x)` uses them."""

    def __init__(self, layer, run):
        super().__init__()
        self.layer, self.run = layer, run

    def forward(self, x):
        return self.run(self.layer, x)


def four_times(layer, x):
    for _ in range(4):
        x = torch.tanh(layer(x))
    return x


def recomputed(layer, x):
    for _ in range(2):
        x = checkpoint(lambda y: torch.tanh(layer(torch.tanh(layer(y)))), x, use_reentrant=False)
    return x


def off_in_between(layer, x):
    x = torch.tanh(layer(x))
    with half(enabled=False):
        x = torch.tanh(layer(x.float()))
    return torch.tanh(layer(x))


def without_cache(layer, x):
    with half(cache_enabled=False):
        return four_times(layer, x)


def in_a_region(layer, x):
    def fn(w, y):
        return torch.tanh((y @ w.t()) @ w.t()).float()

    region = zerofn.eager_region(fn, like=lambda w, y: torch.empty(y.shape))
    return region(layer.weight, x) * torch.tanh(x @ layer.weight.t()) + torch.tanh(layer(x))


CASES = {
    "shared layer": (lambda: nn.Linear(16, 16), four_times),
    "recomputed": (lambda: nn.Linear(16, 16), recomputed),
    "off in between": (lambda: nn.Linear(16, 16), off_in_between),
    "without cache": (lambda: nn.Linear(16, 16), without_cache),
    "in a region": (lambda: nn.Linear(16, 16), in_a_region),
    "recurrent cell": (lambda: nn.GRUCell(16, 16), lambda cell, x: cell(x, cell(x, cell(x, x)))),
    "recurrent network": (lambda: nn.LSTM(16, 16), lambda net, x: net(x)[0]),
}


@pytest.mark.part(microbatches=[1], inside=[True])
@pytest.mark.part(run=[in_a_region])
@pytest.mark.parametrize(("build", "run"), CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize(
    ("inside", "microbatches"), [(True, 1), (False, 1), (True, 2)], ids=["inside", "around", "accumulated"]
)
def test_a_captured_step_has_the_bits_of_plain_torch(build, run, inside, microbatches):
    torch.manual_seed(0)
    model, x = Layers(build(), run), torch.randn(8, 16) * 3
    params = dict(model.named_parameters())

    def loss_fn(params, x):
        with half() if inside else contextlib.nullcontext():
            return functional_call(model, params, (x,)).float().square().mean()

    def step(state, x):
        loss, grads = zerofn.accumulate(state.value_and_grad(loss_fn), microbatches)(x)
        return state.apply_gradients(grads), grads

    state = zerofn.shard(zerofn.TrainState.create(params=params, tx=optim.sgd(0.1)))
    with contextlib.nullcontext() if inside else half():
        if microbatches == 1 and run is not in_a_region:  # a region runs once more in the backward pass
            expected = torch.autograd.grad(loss_fn(params, x), list(params.values()))
        else:
            expected = list(zerofn.unshard(step(state, x)[1]).values())
        _, grads = zerofn.compile(step)(state, x)
    found = zerofn.unshard(grads)
    assert all(torch.equal(found[name], x) for name, x in zip(params, expected, strict=True))
