"""Plans of pipelines that are not there, beside real ranks and the simulation of their schedule."""

import dataclasses
from collections import Counter
from functools import partial

import pytest
import torch
from torch.func import functional_call

import zerofn
from tests.support.small_steps import WIDTH, batch_of, build
from zerofn import optim
from zerofn.comm.mesh import Mesh
from zerofn.graph import liveness
from zerofn.graph.alias import roots
from zerofn.graph.nested import graphs_of
from zerofn.parallel import pipe
from zerofn.planning.meshes import slower_stages
from zerofn.planning.plan_row import Config, Estimate, Needs, OfStages, Pipelined, Row
from zerofn.planning.plan_variants import _usual_cuts
from zerofn.schedules import make, simulate

LAYERS, MICROBATCHES = 4, 4
HERE = zerofn.Machine("here", "cpu", 4, 8e9, 1e10, {"float32": 1e10}, link=1e9, network=1e8, host_memory=32e9,
                      host_rate=4e10, launch=1e-5)  # fmt: skip
OPTIONS = {"machine": HERE, "stage": 3, "offload": None, "precision": None, "remat": None}


def init_state():
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))
    return zerofn.TrainState.create(params=dict(build(LAYERS).named_parameters()), tx=tx)


def batch():
    return batch_of(rows=4 * MICROBATCHES)["x"]


# Products take most of a step; in host memory everything would take a hundred times as long.
GPUS = dataclasses.replace(HERE, name="gpus", device="cuda", flops={"float32": 1e10, "bfloat16": 4e10}, host_rate=4e8,
                           host_link=1e9, link=1e12, network=1e12, launch=0.0, latency=0.0)  # fmt: skip
MODEL = zerofn.skeleton(partial(build, LAYERS))


def loss_fn(params, x):
    return functional_call(MODEL, params, (x,)).square().mean()


def train_step(state, x):
    loss, grads = zerofn.accumulate(state.value_and_grad(loss_fn), MICROBATCHES)(x)
    return state.apply_gradients(grads), loss


def cuts_on(mesh, **options):
    """The multilayer perceptron in two halves."""
    halves = {"schedule": "1f1b", "stages": ["6"], "machine": HERE, **options}
    return pipe(MODEL, mesh, loss_fn, batch(), **halves)


def planned(sizes, given=True, **options):
    mesh = Mesh.planned(sizes)
    cuts = cuts_on(mesh, **options) if given else None
    return zerofn.plan(train_step, init_state, batch(), mesh=mesh, cuts=cuts, **OPTIONS)


def of_rank():
    """What the step's own plan says on this rank."""
    mesh = Mesh.make(pipe=2)
    state = zerofn.shard(init_state, stage=3, mesh=mesh, cuts=cuts_on(mesh))
    plan = zerofn.compile(train_step).lower(state, batch())
    return plan.memory().peak, plan.sent_along["pipe"]


def test_each_stage_is_planned_as_its_rank_plans_it(ranks):
    table = planned({"pipe": 2})
    (row,) = table
    found = ranks(2, of_rank)
    assert [(x.peak, x.sent) for x in row.pipelined.ranks] == found
    assert row.needs.device == max(sum(peak.values()) for peak, _ in found)
    assert sum(x.elements for x in row.pipelined.ranks) == LAYERS * WIDTH * (WIDTH + 1)
    text = " ".join(table.text().split())
    assert "1f1b, 2 stages, 4 microbatches" in text and "rank 1 along pipe: stage 1, 544 parameters" in text
    assert row.json()["pipeline"]["ranks"][1]["stages"] == (1,)


def on_gpus(sizes, precision=None, cuts=None):
    """A plan with microbatches of 512 rows."""
    rows = torch.empty(512 * MICROBATCHES, WIDTH, device="meta")
    options = {**OPTIONS, "machine": GPUS, "precision": precision}
    (row,) = zerofn.plan(train_step, init_state, rows, mesh=Mesh.planned(sizes), cuts=cuts, **options)
    return row


@pytest.mark.part(precision=["bf16"])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_two_stages_take_half_of_what_one_does_and_a_bubble(precision):
    """Ranks compute together what one rank computes alone, and so does the table of `pipe`."""
    mesh = Mesh.planned({"pipe": 2})
    rows = torch.empty(512, WIDTH, device="meta")
    halves = {"schedule": "1f1b", "stages": ["6"], "machine": GPUS, "precision": precision}
    cuts = pipe(MODEL, mesh, loss_fn, rows, **halves)
    row, alone = on_gpus({"pipe": 2}, precision, cuts), on_gpus({"data": 1}, precision).seconds
    expected = simulate(make("1f1b", 2, MICROBATCHES), cuts.pipeline.costs).makespan
    assert row.seconds == pytest.approx(expected, rel=0.03)
    assert alone / 2 < row.seconds < alone / 2 * (1 + 1 / MICROBATCHES) * 1.2  # the first stage has no I
    busy = [row.seconds * (1 - x.idle - x.exposed) for x in row.pipelined.ranks]
    assert sum(busy) == pytest.approx(alone, rel=0.03)
    told = MICROBATCHES * sum(x.f + x.i + x.w for x in cuts.stages)
    assert told == pytest.approx(alone, rel=0.05)


def test_memory_looks_at_a_piece_once_however_often_it_runs(monkeypatch):
    (row,) = planned({"pipe": 2})
    seen = Counter()
    monkeypatch.setattr(liveness, "roots", lambda graph: seen.update([graph]) or roots(graph))
    list(liveness.moments(row.plan.graph, {}))
    assert seen == Counter(gm.graph for gm in graphs_of(row.plan.graph)) and len(seen) > 2


