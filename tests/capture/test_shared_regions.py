"""Captures of a pipeline's step for all its ranks, which run the loss function once."""

from functools import partial

import pytest
import torch
from torch.func import functional_call

import zerofn
from tests.support.small_steps import batch_of, build
from zerofn import optim
from zerofn.capture.checked_capture import captured
from zerofn.capture.shared_regions import Regions, shared
from zerofn.comm.mesh import Mesh
from zerofn.graph.nested import graphs_of
from zerofn.parallel import pipe
from zerofn.planning.stages import as_stages
from zerofn.sharding.partition import Partition
from zerofn.sharding.shard import shard_fake

LAYERS, RANKS, MICROBATCHES = 4, 3, 4
MODEL = zerofn.skeleton(partial(build, LAYERS))
CUDA = zerofn.Machine("gpus", "cuda", 4, 8e9, 1e10, {"float32": 1e10}, link=1e12, network=1e12)
ROWS = batch_of(rows=4 * MICROBATCHES)["x"]
FACTOR = torch.tensor([2.0, 3.0])


class Count:
    """A loss function, and how often it ran."""

    def __init__(self, loss_fn):
        self.loss_fn, self.calls = loss_fn, 0

    def __call__(self, params, x):
        self.calls += 1
        return self.loss_fn(params, x)


def mean(params, x):
    y = functional_call(MODEL, params, (x,))
    return y.square().mean()


def noisy(params, x):
    y = torch.nn.functional.dropout(functional_call(MODEL, params, (x,)), 0.5)
    return (y.square().sum() * FACTOR.prod(), torch.ones_like(x[:, 0]).sum()), {"rows": x.shape[0], "top": y.amax()}


def on_all_ranks(train_step, regions, **options):
    """The graphs of all ranks, as text, with the shapes of their values."""
    mesh, fake = Mesh.planned({"pipe": RANKS, "data": 2}), CUDA.fake()
    cuts = pipe(MODEL, mesh, mean, ROWS[:4], schedule="1f1b", machine=CUDA)
    for each in as_stages(mesh):
        with fake(), shared(regions):
            first = zerofn.TrainState.create(params=dict(MODEL.named_parameters()), tx=optim.adamw(1e-3), seed=0)
            state = shard_fake(first, Partition.zero(each, cuts=cuts, **options), None)
            program, _ = captured(train_step, state, fake.like(ROWS))
        yield [
            (gm.code, [(x.meta.get("phase"), str(x.meta.get("val"))) for x in gm.graph.nodes])
            for gm in graphs_of(program.gm)
        ]


def step_with(loss_fn, has_aux=False):
    def train_step(state, x):
        vg = state.value_and_grad(loss_fn, has_aux=has_aux)
        loss, grads = zerofn.accumulate(vg, MICROBATCHES)(x)
        return state.apply_gradients(grads), loss

    return train_step


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("loss_fn", "has_aux"), [(mean, False), (noisy, True)])
def test_all_ranks_have_the_graphs_of_captures_of_their_own(loss_fn, has_aux, stage):
    alone, once = Count(loss_fn), Count(loss_fn)
    expected = list(on_all_ranks(step_with(alone, has_aux), None, stage=stage))
    found = list(on_all_ranks(step_with(once, has_aux), Regions(), stage=stage))
    assert found == expected
    assert alone.calls == RANKS and once.calls == 1


def test_a_region_that_reads_other_values_of_the_step_runs_on_every_rank():
    def train_step(state, x):
        scale = x.mean()
        once.loss_fn = lambda params, x: mean(params, x) * scale
        loss, grads = zerofn.accumulate(state.value_and_grad(once), MICROBATCHES)(x)
        return state.apply_gradients(grads), loss

    once = Count(mean)
    assert list(on_all_ranks(train_step, Regions(), stage=1)) == list(on_all_ranks(train_step, None, stage=1))
    assert once.calls == 2 * RANKS
