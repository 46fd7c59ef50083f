"""Plans of pipelines that are not there, beside real ranks and the simulation of their schedule."""

from functools import partial

from torch.func import functional_call

import zerofn
from tests.support.small_steps import WIDTH, batch_of, build
from zerofn import optim
from zerofn.comm.mesh import Mesh
from zerofn.parallel import pipe

LAYERS, MICROBATCHES = 4, 4
HERE = zerofn.Machine("here", "cpu", 4, 8e9, 1e10, {"float32": 1e10}, link=1e9, network=1e8, host_memory=32e9,
                      host_rate=4e10, launch=1e-5)  # fmt: skip
OPTIONS = {"machine": HERE, "stage": 3, "offload": None, "precision": None, "remat": None}


def init_state():
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))
    return zerofn.TrainState.create(params=dict(build(LAYERS).named_parameters()), tx=tx)


def batch():
    return batch_of(rows=4 * MICROBATCHES)["x"]


def step_on(mesh, **options):
    """(train step, cuts) of a multilayer perceptron in two halves."""
    model = zerofn.skeleton(partial(build, LAYERS))
    loss_fn = lambda params, x: functional_call(model, params, (x,)).square().mean()  # noqa: E731

    def train_step(state, x):
        loss, grads = zerofn.accumulate(state.value_and_grad(loss_fn), MICROBATCHES)(x)
        return state.apply_gradients(grads), loss

    halves = {"schedule": "1f1b", "stages": ["6"], "machine": HERE, **options}
    return train_step, pipe(model, mesh, loss_fn, batch(), **halves) if halves["schedule"] else None


def planned(sizes, **options):
    mesh = Mesh.planned(sizes)
    train_step, cuts = step_on(mesh, **options)
    return zerofn.plan(train_step, init_state, batch(), mesh=mesh, cuts=cuts, **OPTIONS)


def of_rank():
    """What the step's own plan says on this rank."""
    mesh = Mesh.make(pipe=2)
    train_step, cuts = step_on(mesh)
    state = zerofn.shard(init_state, stage=3, mesh=mesh, cuts=cuts)
    plan = zerofn.compile(train_step).lower(state, batch())
    return plan.memory().peak, plan.sent_along["pipe"]


def test_each_stage_is_planned_as_its_rank_plans_it(ranks):
    table = planned({"pipe": 2})
    (row,) = table
    found = ranks(2, of_rank)
    assert [(x.peak, x.sent) for x in row.pipelined.ranks] == found
    assert row.needs.device == max(sum(peak.values()) for peak, _ in found)
    assert sum(x.elements for x in row.pipelined.ranks) == LAYERS * WIDTH * (WIDTH + 1)
    text = table.text()
    assert "1f1b, 2 stages, 4 microbatches" in text and "rank 1 along pipe: stage 1, 544 parameters" in text
    assert row.json()["pipeline"]["ranks"][1]["stages"] == (1,)
