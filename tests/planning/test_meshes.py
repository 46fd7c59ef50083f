"""Plans on meshes that are not there, beside real ranks on such meshes; and which mesh is named the fastest."""

import dataclasses
import json
import math
from collections import Counter
from functools import partial

import pytest
import torch
from torch.func import functional_call

import zerofn
from benchmarks.mesh.float64_models import build as build_llama
from tests.support.small_steps import WIDTH, batch_of, build, step_with, train_step_of, unit_of
from zerofn import optim
from zerofn.comm.axes import BETWEEN
from zerofn.comm.mesh import Mesh
from zerofn.comm.mesh_groups import axes_along
from zerofn.comm.transport import SentBytes
from zerofn.cost.machine import KNOWN, machine_of
from zerofn.job.in_flight import pending
from zerofn.parallel import context, split_sequence, tensor
from zerofn.planning.asked import Asked, Step
from zerofn.planning.meshes import meshes
from zerofn.planning.plan_variants import _usual_cuts
from zerofn.planning.planner import plan_step
from zerofn.planning.wide_table import wide_cells
from zerofn.util.process import the

pytestmark = pytest.mark.slow  # whole tables of meshes

NORMED = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))
LAYERS = 4
PLAN = {str(3 * k): ("colwise", "rowwise")[k % 2] for k in range(LAYERS)}
HERE = zerofn.Machine("here", "cpu", 4, 8e9, 1e10, {"float32": 1e10}, link=1e9, network=1e8, host_memory=32e9,
                      host_rate=4e10)  # fmt: skip


def init_state():
    return zerofn.TrainState.create(params=dict(build(LAYERS).named_parameters()), tx=NORMED)


def step_on(mesh):
    """(train step, cuts) of the multilayer perceptron on a mesh."""
    module = zerofn.skeleton(partial(build, LAYERS))
    cuts = tensor(module, mesh, PLAN) if mesh.size("tensor") > 1 else None
    return train_step_of(module), cuts


def planned(sizes, stage, precision=None, machine=HERE, **options):
    mesh = Mesh.planned(sizes)
    train_step, cuts = step_on(mesh)
    return zerofn.plan(train_step, init_state, batch_of(), mesh=mesh, cuts=cuts, machine=machine, stage=stage,
                       precision=precision, offload=None, remat=None, unit=unit_of, **options)  # fmt: skip


def told(plan):
    """What a plan says in numbers."""
    memory = plan.memory()
    return memory.peak, memory.host, memory.disk, sorted(plan.transfers().items()), plan.sent_along


def counted(mesh, step, state, batch):
    """Bytes that this rank sends in the third step, by the axis."""
    for _ in range(2):
        state, _ = step(state, batch)
    pending().wait_for_all()
    before = Counter(the(SentBytes).by_group)
    state, _ = step(state, batch)
    pending().wait_for_all()
    found = Counter()
    for group, nbytes in (the(SentBytes).by_group - before).items():
        found[BETWEEN.join(axes_along(mesh, group))] += nbytes
    return dict(found)


def real(sizes, stage, precision, **options):
    """(what the step's own plan says, bytes by axis that were sent) on this rank."""
    mesh = Mesh.make(**sizes)
    train_step, cuts = step_on(mesh)
    state = zerofn.shard(init_state, stage=stage, mesh=mesh, cuts=cuts, precision=precision, unit=unit_of, **options)
    step, batch = zerofn.compile(train_step), batch_of(mesh.batch.rank)
    return told(step.lower(state, batch)), counted(mesh, step, state, batch)


