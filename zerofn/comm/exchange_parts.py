"""An all-to-all of parts of unequal sizes, which all ranks know."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from ..job.in_flight import pending
from ..job.step_order import meetings
from ..ops.registry import Lane, Moves, OnShard, Traits, define
from . import transport
from .transport import as_bytes, count_sent, group_for, is_gloo


def exchange_parts_start(
    flat: Tensor, sizes: Sequence[int], size: int, rank: int, group: str, purpose: str = ""
) -> Tensor:
    """flat [what this rank sends] -> [what it receives], both in rank order. `sizes`: at s * size + r, how many
    elements rank s sends to rank r; the same list on all ranks. What a rank sends to itself is never empty: transfers
    under way are told apart by the address of what they fill. `purpose`: as for `exchange_start`.
    """
    if not meetings().captured or meetings().refused:
        what = f"all_to_all for {purpose}" if purpose else "all_to_all of parts"
        meetings().begin(group, what, f"{list(sizes)} {flat.dtype}")
    sent, received = _parts(sizes, size, rank)
    flat, out = flat.contiguous(), flat.new_empty(sum(received))
    if not is_gloo(group, flat):
        count_sent(group, _to_others_of_parts(flat, sizes, size, rank))
        to, source = as_bytes(out), as_bytes(flat)
        times = flat.itemsize // source.itemsize
        splits = [[times * n for n in part] for part in (received, sent)]
        work = dist.all_to_all_single(to, source, splits[0], splits[1], group_for(group, flat), async_op=True)
        return pending().start(out, lambda: [work], (flat,))
    mine, theirs = flat.split(sent), out.split(received)
    theirs[rank].copy_(mine[rank])
    sends, receives = ({r: x for r, x in enumerate(xs) if r != rank and x.numel()} for xs in (mine, theirs))
    works = transport.point_to_point(group, sends, receives)
    return pending().start(out, works, (flat,))


def _parts(sizes: Sequence[int], size: int, rank: int) -> tuple[list[int], list[int]]:
    """Return how many elements a rank sends to each rank, and receives from each."""
    return list(sizes[rank * size : (rank + 1) * size]), list(sizes[rank::size])


def _to_others_of_parts(flat: Tensor, sizes: Sequence[int], size: int, rank: int) -> int:
    return (flat.numel() - sizes[rank * size + rank]) * flat.itemsize


define(
    "exchange_parts(Tensor flat, int[] sizes, int size, int rank, str group, str purpose='') -> Tensor",
    exchange_parts_start,
    lambda flat, sizes, size, rank, group, purpose="": flat.new_empty(sum(_parts(sizes, size, rank)[1])),
    traits=Traits(
        OnShard.REFUSED,
        Moves(
            Lane.LINK, lambda given, _: _to_others_of_parts(given["flat"], given["sizes"], given["size"], given["rank"])
        ),
        "exchange of parts",
        rank_dependent=True,
    ),
)
