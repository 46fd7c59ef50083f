"""Which rows of a dataset a rank of a mesh reads."""

from __future__ import annotations

from typing import Any

import torch  # noqa: F401  (for the example)
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DistributedSampler

from ..comm.current_mesh import present
from ..comm.mesh import Mesh
from ..util.arguments import checked, told


@checked("shuffle", "seed")
def sampler(
    dataset: Any, mesh: Mesh | DeviceMesh | None = None, *, shuffle: bool = True, seed: int = 0
) -> DistributedSampler[Any]:
    """Return the sampler of this rank's rows, for a `DataLoader`.

    `dataset`: an object with a length, the same on all ranks. `mesh`: a `zerofn.Mesh` or a `DeviceMesh`; None is the
    mesh that the process made before, or else all ranks. Ranks along `replicate`, `data` and `expert` get different
    rows; ranks along `tensor`, `context` and `pipe` get the same rows, in the same order. All ranks get the same number
    of rows; rows that remain are dropped. `shuffle`: whether rows are shuffled in each epoch, by `seed` and
    `sampler.set_epoch(epoch)`.

    Raises `ValueError` if the dataset has fewer rows than ranks need, and, without `mesh`, if the process has several
    meshes that would give this rank different rows.

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
