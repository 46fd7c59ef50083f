"""Leaves that ranks along `tensor` all have whole stay the same on them, in whatever form gradients are sent."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

import zerofn
from tests.support.some import some_of
from zerofn import Wire, optim

ADAMW = optim.adamw(1e-2)
WAYS = {
    "int8": {"wire": Wire("int8", "int8", smallest=0)},
    "feedback": {"wire": Wire("int8", "int4", smallest=0, feedback=True)},
    "stochastic": {"wire": Wire("int8", "fp8", smallest=0, rounding="stochastic")},
    "signs": {"tx": optim.onebit_adam(1e-2, freeze_step=2)},
    "8-bit moments": {"tx": optim.adamw(1e-2, moments="8bit")},
}


class Net(nn.Module):
    """An MLP that is cut beside layers and norms that are not, of odd sizes."""

    def __init__(self):
        super().__init__()
        self.before, self.norm = nn.Linear(9, 33), nn.LayerNorm(33)
        self.up, self.down, self.after = nn.Linear(33, 50), nn.Linear(50, 33), nn.Linear(33, 7)

    def forward(self, x):
        x = self.norm(self.before(x))
        return self.after(x + self.down(torch.tanh(self.up(x))))


def build():
    torch.manual_seed(0)
    return Net()


def train(way, stage):
    """Return the weights behind 6 steps of 2 x 2 ranks."""
    mesh = zerofn.Mesh.make(data=2, tensor=2)
    net = zerofn.skeleton(build)
    cuts = zerofn.parallel.tensor(net, mesh, {"up": "colwise", "down": "rowwise"})
    given = {"tx": ADAMW, **WAYS[way]}
    tx = given.pop("tx")
    state = zerofn.shard(
        lambda: zerofn.TrainState.create(params=dict(build().named_parameters()), tx=tx),
        stage=stage, mesh=mesh, cuts=cuts, **given,
    )  # fmt: skip

    @zerofn.compile
    def step(state, x):
        loss, grads = state.value_and_grad(lambda p, x: functional_call(net, p, (x,)).square().mean())(x)
        return state.apply_gradients(grads), loss

    for k in range(6):
        draw = torch.Generator().manual_seed(10 * k + mesh.rows.rank)
        state, _ = step(state, torch.randn(4, 9, generator=draw))
    return dict(zerofn.unshard(state.params))


@pytest.mark.part(stage=[3])
@pytest.mark.parametrize("stage", range(4))
def test_ranks_have_the_same_whole_leaves(ranks, stage):
    for way in some_of(WAYS, "stochastic", "signs"):
        first, *others = ranks(4, train, way, stage)
        for found in others:
            assert all(torch.equal(x, found[name]) for name, x in first.items()), way
