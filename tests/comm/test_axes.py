"""The table of axes: what each one is, and that an axis of a test's own is what its row says."""

import ast

import pytest
import torch
import torch.distributed as dist

import zerofn
from tests.support.library import FILES, imported_modules, parse
from tests.support.small_steps import batch_of, build, same, state_of, train_step_of
from zerofn import tree
from zerofn.comm.axes import KINDS, AxisKind, in_batch, kind_of
from zerofn.comm.mesh import Mesh
from zerofn.geometry.cuts import equal

PROPERTIES = {
    "rows": {"replicate", "data", "expert"},
    "tokens": {"context"},
    "batch": {"replicate", "data", "expert", "context"},
    "same_batch": {"pipe", "tensor"},
    "only_rows": {"replicate", "data"},
    "replicas": {"replicate"},
    "shards": {"data", "expert", "context"},
    "shards_of_experts": {"data", "context"},
    "slices": {"pipe", "expert", "tensor"},
    "stages": {"pipe"},
    "experts": {"expert"},
    "partial": {"tensor"},
    "changes_model": {"expert", "context", "tensor"},
    "cuts": {"pipe", "expert", "tensor"},
    "prepare": {"context"},
}


def test_every_axis_is_what_it_is():
    found = {what: {name for name, kind in KINDS.items() if getattr(kind, what)} for what in PROPERTIES}
    assert found == PROPERTIES
    assert list(KINDS) == [
        "pipe",
        "replicate",
        "data",
        "expert",
        "context",
        "tensor",
    ]  # as in errors, and outermost first
    assert kind_of("rows") is KINDS["data"]  # the only axis of a DeviceMesh
    assert in_batch("replicate x tensor") and not in_batch("tensor")


def test_a_mesh_asks_the_table():
    sizes = {"pipe": 13, "replicate": 2, "data": 3, "expert": 5, "context": 7, "tensor": 11}
    mesh = Mesh.planned(sizes)
    joint = {
        what: getattr(mesh, what) for what in ("rows", "tokens", "batch", "same_batch", "replicas", "shards", "stages")
    }
    joint["shards_of_experts"] = mesh.shards_of_experts
    for what, axis in joint.items():
        assert set(axis.names) == PROPERTIES[what], what
        assert axis.name == " x ".join(name for name in sizes if name in PROPERTIES[what])
    for what in ("slices", "partial"):
        assert {axis.name for axis in getattr(mesh, what)} == PROPERTIES[what]
    assert Mesh.planned({"data": 2}).same_batch.size == Mesh.planned({"data": 2}).tokens.size == 1


# What is about one axis. All else asks `zerofn.comm.axes` for properties.
NAME_AN_AXIS = {
    "zerofn.comm.axes": "is the table",
    "zerofn.geometry.cuts": "says which stages have a leaf, along `pipe` by default",
    "zerofn.cost.pipelined": "runs the ranks of one beside each other",
    "zerofn.planning.stages": "plans the ranks of one",
    "zerofn.planning.plan_variants": "writes the call that spreads a model along one",
    "zerofn.parallel.pipe": "spreads a model along one",
    "zerofn.parallel.model_parts": "spreads a model along one",
    "zerofn.parallel.tensor_parallel": "cuts layers along one",
    "zerofn.parallel.cross_entropy": "takes slices of logits, along `tensor` by default",
    "zerofn.parallel.context": "lets models compute parts of sequences, beside slices of heads",
    "zerofn.parallel.attention": "takes parts of sequences, along `context` by default",
    "zerofn.training.diloco": "lets replicas train apart, along `replicate` by default",
    "zerofn.moe.cuts": "cuts experts along one",
    "zerofn.moe.experts": "cuts experts along one",
    "zerofn.planning.meshes": "has for each axis its own reason to try sizes of it",
}
ASK = ("axis", "size", "over", "along", "block")


