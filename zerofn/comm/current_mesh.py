"""The mesh that is meant where none is given: that of the state, in a step; outside of one, the process's only mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from ..util.arguments import checked
from ..util.context import inside
from ..util.process import the
from .known_meshes import Meshes
from .mesh import Axis, Mesh

_current: ContextVar[Mesh | None] = ContextVar("current_mesh", default=None)
_unlike: ContextVar[set[str] | None] = ContextVar("axes_of_unlike_work", default=None)


def current_mesh() -> Mesh | None:
    """Return the mesh that names of axes are of: that of the state, in a step and in a loss function."""
    return _current.get()


def axes_of(mesh: Mesh | None) -> contextlib.AbstractContextManager[Mesh | None]:
    """Inside, names of axes are those of this mesh; None changes nothing."""
    return contextlib.nullcontext() if mesh is None else inside(_current, mesh)


def unlike_work() -> contextlib.AbstractContextManager[set[str]]:
    """Inside, note the axes along which ranks run other operations, by their number; see `works_by_rank`."""
    return inside(_unlike, set())


def works_by_rank(axis: Axis) -> None:
    """Say that ranks of an axis run other operations, by their number: a plan of one of them is not that of all."""
    found = _unlike.get()
    if found is not None:
        found.add(axis.name)


@contextlib.contextmanager
def as_rank(axis: Axis, rank: int) -> Iterator[None]:
    """Inside, this process is another rank of an axis, for what asks for its number now: to plan what that one does."""
    before = axis.rank
    object.__setattr__(axis, "rank", rank)
    try:
        yield
    finally:
        object.__setattr__(axis, "rank", before)


def present(choose: Callable[[Mesh], Axis], what: str, instead: str) -> Axis:
    """Return an axis of the present mesh. `what`: what is asked for, and `instead`: what to write where several meshes
    have such an axis, for errors.

    Raises `ValueError` outside of a step if the process has several meshes, along which it would be other ranks.
    """
    current = current_mesh()
    if current is not None:
        return choose(current)
    meshes = the(Meshes).known() or [Mesh.of(None)]
    found = [choose(mesh) for mesh in meshes]
    places = {(x.size, x.rank, x.group if x.size > 1 else "") for x in found}
    if len(places) > 1:
        raise ValueError(
            f"{what}: this process has states on several meshes, {', '.join(map(repr, meshes))}, which would "
            f"give different answers. Choose a mesh: write {instead}."
        )
    return found[0]


def axis_of(axis: str | Axis | None, what: str = "axis", instead: str = "") -> Axis:
    """Return an axis, or the one of that name of the present mesh; for None the ranks with other parts of the batch.
    `what`, `instead`: see `present`.

    Raises `ValueError` if it is not there.
    """
    if isinstance(axis, Axis):
        return axis
    of_mesh = "batch" if axis is None else f"axis({axis!r})"
    choose = lambda mesh: mesh.batch if axis is None else mesh.axis(axis)  # noqa: E731
    return present(choose, what, instead or f"axis=mesh.{of_mesh}, where mesh is the one you made")


@checked()
def rank(among: str = "") -> int:
    """Return this process's rank, counted from 0; 0 for a single process. Makes the process group if needed, as
    `Mesh.of` does.

    `among`: "" for the rank in the job; "rows" for the rank among ranks with different rows (ranks along `tensor`,
    `context` and `pipe` share rows, and have the same number); or the name of an axis. Inside a step, the mesh is that
    of the state; outside, that of the process. Raises `ValueError` if the axis does not exist, or if the process has
    several meshes in which the answer differs.

    >>> rank(), rank("rows"), world_size()
    (0, 0, 1)
    """
    return _among(among, "rank", "rank").rank


@checked()
def world_size(among: str = "") -> int:
    """Return the number of ranks. Makes the process group if needed, as `Mesh.of` does. `among`: see `rank`.

    >>> world_size(), world_size("rows")
    (1, 1)
    """
    return _among(among, "world_size", "size").size


def _among(among: str, what: str, field: str) -> Axis:
    if not among:
        return Mesh.of(None).axis()
    Mesh.of(None)
    of_mesh = "rows" if among == "rows" else f"axis({among!r})"
    choose = lambda mesh: mesh.rows if among == "rows" else mesh.axis(among)  # noqa: E731
    return present(choose, f"{what}({among!r})", f"mesh.{of_mesh}.{field}, where mesh is the one you made")