@pytest.mark.parametrize(("num_ranks", "sizes", "runs"), [
    (3, {"tensor": 3}, [(3, "bf16")]),  # 16 columns: 6, 6 and 4
    pytest.param(3, {"tensor": 3}, [(3, None)], marks=pytest.mark.whole),
    pytest.param(2, {"tensor": 2}, [(0, None), (3, "bf16")], marks=pytest.mark.whole),
    pytest.param(4, {"data": 2, "tensor": 2}, [(1, "bf16"), (3, "fp16")], marks=pytest.mark.whole),
    pytest.param(4, {"replicate": 2, "data": 2}, [(0, "bf16"), (3, None)], marks=pytest.mark.whole),
    pytest.param(4, {"data": 2, "tensor": 2}, [(0, None), (2, None)], marks=pytest.mark.whole),
    pytest.param(4, {"replicate": 2, "data": 2}, [(1, None), (2, "bf16")], marks=pytest.mark.whole),
])  # fmt: skip
def test_a_plan_is_what_the_step_on_such_a_mesh_is(ranks, num_ranks, sizes, runs):
    for stage, precision in runs:
        found = ranks(num_ranks, real, sizes, stage, precision)
        row = planned(sizes, stage, precision)[0]
        assert told(row.plan) == found[0][0], (stage, precision)
        for rank, ((*_, along), sent) in enumerate(found):
            assert along == sent, (stage, precision, rank)
            assert {name for name, size in sizes.items() if size > 1} <= set(sent)


@pytest.mark.part(precision=["bf16"])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_plan_of_state_over_all_ranks_is_what_such_a_step_is(ranks, precision):
    sizes = {"replicate": 2, "data": 2}
    (row,) = planned(sizes, "all", precision, hpz=True)
    assert row.config.stage == 3 and "hpz=True" in row.config.call() and "hpz" in row.config.label()
    for rank, (mine, sent) in enumerate(ranks(4, partial(real, hpz=True), sizes, 3, precision)):
        assert mine[-1] == sent, rank
        assert rank or told(row.plan) == mine


def test_state_over_all_ranks_needs_replicas_and_is_not_searched():
    with pytest.raises(ValueError, match="has no effect on a mesh of data=4"):
        planned({"data": 4}, 3, hpz=True)
    with pytest.raises(ValueError, match="mesh='auto', hpz=True"):
        zerofn.plan(step_on, init_state, batch_of(), mesh="auto", machine=HERE, hpz=True)


def weighed(sizes, stage):
    """(peak by the allocator, peak by the step's own plan) of a step on this rank."""
    mesh = Mesh.make(**sizes)
    train_step, cuts = step_on(mesh)
    state = zerofn.shard(init_state, stage=stage, mesh=mesh, cuts=cuts, unit=unit_of)
    step, batch = zerofn.compile(train_step), batch_of(mesh.batch.rank)
    for _ in range(2):
        state, _ = step(state, batch)
    (state, _), found = step.profile(state, batch)
    return found.peak, step.lower(state, batch).memory().total


@pytest.mark.part(num_ranks=[2])
@pytest.mark.parametrize(("num_ranks", "sizes"), [(2, {"tensor": 2}), (4, {"data": 2, "tensor": 2})])
def test_memory_is_what_was_planned(ranks, num_ranks, sizes):
    total = planned(sizes, 3)[0].plan.memory().total
    for rank, (measured, own) in enumerate(ranks(num_ranks, weighed, sizes, 3)):
        assert measured == pytest.approx(own, rel=0.01), rank
        assert rank or own == total


def llama(mesh):
    """A model with fewer heads of keys and values than ranks, cut by its own plan."""
    build_it = partial(build_llama, "llama, 2 key heads")
    model = zerofn.skeleton(build_it)
    cuts = tensor(model, mesh)

    def init():
        return zerofn.TrainState.create(params=dict(build_it().named_parameters()), tx=optim.sgd(0.1))

    train_step = step_with(lambda params, x: functional_call(model, params, (), {"input_ids": x, "labels": x}).loss)

    return train_step, init, cuts


IDS = torch.arange(18).view(2, 9)


def llama_on_ranks():
    mesh = Mesh.make(tensor=4)
    train_step, init, cuts = llama(mesh)
    step, state = zerofn.compile(train_step), zerofn.shard(init, stage=3, mesh=mesh, cuts=cuts)
    return told(step.lower(state, IDS)), counted(mesh, step, state, IDS)


@pytest.mark.whole
def test_ranks_with_the_same_heads_send_along_the_tensor_axis_too(ranks):
    mesh = Mesh.planned({"tensor": 4})
    train_step, init, cuts = llama(mesh)
    row = zerofn.plan(train_step, init, IDS, mesh=mesh, cuts=cuts, machine=HERE, stage=3, offload=None, remat=None)[0]
    for rank, (mine, sent) in enumerate(ranks(4, llama_on_ranks)):
        assert mine[-1] == sent and set(sent) == {"tensor"}
        assert rank or told(row.plan) == mine