def reduced(how):
    """The row of a step over six rounds of two microbatches, on stages that are halves."""

    def step(state, x):
        loss, grads = zerofn.accumulate(state.value_and_grad(loss_fn), 12, reduce=how)(x)
        return state.apply_gradients(grads), loss

    mesh = Mesh.planned({"pipe": 2, "data": 2})
    rows = batch_of(rows=12)["x"]
    (row,) = zerofn.plan(step, init_state, rows, mesh=mesh, cuts=cuts_on(mesh), **{**OPTIONS, "stage": 2})
    return row


@pytest.mark.whole
def test_a_plan_says_what_each_time_to_reduce_gradients_costs():
    rows = {how: reduced(how) for how in ("step", "round", "microbatch")}
    told = rows["step"].pipelined.reduces
    sent, kept = zip(*told.values(), strict=True)
    half, once = kept[0], sent[0]  # of a stage's gradients, of which a rank keeps and sends half
    assert half >= LAYERS // 2 * WIDTH * (WIDTH + 1) * 4 and list(told) == ["step", "round", "microbatch"]
    assert sent == (half // 2, 6 * once, 12 * once) and kept == (half, half + half // 2, half // 2)
    for how, row in rows.items():
        assert row.pipelined.reduces == told
        more = row.sent["data"] - rows["step"].sent["data"]
        assert more == told[how][0] - told["step"][0], how
    assert "gradients of accumulate(reduce=), of a rank: step sends" in rows["step"].pipelined.details()[-1]
    peaks = {how: row.plan.memory().peak["gradients"] for how, row in rows.items()}
    assert peaks["round"] <= peaks["step"] + 2 * half  # six rounds are no six sums


@pytest.mark.whole
def test_a_step_without_cuts_gets_those_of_pipe():
    """With the microbatches that it has, and the balance and schedule that they ask for."""
    (own,) = planned({"pipe": 2}, given=False)
    (row,) = planned({"pipe": 2}, schedule="auto", stages=None, microbatches=MICROBATCHES)
    assert own.config == row.config
    assert own.pipelined._replace(crossing=0) == row.pipelined._replace(crossing=0)  # whose parts had all rows


@pytest.mark.whole
def test_the_cuts_of_other_axes_are_an_argument_of_pipe():
    mesh = Mesh.planned({"pipe": 2, "tensor": 2})
    assert _usual_cuts(mesh).endswith("pipe(model, mesh, loss_fn, batch, cuts=zerofn.parallel.tensor(model, mesh))")
    (row,) = zerofn.plan(train_step, init_state, batch(), mesh={"pipe": 2}, **{**OPTIONS, "precision": "bf16"})
    given = f"precision='bf16', microbatches={MICROBATCHES}, machine=machine"
    assert f"parallel.pipe(model, mesh, loss_fn, batch, {given})" in row.config.call()


def test_a_model_of_fewer_parts_than_stages_is_refused():
    with pytest.raises(ValueError, match="pipe=6: the model has 4 parts that may begin a stage"):
        zerofn.plan(train_step, init_state, batch(), mesh={"pipe": 6}, **OPTIONS)


SLOWER = "pipe 2 is not recommended: data=2 is 1.30 times as fast; with 8 microbatches, ranks wait for 10% of a step"


def row_of(sizes, speed, **pipelined):
    """A row that fits, of so many tokens per second."""
    config = Config(1, None, None, None, 1, mesh=tuple(sizes.items()))
    found = Pipelined("1f1b", 8, 1.0, "compute", (), **pipelined) if pipelined else None
    estimate = Estimate(1, 2, 1.0, {}, "compute", 1)
    return Row(config, Needs(1, 0, 0), "", None, tokens=speed, estimate=estimate, pipelined=found)


@pytest.mark.parametrize(("speed", "crossing", "told"), [
    (100, 0.1, [f"{SLOWER}."]),
    (100, 0.6, [f"{SLOWER}; layers are small: sending the output of one takes 60% of its forward pass."]),
    (130, 0.6, []),
])  # fmt: skip
def test_a_faster_mesh_than_one_with_stages_is_told_with_the_reason(speed, crossing, told):
    rank = OfStages((0,), 1, {}, 0.1, 0.0, 1)
    staged = row_of({"pipe": 2}, speed, crossing=crossing)
    staged = dataclasses.replace(staged, pipelined=staged.pipelined._replace(ranks=(rank, rank)))
    assert list(slower_stages([staged, row_of({"data": 2}, 130)])) == told


def test_auto_says_where_stages_are_not_tried():
    shallow = {**OPTIONS, "machine": dataclasses.replace(HERE, nodes=2, ranks=1), "stage": 1}
    table = zerofn.plan(lambda mesh: (train_step, None), init_state, batch(), mesh="auto", **shallow)
    assert {row.config.grid for row in table} == {"data=2", "pipe=2"}
    once = lambda state, x: (state.apply_gradients(state.value_and_grad(loss_fn)(x)[1]), None)  # noqa: E731
    told = zerofn.plan(lambda mesh: (once, None), init_state, batch(), mesh="auto", **shallow).left_out
    waits = "pipe 2: ranks would wait for 50% of a step with 1 microbatch; it is tried with 4 or more microbatches."
    assert waits in told
    near = {**OPTIONS, "stage": 1}
    told = zerofn.plan(lambda mesh: (once, None), init_state, batch(), mesh="auto", world=2, **near).left_out
    assert any(x.startswith("pipe 2: stages within a node") and "--mesh pipe=2,data=1" in x for x in told)
