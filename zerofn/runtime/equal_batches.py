"""The same batch on all ranks, which trains on a fraction of the data: told at a step's first call."""

from __future__ import annotations

import hashlib
import logging
from typing import Any

from torch import Tensor

from .. import tree
from ..comm.mesh import Mesh
from ..job.agreement import exchange
from ..ops.same import digest
from ..sharding.sharded import is_sharded

log = logging.getLogger("zerofn")


def compare_batches(name: str, batch: Any, mesh: Mesh | None) -> None:
    """Log, on the first rank, that every rank of the job has the same batch. All ranks must call it.

    Raises `RuntimeError` on all ranks if those that share the work on one batch have different ones, and if those that
    share sequences have the same.
    """
    entries = tree.leaves(batch, is_leaf=is_sharded)
    numbers = [x for x in entries if isinstance(x, bool | int | float | str)]
    leaves = [x for x in entries if isinstance(x, Tensor) and x.numel() > 1]
    if mesh is None or mesh.num_ranks == 1 or not leaves:
        return
    words = repr([digest(x).tolist() for x in leaves])
    hashes = [hashlib.sha256(x.encode()).hexdigest() for x in (words, f"{words} {numbers}")]
    mine = f"{mesh.rows.rank} {mesh.batch.rank} {' '.join(hashes)}"
    theirs = exchange(f"zerofn.compile({name})", mine)
    if len(theirs) != mesh.num_ranks:  # the mesh is of some ranks of the job
        return
    first: dict[str, tuple[int, str]] = {}
    of_rows: dict[tuple[str, str], tuple[int, str]] = {}
    for rank, text in enumerate(theirs):
        rows, place, found, with_numbers = text.split()
        before, known = first.setdefault(place, (rank, with_numbers))
        if known != with_numbers:
            shared = " and ".join(map(repr, mesh.same_batch.names))
            raise RuntimeError(
                f"{name}: ranks {before} and {rank} must have the same rows, but their batches differ. Ranks along "
                f"{shared} share rows: write DataLoader(dataset, sampler=zerofn.sampler(dataset, mesh))."
            )
        before, part = of_rows.setdefault((rows, found), (rank, place))
        if part != place:
            raise RuntimeError(
                f"{name}: ranks {before} and {rank} share sequences along {mesh.tokens.name!r}, but have the same "
                "batch. Write batch = zerofn.parallel.split_sequence(batch, mesh)."
            )
    if mesh.batch.size > 1 and len({found for _, found in of_rows}) == 1 and mesh.all.rank == 0:
        log.warning(
            "%s: all %d ranks have the same batch, so they all compute the same. Use different rows on each rank: "
            "zerofn.sampler(dataset, mesh).",
            name,
            mesh.batch.size,
        )