def in_parts(mesh, method="ulysses"):
    """A model on parts of sequences, and this rank's part."""
    build_it = partial(build_llama, "llama")
    model = zerofn.skeleton(build_it)
    if mesh.size("context") > 1:
        context(model, mesh, method=method)

    def init():
        return zerofn.TrainState.create(params=dict(build_it().named_parameters()), tx=optim.sgd(0.1))

    train_step = step_with(lambda params, x: functional_call(model, params, (), x).loss)

    tokens = torch.arange(48).view(2, 24)
    return train_step, init, split_sequence({"input_ids": tokens, "labels": tokens}, mesh)


def in_parts_on_ranks(sizes, method):
    mesh = Mesh.make(**sizes)
    train_step, init, batch = in_parts(mesh, method)
    step, state = zerofn.compile(train_step), zerofn.shard(init, stage=3, mesh=mesh)
    return told(step.lower(state, batch)), counted(mesh, step, state, batch)


@pytest.mark.parametrize(("sizes", "method"), [
    pytest.param({"data": 2, "context": 2}, "ulysses", marks=pytest.mark.whole),
    ({"context": 2}, "ring"),
    pytest.param({"context": 3}, "ring", marks=pytest.mark.whole),
    pytest.param({"context": 2}, "ulysses", marks=pytest.mark.whole),
    pytest.param({"data": 2, "context": 2}, "ring", marks=pytest.mark.whole),
])  # fmt: skip
@pytest.mark.whole
def test_sequences_in_parts_are_planned_too(ranks, sizes, method):
    """Shards lie along both axes, and attention exchanges heads, or blocks of keys and values, along one."""
    mesh = Mesh.planned(sizes)
    train_step, init, batch = in_parts(mesh, method)
    row = zerofn.plan(train_step, init, batch, mesh=mesh, machine=HERE, stage=3, offload=None, remat=None)[0]
    assert row.speed == pytest.approx(mesh.num_ranks * row.tokens / row.seconds)
    assert row.tokens * mesh.size("context") == 2 * 24
    axes = {"context", "data x context"} if "data" in sizes else {"context"}
    found = ranks(mesh.num_ranks, in_parts_on_ranks, sizes, method)
    for rank, (mine, sent) in enumerate(found):
        assert mine[-1] == sent and axes <= set(sent), rank
    most = max(
        sum(mine[0].values()) for mine, _ in found
    )  # in a ring ranks run other operations, and need more or less
    assert told(row.plan) == next(mine for mine, _ in found if sum(mine[0].values()) == most)


EXPERTS, INNER = 4, 8


def expert_params():
    draw = torch.Generator().manual_seed(0)
    up, down = (torch.randn(EXPERTS, *size, generator=draw) for size in ((WIDTH, INNER), (INNER, WIDTH)))
    return {"gate": torch.randn(EXPERTS, WIDTH, generator=draw), "experts": {"up": up, "down": down}}


def init_experts():
    return zerofn.TrainState.create(params=expert_params(), tx=optim.adamw(1e-3))


def experts_on(mesh):
    """(train step, cuts) of a layer of experts of one's own."""
    cuts = zerofn.moe.cuts(expert_params(), mesh) if mesh.size("expert") > 1 else None

    def expert(p, rows):
        return torch.tanh(rows @ p["up"]) @ p["down"]

    def loss_fn(params, x):
        axis = "expert" if mesh.size("expert") > 1 else None
        y, aux = zerofn.moe.layer(params, x, torch.vmap(expert), k=2, capacity=1.5, axis=axis)
        return y.square().mean() + 0.01 * aux.balance

    train_step = step_with(loss_fn)

    return train_step, cuts


def rows_of_experts(rank=0):
    return torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(rank))


def experts_on_ranks(sizes):
    mesh = Mesh.make(**sizes)
    train_step, cuts = experts_on(mesh)
    batch = rows_of_experts(mesh.batch.rank)
    step, state = zerofn.compile(train_step), zerofn.shard(init_experts, stage=3, mesh=mesh, cuts=cuts)
    return told(step.lower(state, batch)), counted(mesh, step, state, batch)


