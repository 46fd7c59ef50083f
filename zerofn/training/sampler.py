"""Which rows of a dataset a rank of a mesh reads."""

from __future__ import annotations

from typing import Any

import torch  # noqa: F401  (for the example)
from torch.utils.data import DistributedSampler

from ..comm.current_mesh import present
from ..comm.mesh import Mesh
from ..util.arguments import checked, told


@checked("shuffle", "seed")
def sampler(dataset: Any, mesh: Any = None, *, shuffle: bool = True, seed: int = 0) -> DistributedSampler[Any]:
    """Return the sampler of this rank's rows, for a `DataLoader`.

    `dataset`: has a length, the same on all ranks. `mesh`: a `zerofn.Mesh` or a `DeviceMesh`; None is the mesh that the
    process has made, or else all ranks. Ranks along `replicate`, `data` and `expert` have rows of their own; those
    along `context` and `tensor` have the same ones, in the same order. All have equally many: what is left over is
    dropped. `shuffle`: whether each epoch has an order of its own, which follows from `seed` and from
    `sampler.set_epoch(epoch)`.

    Raises `ValueError` for a dataset with fewer rows than ranks that have their own, and without `mesh` in a process
    that has several meshes, in which ranks have other rows.

    >>> list(sampler(range(4), shuffle=False))
    [0, 1, 2, 3]
    """
    if not hasattr(dataset, "__len__"):
        raise TypeError(f"sampler: dataset must have a length, got {told(dataset)}.")
    rows = (
        present(lambda own: own.rows, "sampler", "mesh=mesh, with the mesh you made")
        if mesh is None
        else Mesh.of(mesh).rows
    )
    if len(dataset) < rows.size:
        raise ValueError(f"sampler: {rows.size} ranks need different rows, but the dataset has only {len(dataset)}.")
    return DistributedSampler(dataset, rows.size, rows.rank, shuffle=shuffle, seed=seed, drop_last=True)
