"""What ranks compare of a captured step where their slices, and so their units, have several sizes."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

import zerofn
from zerofn import optim
from zerofn.comm.agreement import agree_among
from zerofn.comm.mesh import Mesh
from zerofn.parallel import tensor

SIZE = 700
WIDTHS = {2: 5, 3: 7}  # by the number of slices: units of 3 and of 1 or 2 neurons, which padding leaves of two sizes


PLAN = {"0": "colwise", "2": "rowwise", "4": "colwise", "6": "rowwise"}


def mlp(width):
    torch.manual_seed(0)
    layers = []
    for _ in range(2):
        layers += [nn.Linear(SIZE, width), nn.GELU(), nn.Linear(width, SIZE), nn.GELU()]
    return nn.Sequential(*layers).double()


def steps(sizes, stage, options):
    mesh = Mesh.make(**sizes)
    make = partial(mlp, WIDTHS[mesh.size("tensor")])
    model = zerofn.skeleton(make)
    cuts = tensor(model, mesh, PLAN)

    def train_step(state, x):
        loss, grads = state.value_and_grad(lambda p, x: functional_call(model, p, (x,)).square().mean())(x)
        return state.apply_gradients(grads), loss

    def init_state():
        return zerofn.TrainState.create(params=dict(make().named_parameters()), tx=optim.sgd(0.1, 0.9))

    state = zerofn.shard(init_state, stage=stage, mesh=mesh, cuts=cuts)
    sizes_here = [unit.size for unit in state.params.layout.units]
    step = zerofn.compile(train_step, **options)
    for k in range(2):
        x = torch.linspace(-1, 1, 12 * SIZE, dtype=torch.float64).view(12, SIZE) + k
        state, _ = step(state, x.chunk(mesh.batch.size)[mesh.batch.rank])
    return sizes_here, zerofn.unshard(state.params)


def expected(width):
    model = mlp(width)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    for k in range(2):
        optimizer.zero_grad()
        model(torch.linspace(-1, 1, 12 * SIZE, dtype=torch.float64).view(12, SIZE) + k).square().mean().backward()
        optimizer.step()
    return {name: x.detach() for name, x in model.named_parameters()}


@pytest.mark.parametrize(
    ("num_ranks", "sizes", "stage", "options"),
    [
        (3, {"tensor": 3}, 3, {}),
        (3, {"tensor": 3}, 0, {"remat": "full"}),
        (4, {"data": 2, "tensor": 2}, 3, {}),
        (4, {"tensor": 2, "data": 2}, 2, {"remat": "full"}),
    ],
)
def test_uneven_slices_are_captured(ranks, num_ranks, sizes, stage, options):
    whole, seen = expected(WIDTHS[sizes["tensor"]]), set()
    for found, params in ranks(num_ranks, steps, sizes, stage, options):
        seen.add(tuple(found))
        for name, x in whole.items():
            torch.testing.assert_close(params[name], x, rtol=1e-12, atol=1e-14)
    assert len(seen) == 2  # else there is nothing to compare apart


def apart():
    rank = dist.get_rank()
    agree_among("a check", f"part {rank % 2}", f"first\nas {rank % 2}")
    with pytest.raises(RuntimeError, match="a check: ranks differ.\n  rank 0: second 0\n  rank 2: second 2"):
        agree_among("a check", f"part {rank % 2}", f"first\nsecond {rank if rank % 2 == 0 else 1}")


def test_ranks_of_one_part_are_compared(ranks):
    ranks(4, apart)


def another_batch():
    mesh = Mesh.make(data=2, tensor=2)
    cuts = tensor(zerofn.skeleton(partial(mlp, 5)), mesh, PLAN)
    state = zerofn.shard({"params": dict(mlp(5).named_parameters())}, mesh=mesh, cuts=cuts)
    scale = 1.0 + (mesh.axis("data").rank if mesh.axis("tensor").rank else 0)

    def step(state, x):
        # the ranks of one slice gather other units
        part = state["params"] if scale == 1.0 else zerofn.tree_map(lambda p: p.float(), state["params"])
        return sum(x.sum() for x in zerofn.tree.leaves(zerofn.gather(part)))

    with pytest.raises(RuntimeError, match="ranks differ.\n  rank 1: .*\n  rank 3: "):
        zerofn.compile(step)(state, torch.zeros(1))


def test_ranks_of_one_slice_must_transfer_the_same(ranks):
    ranks(4, another_batch)