@pytest.mark.part(sizes=[{"data": 2, "expert": 2}])
@pytest.mark.parametrize("sizes", [{"expert": 2}, {"data": 2, "expert": 2}])
def test_experts_of_ranks_are_planned_too(ranks, sizes):
    mesh = Mesh.planned(sizes)
    train_step, cuts = experts_on(mesh)
    options = {"machine": HERE, "stage": 3, "offload": None, "remat": None}
    row = zerofn.plan(train_step, init_experts, rows_of_experts(), mesh=mesh, cuts=cuts, **options)[0]
    for rank, (mine, sent) in enumerate(ranks(mesh.num_ranks, experts_on_ranks, sizes)):
        assert mine[-1] == sent and {"expert"} <= set(sent), rank
        assert rank or told(row.plan) == mine


WIDE = 512


def two_matrices():
    return torch.nn.Sequential(torch.nn.Linear(WIDE, WIDE, False), torch.nn.Linear(WIDE, WIDE, False))


def state_of_two_matrices():
    return zerofn.TrainState.create(params=dict(two_matrices().named_parameters()), tx=optim.adamw(1e-3))


@pytest.mark.parametrize(("sizes", "share"), [({"data": 4}, 4), ({"data": 2, "tensor": 2}, 4),
                                              ({"replicate": 2, "data": 2}, 2)])  # fmt: skip
def test_state_of_slices_is_that_of_the_closed_form(sizes, share):
    """Master and two moments, 12 bytes a parameter: slices are cut over data, and replicas keep the same."""
    mesh, module = Mesh.planned(sizes), zerofn.skeleton(two_matrices)
    cuts = tensor(module, mesh, {"0": "colwise", "1": "rowwise"}) if "tensor" in sizes else None
    train_step = step_with(lambda p, x: functional_call(module, p, (x,)).square().mean())

    table = zerofn.plan(train_step, state_of_two_matrices, torch.ones(2, WIDE), mesh=mesh, cuts=cuts, machine=HERE,
                        stage=3, offload=None, remat=None)  # fmt: skip
    assert abs(table[0].plan.memory().peak["state"] - 2 * WIDE * WIDE * 12 / share) < 64


@pytest.mark.parametrize("sizes", [{"expert": 2}, {"data": 2, "expert": 2}, {"replicate": 2, "expert": 2}])
def test_state_of_experts_is_that_of_the_closed_form(sizes):
    """12 bytes a parameter, of a rank's experts; all else is cut along data alone."""
    mesh, big = Mesh.planned(sizes), 256

    def params():
        return {"gate": torch.zeros(8, big), "experts": {"w": torch.zeros(8, big, big)}}

    def train_step(state, x):
        def loss_fn(p, x):
            return zerofn.moe.layer(p, x, lambda p, rows: rows @ p["w"], k=1, axis="expert")[0].square().mean()

        loss, grads = state.value_and_grad(loss_fn)(x)
        return state.apply_gradients(grads), loss

    def init():
        return zerofn.TrainState.create(params=params(), tx=optim.adamw(1e-3))

    table = zerofn.plan(train_step, init, torch.ones(8, big), mesh=mesh, cuts=zerofn.moe.cuts(params(), mesh),
                        machine=HERE, stage=3, offload=None, remat=None)  # fmt: skip
    data = sizes.get("data", 1)
    expected = 12 * (8 * big * big / 2 + 8 * big) / data
    assert abs(table[0].plan.memory().peak["state"] - expected) < 3 * 4 * 2048 + 64  # the gate's unit is padded


def test_only_ranks_with_other_rows_count_for_the_speed():
    both, slices = planned({"data": 4}, 3)[0], planned({"data": 2, "tensor": 2}, 3)[0]
    assert both.speed == pytest.approx(both.tokens * 4 / both.seconds)
    assert slices.speed == pytest.approx(slices.tokens * 2 / slices.seconds)


