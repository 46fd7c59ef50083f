"""What ranks compare of a captured step where their slices, and so their units, have several sizes."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

import zerofn
from tests.support.small_steps import step_with
from zerofn import optim
from zerofn.comm.mesh import Mesh
from zerofn.job.agreement import agree_among
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
    train_step = step_with(lambda p, x: functional_call(model, p, (x,)).square().mean())

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


@pytest.mark.part(num_ranks=[3], stage=[3])
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


def told(step, state, batch):
    """What every rank says of a step."""
    with pytest.raises(RuntimeError) as caught:
        zerofn.compile(step)(state, batch)
    return str(caught.value)


def other_numbers(stage, axis):
    rank = dist.get_rank()
    x = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(rank))

    def made(change=lambda state: state):
        params = {"w": torch.zeros(SIZE, 3)}
        make = lambda: zerofn.TrainState.create(params=params, tx=optim.sgd(0.1), extra=torch.tensor([1.0, 2.0]))  # noqa: E731
        return change(zerofn.shard(make, stage=stage, mesh=Mesh.make(**{axis: 2})))

    def step(rate=0.25, rows=lambda x: (x, len(x))):
        def train_step(state, batch):
            def loss_fn(p, batch):
                x, n = rows(batch)
                return torch.nn.functional.dropout(x, rate).mm(p["w"]).sin().sum() / n

            loss, grads = state.value_and_grad(loss_fn)(batch)
            return state.apply_gradients(grads), loss

        return train_step

    found = [told(step(0.25 * (1 + rank)), made(), x)]
    found.append(told(step(), made(lambda s: s.replace(extra=s.extra + rank)), x))
    if stage == 0 or axis == "replicate":
        other = lambda s: s.replace(params=zerofn.tree_map(lambda p: p + rank, s.params))  # noqa: E731
        found.append(told(step(), made(other), x))
    torch.set_float32_matmul_precision(("highest", "high")[rank])
    found.append(told(step(), made(), x))
    # What is set to the default is no difference.
    torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = ("ieee", "none")[rank]
    for its in (lambda x: (x[rank : rank + 2], 2), lambda x: (x.roll(rank, 0), 4)):
        zerofn.compile(step(rows=its))(made(), x)
    zerofn.compile(step(rows=lambda batch: (batch["x"], batch["n"])))(made(), {"x": x, "n": 3 + rank})
    return found


@pytest.mark.part(stage=[3])
@pytest.mark.parametrize(("stage", "axis"), [(3, "data"), (0, "data"), (1, "replicate")])
def test_numbers_values_and_settings_that_differ_are_told_on_all_ranks(ranks, stage, axis):
    here, there = ranks(2, other_numbers, stage, axis)
    assert [x.split("rank ")[0] for x in here] == [x.split("rank ")[0] for x in there]
    rate, extra, *params, setting = here
    assert "bernoulli" in rate and "0.75" in rate and "0.5" in rate and f"along '{axis}' must run the same" in rate
    assert "different values of 'extra'" in extra
    assert all("different values of 'params.w'" in x for x in params)
    assert "torch.backends.cuda.matmul.fp32_precision: " in setting
