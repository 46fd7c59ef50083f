"""The same batch on all ranks, which trains on a fraction of the data: told at a step's first call."""

from __future__ import annotations

import hashlib
import logging
from typing import Any

from torch import Tensor

from .. import tree
from ..comm.agreement import exchange
from ..comm.mesh import Axis
from ..ops.same import digest
from ..sharding.sharded import is_sharded

log = logging.getLogger("zerofn")


def warn_of_equal_batches(name: str, batch: Any, axis: Axis | None) -> None:
    """Log, on the first rank, that every rank of the job has the same batch. All ranks must call it."""
    leaves = [x for x in tree.leaves(batch, is_leaf=is_sharded) if isinstance(x, Tensor) and x.numel() > 1]
    if axis is None or axis.size == 1 or not leaves:
        return
    words = repr([digest(x).tolist() for x in leaves])
    theirs = exchange(f"zerofn.compile({name})", hashlib.sha256(words.encode()).hexdigest())
    if len(theirs) == axis.size and len(set(theirs)) == 1 and axis.rank == 0:
        log.warning(
            "%s: all %d ranks have the same batch, so they all do the work of one. Give each rank its own part, "
            "such as with torch.utils.data.DistributedSampler.",
            name,
            axis.size,
        )