def test_the_table_names_axes():
    table = planned({"data": 2, "tensor": 2}, (0, 3))
    assert "each; data=2,tensor=2; " in table.text() and "mesh" in table.text(wide=True).splitlines()[3]
    row, along = table[0], table[0].plan.sent_along
    assert "along data" in row.plan.text() and "along tensor" in row.plan.text()
    assert json.loads(json.dumps(table.json()))["rows"][0]["plan"]["sent"] == along
    assert row.plan.sent == sum(along.values()) and "tensor" in table._repr_html_()
    assert row.config.call().startswith(
        "mesh = zerofn.Mesh.make(data=2, tensor=2); state = zerofn.shard(init_state, stage=0, mesh=mesh, "
        "cuts=zerofn.parallel.tensor(model, mesh)); "
    )
    both = row.config._replace(cuts=_usual_cuts(Mesh.planned({"expert": 2, "tensor": 2}))).call()
    assert "cuts=zerofn.parallel.tensor(model, mesh) | zerofn.moe.experts(model, mesh));" in both
    assert row.config._replace(cuts="").call().startswith("state = zerofn.shard(init_state, stage=0, mesh=zerofn.Mesh")
    assert "sent along tensor" in planned({"data": 2, "tensor": 2}, 3)[0].plan.timeline().busy
    hybrid = planned({"replicate": 2, "data": 2}, 3)[0].config
    assert "mesh=zerofn.Mesh.make(replicate=2, data=2))" in hybrid.call()
    plain = planned({"data": 4}, 3)
    assert "mesh" not in plain.text(wide=True) and "Mesh" not in plain[0].config.call()


def test_shard_takes_the_plan_of_its_own_mesh_alone():
    table = planned({"data": 1}, 3)
    assert zerofn.shard(init_state, stage="auto", plan=table, unit=unit_of).params.spec.stage == 3
    with pytest.raises(ValueError, match=r"for 4 ranks, but this job has 1"):
        zerofn.shard(init_state, stage="auto", plan=planned({"data": 2, "tensor": 2}, 3), unit=unit_of)


def taken():
    table = planned({"data": 1, "replicate": 2}, 3)
    with pytest.raises(ValueError, match=r"recommends a different mesh.*Write mesh=zerofn.Mesh.make\(replicate=2\)"):
        zerofn.shard(init_state, stage="auto", plan=table, unit=unit_of)
    mesh = Mesh.make(replicate=2)
    return zerofn.shard(init_state, stage="auto", plan=table, unit=unit_of, mesh=mesh).params.spec.mesh.size(
        "replicate"
    )


def over_all():
    mesh, table = Mesh.make(replicate=2, data=2), planned({"replicate": 2, "data": 2}, 3, hpz=True)
    with pytest.raises(ValueError, match="reads precision, offload, hpz and wire from the plan"):
        zerofn.shard(init_state, stage="auto", plan=table, unit=unit_of, mesh=mesh, hpz=True)
    params = zerofn.shard(init_state, stage="auto", plan=table, unit=unit_of, mesh=mesh).params
    return params.spec.partition.again is not None


def test_shard_cuts_the_state_as_the_plan_recommends(ranks):
    assert ranks(4, over_all) == [True] * 4


def test_shard_names_the_mesh_that_is_recommended(ranks):
    assert ranks(2, taken) == [2, 2]


@pytest.mark.parametrize(("options", "said"), [
    ({"mesh": {"data": 3, "tensor": 2}, "world": 8}, "data 3 x tensor 2 makes 6 ranks, but the job has 8"),
    ({"mesh": {"dta": 2}}, "axis 'dta' does not exist.*did you mean 'data'"),
    ({"mesh": {"data": 2, "tensor": 2}}, "no leaf is cut over it"),
    ({"mesh": "all"}, "mesh='all'.*or 'auto'"),
    ({"mesh": Mesh.planned({"data": 4}), "world": 8}, "has 4 ranks, but world is 8"),
    ({"machine": "2 x H100-8", "world": 17}, "2 x H100-8 has 16 devices"),
    ({"machine": "0 x H100-8"}, "has no nodes"),
    ({"machine": "2 x H100-9"}, "did you mean 'H100-8'"),
    ({"mesh": "auto", "cuts": {}}, "every mesh needs different cuts"),
])  # fmt: skip
def test_bad_input(options, said):
    with pytest.raises((TypeError, ValueError), match=said):
        zerofn.plan(step_on(Mesh.planned({"data": 1}))[0], init_state, batch_of(), **options)


