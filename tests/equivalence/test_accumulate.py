"""Which stages give each other's bits with several microbatches: those that reduce as often."""

import functools

import pytest
import torch
from torch import nn
from torch.func import functional_call

import zerofn
from tests.support.same import assert_same_trees
from tests.support.some import some_of
from zerofn import optim
from zerofn.comm.transport import SentBytes
from zerofn.util.process import the


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 24))


def rows(rank):
    return torch.randn(8, 24, generator=torch.Generator().manual_seed(rank))


def started(stage, num_microbatches, reduce=None, tx=None, mesh=None):
    """(state, compiled step)"""
    net = model()

    def loss_fn(params, x):
        return functional_call(net, params, (x,)).square().mean()

    def step(state, x):
        loss, grads = zerofn.accumulate(state.value_and_grad(loss_fn), num_microbatches, reduce=reduce)(x)
        return state.apply_gradients(grads), loss

    init = lambda: zerofn.TrainState.create(params=dict(model().named_parameters()), tx=tx or optim.adamw(1e-2))  # noqa: E731
    return zerofn.shard(init, stage=stage, mesh=mesh), zerofn.compile(step)


def trained(*args):
    state, run = started(*args)
    for _ in range(3):
        state, _ = run(state, rows(zerofn.rank()))
    return zerofn.unshard(state.params)


def compare(num_microbatches, groups):
    found = {stage: trained(stage, num_microbatches) for stage in range(4)}
    for first, *others in groups:
        for stage in others:
            assert_same_trees(found[stage], found[first], f"stage {stage} beside {first}")
    for name, x in found[0].items():  # to rounding, which AdamW's division enlarges
        torch.testing.assert_close(found[3][name], x, rtol=1e-5, atol=1e-6)


@pytest.mark.part(size=[2], num_microbatches=[4])
@pytest.mark.parametrize("size, num_microbatches", [(1, 4), (2, 1), (2, 4)])
def test_stages_that_reduce_as_often_give_the_same_bits(ranks, size, num_microbatches):
    alike = [(0, 1, 2, 3)] if size == 1 or num_microbatches == 1 else [(0, 1), (2, 3)]
    ranks(size, compare, num_microbatches, alike)


def plain(size, num_microbatches, reduce):
    """The same in torch alone, with sums in the order in which ranks and microbatches are to be summed."""
    net = model()
    update = torch.optim.SGD(net.parameters(), lr=1e-2)
    for _ in range(3):
        found = [[_gradients(net, x, size) for x in rows(r).chunk(num_microbatches)] for r in range(size)]
        if reduce == "step":
            sums = [[functools.reduce(torch.add, x) for x in zip(*mine, strict=True)] for mine in found]
            sums = [functools.reduce(torch.add, x) for x in zip(*sums, strict=True)]
        else:
            each = [[functools.reduce(torch.add, x) for x in zip(*ms, strict=True)] for ms in zip(*found, strict=True)]
            sums = [functools.reduce(torch.add, x) for x in zip(*each, strict=True)]
        for p, g in zip(net.parameters(), sums, strict=True):
            p.grad = g
        update.step()
    return dict(net.named_parameters())


def _gradients(net, x, size):
    loss = net(x).square().mean()
    return torch.autograd.grad(loss, list(net.parameters()), torch.tensor(1.0 / (size * (8 // len(x)))))


def with_reduce(reduce):
    want = plain(zerofn.world_size(), 4, reduce)
    for stage in some_of(range(4), 1, 3):
        found = trained(stage, 4, reduce, optim.sgd(1e-2))
        assert_same_trees(found, {k: x.detach() for k, x in want.items()}, f"stage {stage}")


def sent(stage, reduce, mesh):
    """Bytes of a step, planned and sent, and the elements of units."""
    state, run = started(stage, 4, reduce, mesh=mesh)
    plan, before = run.lower(state, rows(zerofn.rank())), the(SentBytes).by_group.total()
    run(state, rows(zerofn.rank()))
    assert the(SentBytes).by_group.total() - before == plan.sent
    return plan.sent, sum(unit.size for unit in state.params.layout.units)


def reduced_less_often(stage, **axes):
    """Of each further microbatch gradients are reduced, and what is gathered of their sums is gathered once."""
    mesh = zerofn.Mesh.make(**axes) if axes else None
    (often, units), (once, _) = sent(stage, "microbatch", mesh), sent(stage, "step", mesh)
    assert sent(stage, None, mesh)[0] == (often if stage > 1 else once)
    assert often == once + (4 - 1) * units // 2 * 4  # of which a rank sends half
    return once


def test_gradients_that_are_reduced_once_are_sent_once(ranks):
    assert len(set(ranks(2, reduced_less_often, 3))) == 1


@pytest.mark.part(stage=[1, 3])
@pytest.mark.parametrize("stage, axes", [(0, {}), (1, {}), (3, {"replicate": -1, "data": 1})])
def test_sums_of_gradients_are_gathered_once(ranks, stage, axes):
    ranks(2, functools.partial(reduced_less_often, stage, **axes))


@pytest.mark.parametrize("reduce", ["Step", 1, True])
def test_another_reduce_is_refused(reduce):
    with pytest.raises(ValueError, match="accumulate: reduce must be 'step', 'round', 'microbatch' or None"):
        zerofn.accumulate(zerofn.value_and_grad(torch.sum), 2, reduce=reduce)


@pytest.mark.part(size=[2], reduce=["step"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("reduce", ["step", "microbatch"])
def test_with_reduce_all_stages_give_the_bits_of_plain_sums_in_that_order(ranks, size, reduce):
    ranks(size, with_reduce, reduce)
