"""A captured operation runs in the grad mode in which the step called it: oneDNN's LSTM rounds otherwise without it."""

import contextlib

import pytest
import torch
from torch import nn
from torch.func import functional_call

import zerofn
from zerofn import optim

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

NETWORKS = {
    "LSTM": lambda: nn.LSTM(6, 6),
    "LSTM, two layers, both directions": lambda: nn.LSTM(6, 6, num_layers=2, bidirectional=True),
    "LSTM, projections": lambda: nn.LSTM(6, 6, proj_size=3),
    "GRU": lambda: nn.GRU(6, 6, num_layers=2),
    "RNN": lambda: nn.RNN(6, 6, bidirectional=True),
}
X = torch.randn(40, 3, 6, generator=torch.Generator().manual_seed(0))


def state_of(network):
    return zerofn.TrainState.create(params=dict(network.named_parameters()), tx=optim.sgd(0.1))


def one_step(network, n=1):
    """Return a step whose loss is the mean square of a network's output, and that also returns its gradients."""

    def loss_fn(params, x):
        return functional_call(network, params, (x,))[0].square().mean()

    def step(state, x):
        loss, grads = zerofn.accumulate(state.value_and_grad(loss_fn), n)(x)
        return state.apply_gradients(grads), (loss, grads)

    return step


@pytest.mark.part(n=[2], build=[NETWORKS["LSTM"], NETWORKS["RNN"]])
@pytest.mark.parametrize("build", NETWORKS.values(), ids=NETWORKS.keys())
@pytest.mark.parametrize("n", [1, 2], ids=["whole", "microbatches"])
def test_a_step_called_without_grad_mode_gives_the_bits_of_plain_torch(build, n):
    torch.manual_seed(0)
    network = build()
    losses = [network(x)[0].square().mean() for x in X.chunk(n)]
    expected = sum(losses) / n
    gradients = torch.autograd.grad(expected, list(network.parameters()))
    with torch.no_grad():
        _, (loss, found) = zerofn.compile(one_step(network, n))(state_of(network), X)
    assert torch.equal(loss, expected.detach())
    for (name, _), g in zip(network.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(found[name], g, rtol=1e-6 if n > 1 else 0, atol=1e-9 if n > 1 else 0, msg=name)


@pytest.mark.part(kind=["LSTM"])
@pytest.mark.parametrize("outside", [contextlib.nullcontext, torch.no_grad], ids=["grad mode", "no grad mode"])
@pytest.mark.parametrize("inside", [torch.no_grad, torch.inference_mode, torch.enable_grad], ids=lambda x: x.__name__)
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_an_evaluation_has_the_bits_of_the_mode_that_it_asks_for(kind, inside, outside):
    torch.manual_seed(0)
    network = NETWORKS[kind]().requires_grad_(False)
    with inside():
        expected = network(X)[0]

    def evaluate(params, x):
        with inside():
            return functional_call(network, params, (x,))[0]

    with outside():
        found = zerofn.compile(evaluate)(dict(network.named_parameters()), X)
    assert torch.equal(found, expected)


def test_a_frozen_encoder_with_dropout_runs_as_in_the_eager_step():
    torch.manual_seed(0)
    encoder, decoder = nn.LSTM(6, 6, num_layers=2, dropout=0.5).requires_grad_(False), nn.LSTM(6, 1)

    def loss_fn(params, x):
        with torch.no_grad():
            encoded = encoder(x)[0]
        return functional_call(decoder, params, (encoded,))[0].square().mean(), encoded

    def step(state, x):
        (loss, encoded), grads = state.value_and_grad(loss_fn, has_aux=True)(x)
        return state.apply_gradients(grads), (loss, encoded)

    _, (expected, encoded) = step(state_of(decoder), X)
    _, (loss, found) = zerofn.compile(step)(state_of(decoder), X)
    assert torch.equal(found, encoded) and torch.equal(loss, expected)


def test_an_eager_region_runs_in_the_grad_mode_around_it():
    torch.manual_seed(0)
    network = nn.LSTM(6, 6).requires_grad_(False)
    region = zerofn.eager_region(lambda x: network(x)[0], like=lambda x: x.new_empty(*x.shape[:2], 6))

    def loss_fn(params, x):
        y = region(x)
        return (params["w"] * y).sum(), y

    def step(state, x):
        (_, y), grads = state.value_and_grad(loss_fn, has_aux=True)(x)
        return state.apply_gradients(grads), y

    state = zerofn.TrainState.create(params={"w": torch.ones(6)}, tx=optim.sgd(0.1))
    assert torch.equal(zerofn.compile(step)(state, X)[1], network(X)[0])
    assert torch.is_grad_enabled()