def test_what_auto_needs_is_told():
    with pytest.raises(TypeError, match="function of a mesh that returns"):
        zerofn.plan(lambda mesh: step_on(mesh)[0], init_state, batch_of(), mesh="auto", machine=HERE)
    with pytest.raises(ValueError, match="size of -1. Write the number of ranks"):
        Mesh.planned({"data": -1})


def test_nodes_are_counted():
    several = machine_of("8 x H100-8")
    assert (several.nodes, several.ranks, several.name) == (8, 8, "8 x H100-8")
    assert several.link == KNOWN["H100-8"].link
    table = zerofn.plan(step_on(Mesh.planned({"data": 1}))[0], init_state, batch_of(), machine="3x4090", stage=3,
                        offload=None, precision=None, remat=None)  # fmt: skip
    assert table.world == 3 and table[0].config.call().endswith("machine='3x4090')")


def test_meshes_are_enumerated():
    def shape(*sizes):
        return dict(zip(("expert", "context", "tensor"), sizes, strict=True))

    def found(world, per_node, *shapes):
        every = meshes(world, per_node, [shape(*sizes) for sizes in shapes])
        return [tuple(n for name, n in x.items() if name != "pipe" or n > 1) for x in every]

    tensor = [(1, 1, n) for n in (1, 2, 4, 8)]
    assert found(8, 8, *tensor) == [(1, 8, 1, 1, 1), (1, 4, 1, 1, 2), (1, 2, 1, 1, 4), (1, 1, 1, 1, 8)]
    assert found(16, 8, (1, 1, 1), (1, 1, 4), (1, 1, 8)) == [
        (1, 16, 1, 1, 1), (2, 8, 1, 1, 1), (1, 4, 1, 1, 4), (2, 2, 1, 1, 4), (1, 2, 1, 1, 8)
    ]  # fmt: skip
    assert found(12, 8, (1, 1, 1), (1, 1, 2)) == [(1, 12, 1, 1, 1), (1, 6, 1, 1, 2)]
    assert found(16, 8, (2, 2, 2), (16, 1, 1), (3, 1, 1)) == [(1, 2, 2, 2, 2), (1, 1, 16, 1, 1)]
    for sizes in meshes(64, 8, [shape(e, c, t) for e in (1, 2) for c in (1, 2, 4) for t in (1, 8)]):
        assert list(sizes) == ["pipe", "replicate", "data", "expert", "context", "tensor"]
        assert math.prod(sizes.values()) == 64


def auto(machine=HERE, make=step_on, world=None, **options):
    return zerofn.plan(make, init_state, batch_of(), mesh="auto", machine=machine, world=world, unit=unit_of, **options)


def test_the_fastest_mesh_that_fits_is_named():
    table = auto(dataclasses.replace(HERE, nodes=2))
    assert {row.config.grid for row in table} == {
        "data=8", "replicate=2,data=4", "data=4,tensor=2", "replicate=2,data=2,tensor=2", "data=2,tensor=4"
    }, table.left_out  # fmt: skip
    speeds = [row.speed for row in table]
    assert all(row.fits for row in table) and speeds == sorted(speeds, reverse=True)
    assert table.best.speed >= 0.98 * speeds[0] and table.best.config.call() in table.text(wide=True)
    assert {row.config.stage for row in table} == {1}  # 3 sends more
    for said in ("left out: tensor 8: more ranks than a node", "left out: replicate 4, 8", "left out: stages 0 and 2"):
        assert said in " ".join(table.text().split()), said
    assert json.loads(json.dumps(table.json()))["left_out"] == table.left_out


@pytest.mark.whole
def test_slow_links_between_nodes_keep_gathers_within_one():
    """Stage 3 gathers all parameters twice a step; replicas send a shard's gradient between nodes, and that once."""
    rows = {row.config.grid: row for row in auto(dataclasses.replace(HERE, nodes=2, network=1e6), stage=3)}
    assert rows["replicate=2,data=4"].seconds < rows["data=8"].seconds
    outer = [rows[x].plan.timeline().busy for x in ("replicate=2,data=4", "data=8")]
    assert outer[0]["sent along replicate"] < 0.5 * outer[1]["sent"]


