"""Ranks and named axes."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import zerofn
from tests.support.small_steps import batch_of, build, loss_of, same, state_of, train_step_of
from zerofn import collectives as c
from zerofn import optim, tree
from zerofn.comm import mesh
from zerofn.comm.mesh import Axis, Mesh, join


def test_one_process_needs_no_group():
    assert not dist.is_initialized()
    axis = Mesh.of(None).axis()
    assert (axis.name, axis.size, axis.rank, axis.group) == ("data", 1, 0, "")
    assert not dist.is_initialized()
    assert torch.equal(c.all_reduce(torch.ones(2), axis), torch.ones(2))


def test_bad_meshes():
    with pytest.raises(TypeError, match="expected None, a DeviceMesh or a zerofn.Mesh, got str"):
        Mesh.of("data")
    with pytest.raises(ValueError, match=r"no axis 'expert'; its axes are \['data'\]"):
        Mesh.of(None).axis("expert")
    two = Mesh((Axis("a", 1), Axis("b", 1)))
    with pytest.raises(ValueError, match=r"no axis 'data'; its axes are \['a', 'b'\]"):
        two.axis()
    assert Mesh((Axis("rows", 1),)).axis().name == "rows"


def test_axes_compare_by_name_and_size():
    assert Axis("data", 2, 0, "x") == Axis("data", 2, 1, "y") != Axis("data", 3)
    assert repr(Axis("data", 4, 1)) == "data=1/4"
    assert (
        repr(Mesh((Axis("replicate", 2, 0), Axis("data", 4, 1)))) == "Mesh(replicate: rank 0 of 2, data: rank 1 of 4)"
    )
    assert Mesh.of(mesh := Mesh((Axis("data", 1),))) is mesh


def grid():
    rank = dist.get_rank()
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "data"))
    mesh = Mesh.of(device_mesh)
    assert [(a.name, a.size, a.rank) for a in mesh.axes] == [("replicate", 2, rank // 2), ("data", 2, rank % 2)]
    x = torch.tensor([float(rank)])
    sums = [c.all_reduce(x, mesh.axis(name)).item() for name in ("replicate", "data")]
    state = zerofn.shard({"params": {"w": torch.arange(5000.0)}}, stage=3, mesh=device_mesh)
    shard = state["params"].shards[0].numel()
    assert torch.equal(zerofn.unshard(state)["params"]["w"], torch.arange(5000.0))
    plain = Mesh.of(init_device_mesh("cpu", (4,)))
    return sums, shard, (plain.axis().size, plain.axis().rank)


def test_a_device_mesh_of_two_axes(ranks):
    """Sharded over "data", the same on every "replicate"."""
    found = ranks(4, grid)
    assert [f[0] for f in found] == [[2, 1], [4, 1], [2, 5], [4, 5]]
    assert [f[1] for f in found] == [4096] * 4  # half of two times 2,048, rounded up
    assert [f[2] for f in found] == [(4, r) for r in range(4)]


def trained_on_a_grid():
    """Three steps at stages 1 and 3, eager and compiled: the parameters of each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "data"))
    module, rank = build(2, dtype=torch.float64), dist.get_rank()
    found = []
    for stage in (1, 3):
        for step in (train_step_of(module), zerofn.compile(train_step_of(module))):
            state = state_of(module, stage, optim.sgd(0.1, 0.9), mesh=mesh)
            for k in range(3):
                state, _ = step(state, batch_of(rank % 2, dtype=torch.float64, seed=k))
            found.append(tree.leaves(zerofn.unshard(state.params)))
    return found


def test_training_on_a_mesh_of_two_axes(ranks):
    """Replicas that are given the same batch are the same, and have learned from both data ranks'."""
    module = build(2, dtype=torch.float64)
    params, loss_fn = dict(module.named_parameters()), loss_of(module)
    optimizer = torch.optim.SGD(params.values(), 0.1, 0.9)
    for k in range(3):
        optimizer.zero_grad()
        sum(loss_fn(params, batch_of(r, dtype=torch.float64, seed=k)) / 2 for r in range(2)).backward()
        optimizer.step()
    expected = [p.detach() for p in tree.leaves(params)]
    for per_rank in (found := ranks(4, trained_on_a_grid)):
        assert all(same(each, found[0][0]) for each in per_rank)
    torch.testing.assert_close(found[0][0], expected, rtol=1e-12, atol=1e-14)


