"""Parameters of a class that stores them quantised are refused before anything is built."""

import pytest
import torch
from torch import nn

import zerofn
from tests.support.same import assert_same_trees


class Packed(nn.Parameter):
    """Two values of 4 bits in a byte, as bitsandbytes has them, once it is moved."""

    def __new__(cls, data, requires_grad=False):
        return torch.Tensor._make_subclass(cls, data, requires_grad)

    def to(self, *args, **kwargs):
        self.data = (self.data * 7).to(torch.int8)
        return self


class Named(nn.Parameter):
    """A class that says nothing of memory."""


class Layer(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.weight = kind(torch.ones(4, 4))


def params(kind=Packed):
    return dict(Layer(kind).named_parameters())


def test_every_way_in_says_so_before_anything_is_built():
    tx = zerofn.optim.sgd(0.1)
    made = Layer(Packed)
    ways = [
        lambda: zerofn.skeleton(lambda: Layer(Packed)),
        lambda: zerofn.skeleton(lambda: made),
        lambda: zerofn.shard(lambda: zerofn.TrainState.create(params=params(), tx=tx)),
        lambda: zerofn.shard(lambda: {"params": dict(made.named_parameters())}),
        lambda: zerofn.shard({"params": params()}),
        lambda: zerofn.TrainState.create(params=params(), tx=tx),
    ]
    for way in ways:
        with pytest.raises(TypeError, match="is a Packed, a class of quantised parameters.*at stage 3"):
            way()


def test_other_classes_are_as_they_were():
    assert type(zerofn.skeleton(lambda: Layer(Named)).weight) is Named
    state = zerofn.shard(lambda: {"params": params(Named)})
    assert_same_trees(zerofn.unshard(state)["params"], {"weight": torch.ones(4, 4)})
    assert type(Packed(torch.ones(2))) is Packed  # outside, as ever