@pytest.mark.whole
def test_shards_are_cut_over_replicas_where_they_do_not_fit_without():
    two_nodes = dataclasses.replace(HERE, nodes=2, network=1e6)
    sizes = {"replicate": 2, "data": 4}
    least = planned(sizes, 3)[0].needs.device
    for memory, tried in ((least, {False}), (least - 1, {False, True})):
        rows = [x for x in auto(two_nodes, memory=memory, stage=3, remat=None) if x.config.sizes == sizes]
        assert {row.config.again for row in rows} == tried
        assert {wide_cells(row)[2] for row in rows} == {"3 hpz" if hpz else "3" for hpz in tried}
    away = auto(two_nodes, memory=least - 1, stage=3, remat=None, offload=zerofn.Offload(params="nvme"))
    assert not any(row.config.again for row in away)  # it has no effect beside offloaded parameters


@pytest.mark.whole
def test_a_higher_stage_is_tried_where_a_lower_one_has_too_little():
    lower, higher = (planned({"data": 2}, stage)[0].needs.device for stage in (1, 3))
    assert higher < lower
    for memory, stages in ((lower, {1}), (lower - 1, {1, 3})):
        rows = [row for row in auto(world=2, memory=memory) if row.config.grid == "data=2"]
        assert {row.config.stage for row in rows} == stages
        assert {row.config.stage for row in rows if row.fits} == {max(stages)}


def with_dropout(mesh):
    return train_step_of(build(12, dropout=0.1)), None


@pytest.mark.whole
def test_a_step_is_captured_once_for_all_ways_to_recompute():
    """As if each were planned alone."""
    mesh = Mesh.planned({"replicate": 1, "data": 2, "tensor": 1})
    params = dict(build(12).named_parameters())
    given = (lambda: zerofn.TrainState.create(params=params, tx=NORMED), batch_of())
    options = {"machine": HERE, "stage": 3, "precision": None, "offload": None, "unit": unit_of, "rows": 512}
    whole = zerofn.plan(with_dropout(mesh)[0], *given, mesh=mesh, remat=None, **options)[0].needs.device
    options["memory"] = whole // 3
    table = zerofn.plan(with_dropout, *given, mesh="auto", world=2, **options)
    assert {row.config.remat for row in table} == {None, "auto", "full"}
    for row in table:
        alone = zerofn.plan(with_dropout(mesh)[0], *given, mesh=mesh, remat=row.config.remat, **options)[0]
        assert told(alone.plan) == told(row.plan) and alone.seconds == row.seconds and alone.lacks == row.lacks


def test_what_does_not_fit_says_what_is_missing():
    whole = auto(world=2, remat=None)
    least = min(row.needs.device for row in whole)
    tight = auto(world=2, remat=None, memory=least)
    assert [row.fits for row in tight].count(True) >= 1 and not tight[-1].fits
    assert all(row.fits or "too little" in row.lacks for row in tight)
    assert tight.best.needs.device <= least


@pytest.mark.whole
def test_more_ranks_than_a_node_has_share_layers_only_where_nothing_fits_else():
    """Also where the drives and the host have nothing to give."""
    pair = dataclasses.replace(HERE, ranks=2, nodes=2, disk=0.0)
    needs = {row.config.grid: row.needs.device for row in auto(pair, remat=None, stage=3)}
    assert not any("tensor=4" in grid for grid in needs)
    wide = auto(pair, remat=None, stage=3, memory=min(needs.values()) - 1)
    assert any("tensor=4" in row.config.grid for row in wide)


def test_a_mesh_that_the_model_cannot_take_is_a_sentence():
    def make(mesh):
        if mesh.size("tensor") == 4:
            raise ValueError("6 heads cannot be shared by 4 ranks")
        return step_on(mesh)

    table = auto(make=make, world=4)
    assert "tensor 4: 6 heads cannot be shared by 4 ranks" in table.left_out
    assert {row.config.grid for row in table} == {"data=4", "data=2,tensor=2"}
    plain = auto(make=lambda mesh: (step_on(Mesh.planned({"data": 1}))[0], None), world=4)
    assert any(x.startswith("tensor 2, 4: no leaf is cut over it") for x in plain.left_out)
    assert {row.config.grid for row in plain} == {"data=4"}