def names_an_axis(module):
    names = {f"zerofn.comm.axes.{name.upper()}" for name in PROPERTIES["batch"] | PROPERTIES["same_batch"]}
    asked = (
        node.args[0]
        for node in ast.walk(parse(module))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ASK and node.args
    )
    by_word = any(isinstance(x, ast.Constant) and x.value in KINDS for x in asked)
    return by_word or any(name in names for _, name in imported_modules(module, parse(module)))


def test_few_files_name_an_axis():
    found = {module for module in FILES if names_an_axis(module)} | {"zerofn.comm.axes"}
    assert found - set(NAME_AN_AXIS) == set(), "ask for a property of zerofn.comm.axes, or say in NAME_AN_AXIS why not"
    assert set(NAME_AN_AXIS) - found == set(), "take these from NAME_AN_AXIS"


def test_a_new_axis_is_a_row_of_the_table(monkeypatch):
    with pytest.raises(TypeError, match="axis 'stage' does not exist"):
        Mesh.planned({"data": 2, "stage": 2})
    monkeypatch.setitem(KINDS, "stage", AxisKind("stage", slices="layers"))
    mesh = Mesh.planned({"data": 2, "stage": 2})
    assert (mesh.batch.name, mesh.shards.name, mesh.same_batch.name) == ("data", "data", "stage")
    assert [axis.name for axis in mesh.slices] == ["stage"] and mesh.partial == ()
    with pytest.raises(
        TypeError, match="axes are pipe, replicate, data, expert, context, tensor, stage; did you .* 'stage'"
    ):
        Mesh.planned({"stages": 2})


@pytest.mark.parametrize(
    ("partial", "sentence"),
    [
        (True, "the loss differs along 'stage': it depends on this rank's slices of '3.weight'"),
        (False, "combines a shard with a value that differs from rank to rank: it depends on this rank's own layers"),
    ],
)
def test_values_of_slices_along_a_new_axis_are_followed(monkeypatch, partial, sentence):
    """Whole leaves before the slices get gradients that differ along it."""
    monkeypatch.setitem(KINDS, "stage", AxisKind("stage", slices="layers", partial=partial))
    module, mesh = build(2), Mesh.planned({"data": 2, "stage": 2})
    cuts = {"3.weight": equal("stage", 0, 16, 2)}

    def step(state, batch):
        def loss(params, batch):
            return (batch["x"] @ params["0.weight"].t() @ params["3.weight"].t()).square().mean()

        value, grads = state.value_and_grad(loss)(batch)
        return state.apply_gradients(grads), value

    def init():
        return zerofn.TrainState.create(params=dict(module.named_parameters()), tx=zerofn.optim.sgd(0.1))

    with pytest.raises(zerofn.CaptureError, match=sentence):
        zerofn.plan(step, init, batch_of(), mesh=mesh, cuts=cuts, stage=3, offload=None, precision=None, remat=None)


def trained_along():
    """Parameters after two compiled steps: along axes of the table, and along new ones with the same properties."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KINDS, "pool", AxisKind("pool", rows=True, shards=True))
        patch.setitem(KINDS, "twin", AxisKind("twin", rows=True, replicas=True))
        for name in ("data", "pool", "replicate", "twin"):
            mesh, module = Mesh.make(**{name: 2}), build(2)
            state, step = state_of(module, 3, mesh=mesh), zerofn.compile(train_step_of(module))
            for k in range(2):
                state, _ = step(state, batch_of(mesh.rows.rank, seed=k))
            shard = tree.leaves(state.params)[0].numel()
            found[name] = tree.leaves(zerofn.unshard(state.params)), shard, mesh.batch.rank == dist.get_rank()
    return found


def test_new_axes_train_as_those_with_their_properties(ranks):
    for found in ranks(2, trained_along):
        for new, known in (("pool", "data"), ("twin", "replicate")):
            assert same(found[new][0], found[known][0]) and found[new][1:] == found[known][1:]
            assert torch.stack([x.isfinite().all() for x in found[new][0]]).all()
        assert found["twin"][1] >= found["pool"][1] and found["pool"][2]
