"""Lines of a mesh: the ranks of a process group, which differ along some axes of the mesh and agree along others."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch.distributed as dist

from ..job.failures import group_named
from .axes import BETWEEN
from .mesh import FAKE, Mesh


def axes_along(mesh: Mesh, group: str) -> tuple[str, ...]:
    """Return the axes along which the ranks of a process group differ, in the mesh's order; none for a group whose
    ranks are not all in the mesh.
    """
    found = mesh.names_of_groups.get(group)
    names = _differing(mesh, group) if found is None else found
    return tuple(axis.name for axis in mesh.axes if axis.name in names and axis.size > 1)


def _differing(mesh: Mesh, group: str) -> set[str]:
    if group.startswith(FAKE):
        return set(group.removeprefix(FAKE).split(BETWEEN))
    if not dist.is_initialized():
        return set()
    ranks = dist.get_process_group_ranks(group_named(group))
    if not set(ranks) <= set(mesh.ranks):
        return set()
    places = [_place(mesh, mesh.ranks.index(rank)) for rank in ranks]
    return {axis.name for axis, along in zip(mesh.axes, zip(*places, strict=True), strict=True) if len(set(along)) > 1}


def _place(mesh: Mesh, number: int) -> list[int]:
    """Return where in the grid the rank with this number stands."""
    out = []
    for axis in reversed(mesh.axes):
        number, k = divmod(number, axis.size)
        out.append(k)
    return out[::-1]


def crosses(mesh: Mesh, names: Sequence[str], size: int, per_node: int, among: Sequence[int] | None = None) -> bool:
    """Return whether some line along these axes has ranks on several nodes, where each node has `per_node` ranks, in
    order.

    `size`: of a line's blocks, where it is less than the line: neighbours along the last of the axes. `among`: the
    places on a line that count, by default all.
    """
    steps = _steps(mesh)
    line = [0]
    for axis in mesh.axes:
        if axis.name in names:
            line = [x + k * steps[axis.name] for x in line for k in range(axis.size)]
    others = [range(0, axis.size * steps[axis.name], steps[axis.name]) for axis in mesh.axes if axis.name not in names]
    if among is not None:
        line = [line[k] for k in among]
    blocks = [line[k : k + size] for k in range(0, len(line), size)]
    starts = map(sum, itertools.product(*others))
    numbers = mesh.ranks or range(mesh.num_ranks)
    return any(len({numbers[start + x] // per_node for x in block}) > 1 for start in starts for block in blocks)


def _steps(mesh: Mesh) -> dict[str, int]:
    """Return by how much the number of the rank grows along each axis."""
    out, step = {}, 1
    for axis in reversed(mesh.axes):
        out[axis.name] = step
        step *= axis.size
    return out