def parts_on(mesh):
    train_step, _, batch = in_parts(mesh)
    return train_step, None, batch


def parts_auto(make, **options):
    init, batch = in_parts(Mesh.planned({"data": 1}))[1:]
    whole = {k: x for k, x in batch.items() if k in ("input_ids", "labels")}
    given = {"mesh": "auto", "world": 2, "machine": HERE, "stage": 3, "offload": None, **options}
    return zerofn.plan(make, init, whole, **given)


def test_sequences_are_cut_where_whole_ones_do_not_fit():
    """And nowhere else."""
    there = parts_auto(parts_on)
    assert not any("context" in row.config.sizes for row in there)
    assert any(x.startswith("context 2: whole sequences fit") for x in there.left_out), there.left_out
    tight = parts_auto(parts_on, memory=min(row.needs.device for row in there) - 1)
    rows = {row.config.grid: row for row in tight if row.config.remat is None}
    assert set(rows) == {"data=2", "context=2"}, tight
    assert not rows["data=2"].fits and rows["context=2"].fits
    assert rows["context=2"].tokens * 2 == rows["data=2"].tokens
    assert (
        "zerofn.parallel.context(model, mesh); batch = zerofn.parallel.split_sequence(batch, mesh); state"
        in rows["context=2"].config.call()
    )


@pytest.mark.whole  # test_sequences_are_cut_where_whole_ones_do_not_fit says why axes are left out
def test_a_batch_that_is_not_cut_is_told():
    def make(mesh):
        return in_parts(mesh)[0], None

    memory = min(row.needs.device for row in parts_auto(make)) - 1
    found = parts_auto(make, memory=memory)
    assert any(x.startswith("context 2: the batch was not split along the sequence") for x in found.left_out)


@pytest.mark.whole
def test_rows_of_one_batch_for_all_ranks_may_be_cut():
    """A rank has more rows where fewer ranks have rows of their own."""

    def make(mesh):
        train_step, _, batch = in_parts(mesh)
        longer = {k: x.repeat(mesh.size("context"), *[1] * (x.dim() - 1)) for k, x in batch.items()}
        return train_step, None, longer

    found = parts_auto(make, memory=min(row.needs.device for row in parts_auto(make)) - 1)
    assert not any("not split along the sequence" in x for x in found.left_out)
    assert any("context" in row.config.sizes for row in found)


def test_what_is_there_otherwise_is_planned():
    def bad(state, batch):
        raise ValueError("it cannot be")

    mesh = Mesh.planned({"data": 2})
    step = Step(bad, init_state, batch_of(), unit=unit_of, otherwise=lambda: step._replace(train_step=step_on(mesh)[0]))
    found = plan_step(step, mesh, HERE, HERE, Asked(3, None, None, None))
    assert [row.fits for row in found] == [True]
    with pytest.raises(ValueError, match="it cannot be"):
        plan_step(step._replace(otherwise=None), mesh, HERE, HERE, Asked(3, None, None, None))


@pytest.mark.whole
def test_experts_are_shared_where_a_model_has_them():
    found = zerofn.plan(experts_on, init_experts, rows_of_experts(), mesh="auto", world=4, machine=HERE)
    grids = {row.config.grid for row in found}
    assert {"data=4", "data=2,expert=2", "expert=4"} <= grids, found.left_out
    (row,) = {row.config.call() for row in found if row.config.grid == "expert=4"}
    assert "cuts=zerofn.moe.experts(model, mesh))" in row
    assert any(x.startswith("expert 2, 4: no leaf is cut over it") for x in auto(world=4).left_out)


def test_a_step_that_is_wrong_on_every_mesh_raises():
    def make(mesh):
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        auto(make=make, world=4)


@pytest.mark.whole
def test_where_nothing_fits_it_is_tried_beside_the_device():
    gpu = dataclasses.replace(KNOWN["A100"], ranks=2, nodes=1)
    options = {"precision": None, "remat": None}
    there = auto(gpu, **options)
    assert {row.config.offload for row in there} == {None}
    tight = auto(gpu, memory=min(row.needs.device for row in there) * 3 // 4, **options)  # less than stage 3 takes
    assert {"cpu", "nvme"} <= {row.config.offload for row in tight}
