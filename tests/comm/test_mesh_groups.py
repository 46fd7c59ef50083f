"""Which ranks differ along which axes, and whether they share a node, beside every rank looked at one by one."""

import itertools

import pytest
import torch.distributed as dist

from zerofn.comm.mesh import FAKE, Mesh
from zerofn.comm.mesh_groups import axes_along, crosses

SIZES = {"replicate": 2, "data": 3, "tensor": 4}


def by_hand(sizes, names, size, per_node):
    """Whether some block of `size` ranks, equal along all other axes, has ranks on several nodes."""
    lines = {}
    for number, place in enumerate(itertools.product(*map(range, sizes.values()))):
        others = tuple(k for name, k in zip(sizes, place, strict=True) if name not in names)
        lines.setdefault(others, []).append(number)
    blocks = [line[k : k + size] for line in lines.values() for k in range(0, len(line), size)]
    return any(len({number // per_node for number in block}) > 1 for block in blocks)


@pytest.mark.parametrize("per_node", [1, 2, 3, 4, 6, 8, 12, 24])
def test_a_line_crosses_nodes_where_one_of_its_ranks_is_elsewhere(per_node):
    mesh, seen = Mesh.planned(SIZES), set()
    for count in (1, 2, 3):
        for names in itertools.combinations(SIZES, count):
            whole = 1
            for name in names:
                whole *= SIZES[name]
            for size in (n for n in range(1, whole + 1) if whole % n == 0):
                found = crosses(mesh, names, size, per_node)
                assert found == by_hand(SIZES, names, size, per_node), (names, size)
                seen.add(found)
    assert seen == {False, True} or per_node == 24


def test_ranks_are_on_the_nodes_of_their_numbers():
    """As a `DeviceMesh` may have them."""
    far = Mesh(Mesh.planned({"data": 2, "tensor": 2}).axes, (0, 2, 1, 3))
    assert crosses(far, ["tensor"], 2, 2) and not crosses(far, ["data"], 2, 2)


def test_the_axes_of_a_planned_group_are_in_its_name():
    mesh = Mesh.planned({"replicate": 2, "data": 3, "tensor": 4})
    assert axes_along(mesh, mesh.axis("data").group) == ("data",)
    assert axes_along(mesh, mesh.batch.group) == ("replicate", "data")
    assert axes_along(mesh, mesh.all.group) == ("replicate", "data", "tensor")
    assert axes_along(mesh, mesh.over(("data", "tensor")).group) == ("data", "tensor")
    assert axes_along(mesh, mesh.block("tensor", 2).group) == ("tensor",)
    assert axes_along(mesh, f"{FAKE}context") == ()
    alone = Mesh.planned({"replicate": 1, "data": 4})
    assert axes_along(alone, alone.all.group) == ("data",)


def found_on_a_rank():
    mesh = Mesh.make(data=2, tensor=2)
    block = mesh.block("tensor", 2)
    pairs = [dist.new_group(x) for x in ([0, 3], [1, 2])]
    pair = pairs[dist.get_rank() in (1, 2)].group_name
    return [axes_along(mesh, x) for x in (mesh.axis("tensor").group, mesh.all.group, block.group, pair)]


def test_real_groups_have_the_axes_along_which_their_ranks_differ(ranks):
    for found in ranks(4, found_on_a_rank):
        assert found == [("tensor",), ("data", "tensor"), ("tensor",), ("data", "tensor")]
