"""A build that gives another model at its second call is told by what differs."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.func import functional_call

import zerofn
from tests.support.small_steps import step_with
from zerofn import optim


class Model(nn.Module):
    def __init__(self, layers, width=8, bias=True):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=bias) for _ in range(layers))
        self.head, self.tied = nn.Linear(8, width), nn.Linear(8, width)
        self.tied.weight = self.head.weight

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x) + self.tied(x)


def trained(build, batch=None):
    """The loss of a step whose model and state come from `build`."""
    model = zerofn.skeleton(build)
    step = step_with(lambda params, x: functional_call(model, params, (x,)).mean())

    def init_state():
        return zerofn.TrainState.create(params=dict(build().named_parameters()), tx=optim.sgd(0.1))

    return zerofn.compile(step)(zerofn.shard(init_state), torch.ones(2, 8))[1]


def fewer(config):
    config.layers -= 1
    return Model(config.layers)


def more(config):
    config.layers += 1
    return Model(config.layers)


def narrower(config):
    config.width //= 2
    return Model(1, config.width)


def popped(config):
    return Model(1, bias=vars(config).pop("bias", True))


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (fewer, "the call does not pass 'layers.2.weight' (8, 8), 'layers.2.bias' (8,)."),
        (more, "the call passes 'layers.4.weight' (8, 8), 'layers.4.bias' (8,), which it does not have."),
        (narrower, "'head.weight' is (8, 8) in the skeleton and (4, 8) in the call; 'head.bias' is"),
        (popped, "the call passes 'layers.0.bias' (8,), which it does not have."),
    ],
)
def test_a_build_that_changes_its_config_is_told_by_what_differs(build, told):
    config = SimpleNamespace(layers=4 if build is fewer else 3, width=16, bias=False)
    with pytest.raises(ValueError, match="was called with the parameters of a different model") as e:
        trained(lambda: build(config))
    assert told in str(e.value) and "copy.deepcopy(config)" in str(e.value), e.value
    assert trained(lambda: build(copy.deepcopy(config))).isfinite()


def test_other_errors_of_a_skeletons_call_stay_what_they_are():
    class Wrong(Model):
        def forward(self, x):
            return super().forward(x.reshape(-1, 3))

    with pytest.raises(RuntimeError, match="is invalid for input of size 16"):
        trained(lambda: Wrong(1))
