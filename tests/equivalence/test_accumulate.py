"""Which stages give each other's bits with several microbatches: those that reduce as often."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

import zerofn
from tests.support.same import assert_same_trees
from zerofn import optim


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 24))


def rows(rank):
    return torch.randn(8, 24, generator=torch.Generator().manual_seed(rank))


def trained(stage, num_microbatches):
    net = model()

    def loss_fn(params, x):
        return functional_call(net, params, (x,)).square().mean()

    def step(state, x):
        loss, grads = zerofn.accumulate(state.value_and_grad(loss_fn), num_microbatches)(x)
        return state.apply_gradients(grads), loss

    init = lambda: zerofn.TrainState.create(params=dict(model().named_parameters()), tx=optim.adamw(1e-2))  # noqa: E731
    state, run = zerofn.shard(init, stage=stage), zerofn.compile(step)
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
