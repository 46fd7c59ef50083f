"""Stages that write copies of buffers: batch norm whose running statistics a loss function returns."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import zerofn
from tests.support import pipe_steps
from tests.support.pipe_steps import LAYERS, WIDTH, cross_entropy, embedded, layer, logits
from tests.support.same import assert_same_trees
from zerofn.comm.mesh import Mesh


def step(state, batch):
    """All statistics are copied before the first layer, and each is written behind a layer of its own."""

    def loss_fn(params, batch):
        found, x = {k: v.clone() for k, v in state.extra.items()}, embedded(params, batch)
        for i in range(LAYERS):
            x = layer(params, i, x)
            x = F.batch_norm(x.flatten(0, 1), found[f"mean.{i}"], found[f"var.{i}"], training=True).view_as(x)
        return cross_entropy(logits(params, x, ()), batch), found

    (loss, found), grads = zerofn.accumulate(state.value_and_grad(loss_fn, has_aux=True), 3)(batch)
    return state.apply_gradients(grads, extra={k: x[-1] for k, x in found.items()}), loss


def with_statistics(stage):
    start = {
        f"{what}.{i}": torch.full((WIDTH,), float(what == "var")) for i in range(LAYERS) for what in ("mean", "var")
    }
    extra = {k: x.double() for k, x in start.items()}
    found, want = pipe_steps.both("1f1b", 3, stage, step=step, create={"extra": extra})
    assert_same_trees(found, want)
    assert all(not torch.equal(found[1][f"extra.{k}"], x) for k, x in extra.items())


def test_statistics_of_every_stage_are_those_of_the_uncut_step(ranks):
    ranks(2, with_statistics, 3)


def test_pipe_takes_a_loss_that_copies_buffers():
    block = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))  # noqa: E731
    model = zerofn.skeleton(lambda: nn.Sequential(*(block() for _ in range(4))))

    def loss_fn(params, x):
        buffers = {k: v.clone() for k, v in model.named_buffers()}
        return functional_call(model, (params, buffers), (x,)).square().mean()

    mesh = Mesh.planned({"pipe": 2})
    cuts = zerofn.parallel.pipe(model, mesh, loss_fn, torch.randn(8, WIDTH), schedule="1f1b", microbatches=4)
    assert set(cuts) == {name for name, _ in model.named_parameters()}
