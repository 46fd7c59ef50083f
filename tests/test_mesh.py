"""Ranks and named axes."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import zerofn
from zerofn import collectives as c
from zerofn.mesh import Axis, Mesh


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
    assert Mesh.of(mesh := Mesh((Axis("data", 1),))) is mesh


def grid():
    rank = dist.get_rank()
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "data"))
    mesh = Mesh.of(device_mesh)
    assert [(a.name, a.size, a.rank) for a in mesh.axes] == [("replica", 2, rank // 2), ("data", 2, rank % 2)]
    x = torch.tensor([float(rank)])
    sums = [c.all_reduce(x, mesh.axis(name)).item() for name in ("replica", "data")]
    state = zerofn.shard({"params": {"w": torch.arange(5000.0)}}, stage=3, mesh=device_mesh)
    piece = state["params"].pieces[0].numel()
    assert torch.equal(zerofn.unshard(state)["params"]["w"], torch.arange(5000.0))
    plain = Mesh.of(init_device_mesh("cpu", (4,)))
    return sums, piece, (plain.axis().size, plain.axis().rank)


def test_a_device_mesh_of_two_axes(ranks):
    """Sharded over "data", the same on every "replica"."""
    found = ranks(4, grid)
    assert [f[0] for f in found] == [[2, 1], [4, 1], [2, 5], [4, 5]]
    assert [f[1] for f in found] == [4096] * 4  # half of two times 2,048, rounded up
    assert [f[2] for f in found] == [(4, r) for r in range(4)]