def test_a_rank_names_its_device(monkeypatch):
    """Otherwise NCCL guesses it from the rank, which is another one on a second machine."""
    called, set_to = {}, []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", set_to.append)
    monkeypatch.setattr(mesh, "store_at", lambda address, rank, held_for_us: dist.HashStore())
    monkeypatch.setattr(mesh, "fresh", lambda store, rank, size: store)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: called.update(options, backend=backend))
    for name, value in {
        "RANK": "6",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "2",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    join()
    assert (
        called["backend"] == "cpu:gloo,cuda:nccl" and called["device_id"] == torch.device("cuda", 2) and set_to == [2]
    )


def made():
    mesh = Mesh.make(replicate=2, data=-1, tensor=2)
    rank = dist.get_rank()
    assert [(a.name, a.size, a.rank) for a in mesh.axes] == [
        ("replicate", 2, rank // 2), ("data", 1, 0), ("tensor", 2, rank % 2)
    ]  # fmt: skip
    assert (mesh.batch.size, mesh.batch.rank, mesh.shards.size, mesh.num_ranks) == (2, rank // 2, 1, 4)
    assert [a.name for a in mesh.slices] == ["tensor"] and (mesh.all.size, mesh.all.rank) == (4, rank)
    assert mesh.names_of_groups[mesh.all.group] == {"replicate", "data", "tensor"}
    x = torch.tensor([float(rank)])
    assert c.psum(x, mesh.axis("tensor")).item() == 4 * (rank // 2) + 1
    block = Mesh.make(tensor=4).block("tensor", 2)
    assert (block.size, block.rank, c.all_reduce(x, block).item()) == (2, rank % 2, 4 * (rank // 2) + 1)
    again = Mesh.make(replicate=2, data=1, tensor=2)
    assert [a.group for a in again.axes] == [a.group for a in mesh.axes]  # groups are made once
    for bad, error, message in (
        ({"data": 3}, ValueError, "data 3 makes 3 ranks, but the job has 4"),
        ({"data": -1, "tensor": -1}, ValueError, "data and tensor are both -1"),
        ({"data": -1, "tensor": 3}, ValueError, "tensor 3 does not divide 4 ranks"),
        ({"data": 0}, ValueError, "data=0 is not a size"),
        ({"tensors": 4}, TypeError, "axis 'tensors' does not exist.*did you mean 'tensor'"),
        ({}, ValueError, "expected at least one axis"),
    ):
        with pytest.raises(error, match=message):
            Mesh.make(**bad)
    with pytest.raises(TypeError, match="axes 'dp', 'tp' of the DeviceMesh are not ZeroFn's"):
        Mesh.of(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))


def test_a_grid_of_axes(ranks):
    ranks(4, made)


def test_a_planned_grid_has_no_ranks():
    mesh = Mesh.planned({"data": 8, "tensor": 4})
    assert (mesh.num_ranks, mesh.batch.size, mesh.all.group) == (32, 8, "fake machine, data x tensor")


def test_axes_of_one_rank_belong_to_every_group_that_they_were_asked_for_with():
    """Else a gradient that is summed over "data" would count as different along "replicate"."""
    mesh = Mesh.planned({"replicate": 1, "data": 2, "tensor": 2})
    assert mesh.names_of_groups[mesh.axis("data").group] == {"replicate", "data"}
    assert mesh.names_of_groups[mesh.axis("tensor").group] == {"tensor"}


@pytest.mark.parametrize(("sizes", "num_ranks", "said"), [
    ({"data": 3}, 4, "Mesh.planned: data 3 makes 3 ranks, but the job has 4"),
    ({"dta": 3}, None, "Mesh.planned: axis 'dta' does not exist"),
    ({"data": "3"}, None, "Mesh.planned: data='3' is not a size"),
    ({}, None, "Mesh.planned: expected at least one axis"),
])  # fmt: skip
def test_sizes_that_make_no_mesh_are_sentences(sizes, num_ranks, said):
    with pytest.raises((TypeError, ValueError), match=said):
        Mesh.planned(sizes, num_ranks)
