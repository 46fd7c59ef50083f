"""Whole leaves from the slices of ranks, and what is the first one's. Units are gathered and reduced in test_shard."""

import ast
import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import zerofn
from tests.support.library import FILES, parse, room
from zerofn.comm.mesh import Mesh
from zerofn.geometry.cuts import Cut, equal, sliced
from zerofn.sharded_math.whole_leaves import map_whole
from zerofn.sharding.transfers import assembled, of_first


def there_and_back():
    mesh = Mesh.make(tensor=-1)
    size = mesh.size("tensor")
    leaves = [
        (torch.arange(35.0).view(5, 7), equal("tensor", 1, 7, size)),
        (torch.arange(36.0).view(12, 3), equal("tensor", 0, 12, size, parts=2)),
        (torch.arange(12.0), equal("tensor", 0, 12, size, unit=6 if size == 4 else 2)),
        (torch.arange(6.0).view(2, 3), Cut("tensor", 1, 3, (((0, 3),), *[()] * (size - 1)))),  # nothing elsewhere
    ]
    slices, rank = [sliced(x, [cut], mesh) for x, cut in leaves], mesh.axis("tensor").rank
    for whole, (x, _) in zip(assembled(slices, [[cut] for _, cut in leaves], mesh), leaves, strict=True):
        assert whole.is_contiguous() and torch.equal(whole, x)
    for mine, (x, cut) in zip(slices, leaves, strict=True):
        (whole,) = assembled([mine], [[cut]], mesh)
        assert torch.equal(whole, x)
        assert torch.equal(of_first(mine + rank, [cut], mesh), mine + cut.first(rank))
    assert torch.equal(of_first(torch.ones(3) * (1 + rank), [], mesh), torch.ones(3))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_ranks_put_a_leaf_together_again(ranks, num_ranks):
    ranks(num_ranks, there_and_back)


def two_axes():
    """Leaves that are cut along both, in either order, along one, and along none."""
    mesh = Mesh.make(expert=2, tensor=2)
    x, dtypes = torch.arange(24).view(4, 6), (torch.float32, torch.int64, torch.bool)
    along = equal("expert", 0, 4, 2), equal("tensor", 1, 6, 2, parts=3)
    for cuts, dtype in itertools.product([along, along[::-1], along[:1], along[1:], ()], dtypes):
        mine = sliced(x.to(dtype), cuts, mesh)
        (whole,) = assembled([mine], [cuts], mesh)
        assert whole.dtype == dtype and torch.equal(whole, x.to(dtype))
        assert cuts or whole is mine


def test_leaves_that_are_cut_along_two_axes(ranks):
    ranks(4, two_axes)


class Gathers(TorchDispatchMode):
    """Counts all-gathers, and the elements that a rank gives to them."""

    def __init__(self):
        super().__init__()
        self.elements = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.zerofn.all_gather.default:
            self.elements.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def whole_leaves_of_units(stage):
    """Two units, of three and of two leaves with slices, and one without."""
    mesh = Mesh.make(data=-1, tensor=2)
    params = {
        f"{u}.{k}": torch.arange(24.0).view(4, 6) + 100 * u + k for u, n in enumerate((3, 2, 2)) for k in range(n)
    }
    cuts = {name: equal("tensor", int(name[-1]) % 2, (4, 6)[int(name[-1]) % 2], 2) for name in params if name[0] < "2"}
    state = zerofn.shard({"params": params}, stage, mesh=mesh, cuts=cuts, unit=lambda name: name[0])
    units = [1] * 3 if stage and mesh.size("data") > 1 else []
    readers = {
        "unshard": (zerofn.unshard, 3, [36, 24]),
        "gather": (lambda p: zerofn.gather(p, only=lambda name: name not in ("0.1", "2.1")), 3, [24, 24]),
        "map_whole": (lambda p: zerofn.unshard(map_whole(lambda x: x, p)), 6, [36, 24] * 2),
    }
    for name, (read, times, sliced_elements) in readers.items():
        with Gathers() as found:
            whole = read(state["params"])
        shards = len(units) * times // 3
        assert len(found.elements) == shards + len(sliced_elements), name
        for n in sliced_elements:
            found.elements.remove(n)
        assert len(found.elements) == shards
        for key, x in whole.items():
            assert x is None or torch.equal(x, params[key]), (name, key)


@pytest.mark.parametrize("num_ranks, stage", [(2, 3), (4, 0), (4, 3)])
def test_one_gather_a_unit_along_each_axis(ranks, num_ranks, stage):
    ranks(num_ranks, whole_leaves_of_units, stage)


def test_units_are_gathered_and_reduced_in_one_file_and_sums_of_signs_in_another():
    names = {"AllGather", "ReduceScatter", "all_gather", "all_gather_into_", "reduce_scatter", "rows_over", "broadcast"}

    def named(module):
        nodes = ast.walk(parse(module))
        return {getattr(x, "id", getattr(x, "attr", None)) for x in nodes if isinstance(x, ast.Name | ast.Attribute)}

    sends = {x for x in FILES if room(x) in ("sharding", "geometry") and named(x) & names}
    assert sends == {"zerofn.sharding.transfers", "zerofn.sharding.coded_sums"}
