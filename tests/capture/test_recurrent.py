"""Recurrent networks in a captured step keep no parameter that was lent."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

import zerofn
from zerofn import optim


def step_of(net, loss_of):
    def step(state, batch):
        loss, grads = state.value_and_grad(lambda p, b: loss_of(p, b))(batch)
        return state.apply_gradients(grads), (loss, grads)

    return step


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_network_lists_its_own_parameters_after_a_capture(kind, caplog):
    net = kind(4, 3)
    step = step_of(net, lambda p, x: functional_call(net, p, (x,))[0].sum())
    state = zerofn.shard(zerofn.TrainState.create(params=dict(net.named_parameters()), tx=optim.sgd(0.1)))
    x = torch.ones(2, 1, 4)
    expected = net(x)[0].detach()
    step(state, x)
    state, _ = zerofn.compile(step)(state, x)
    zerofn.compile(lambda state, x: functional_call(net, zerofn.gather(state.params), (x,))[0])(state, x)
    assert "_flat_weight" not in caplog.text
    assert all(a is b for a, b in zip(net._flat_weights, net.parameters(), strict=True))
    assert torch.equal(net(x)[0], expected)
