"""Read this rank's own part of a gathered unit from its shard."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.fx import GraphModule, Node

from .._torch_compat import resolve_process_group
from ..dry_run.fake_machine import fake_machine
from ..graph.alias import is_given, roots, written_memory
from ..graph.edit import clean
from ..graph.node_kinds import argument, is_gather, wait_of
from ..graph.program import tensor_of
from ._context import Context

_slice = torch.ops.aten.slice.Tensor


def read_local_shards(gm: GraphModule, context: Context) -> None:
    """Read each leaf that is wholly in this rank's shard from the shard instead of the gathered unit.

    The gather then copies only the part of the shard that is needed by leaves which cross the shard's edges. It sends
    the same bytes as before. Shards that are cast for the gather are left alone: the cast would have to live longer. So
    are those that a codec rounds on their way, as ranks compute with what arrives.

    The resulting graph differs by rank. So the memory search skips this pass, and it runs after the passes that decide
    the order of transfers.
    """
    root = roots(gm.graph)
    written = written_memory(root)
    for start in filter(is_gather, gm.graph.nodes):
        shard = argument(start, "shard")
        if is_given(root[shard]) and root[shard] not in written and not argument(start, "codec"):
            _read(start, shard)
    clean(gm)


def _read(start: Node, shard: Node) -> None:
    size, group = tensor_of(shard).numel(), argument(start, "group")  # type: ignore[union-attr]
    low = 0 if fake_machine() else dist.get_rank(resolve_process_group(group)) * size
    inside: list[tuple[Node, int, int]] = []
    edges: list[tuple[int, int]] = []  # the part that leaves across the shard's edges need
    users = list(wait_of(start).users)
    for user in users:
        read = _interval(user)
        a, b = (x - low for x in read or (low, low + size))
        if read and 0 <= a and b <= size:
            inside.append((user, a, b))
        elif a < size and b > 0:
            edges.append((max(a, 0), min(b, size)))
    if len(inside) == len(users):
        return  # nothing else would wait for the gather, which other ranks need
    for user, a, b in inside:
        user.args = (shard, -1, a, b)
    start.kwargs = {"own": [min(a for a, _ in edges), max(b for _, b in edges)] if edges else [0, 0]}


def _interval(user: Node) -> tuple[int, int] | None:
    """Return the interval that a user reads of a unit, if it is a plain slice."""
    if user.target is not _slice or argument(user, "step") != 1 or argument(user, "dim") not in (0, -1):
        return None
    a, b = argument(user, "start"), argument(user, "end")
    return (a, b) if isinstance(a, int) and isinstance(b, int) and 0 <= a <= b else None
