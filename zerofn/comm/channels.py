"""Messages between two ranks: a send and a receive, which the other ranks of their group know nothing of.

A *channel* is a group, a source and a target. Its messages are counted on both ends, so the n-th receive gets what the
n-th send sent: a rank must post receives in the order of the sends, which is the caller's to see to. Between devices a
channel has a process group of its own, which all ranks make before (`channel_groups.py`). A send returns a token; what
is sent may be overwritten once that was waited for. `wait` on what a receive returns is the message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..job.failures import backend_on, group_named
from ..job.in_flight import Works, pending
from ..job.step_order import meetings
from ..ops.registry import Lane, Moves, OnShard, Traits, define
from ..util.process import the
from .channel_groups import Channel, ChannelGroups
from .transport import as_bytes, count_sent, group_for, is_gloo


def send_start(x: Tensor, peer: int, group: str, edge: str) -> Tensor:
    """Send `x`, whose elements lie side by side in any order, to the rank `peer` of a group; return a token to wait
    for. `edge`: the name of what is sent.
    """
    token = torch.empty(1, dtype=torch.uint8)
    count_sent(group, x.nbytes)
    return pending().start(token, _begun(x, peer, group, sends=True), (x,))


def receive_start(
    shape: Sequence[int],
    stride: Sequence[int],
    peer: int,
    group: str,
    edge: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return the tensor that will hold what the rank `peer` of a group sends next, in that one's order of elements."""
    out = _empty(shape, stride, dtype=dtype, device=device)
    return pending().start(out, _begun(out, peer, group, sends=False), ())


def _empty(shape: Sequence[int], stride: Sequence[int], **options: Any) -> Tensor:
    return torch.empty_strided(list(shape), list(stride), **options)


def _begun(x: Tensor, peer: int, group: str, *, sends: bool) -> Works:
    """Post one end of a message."""
    x = x.as_strided((x.numel(),), (1,))
    if not is_gloo(group, x):
        flat, other = as_bytes(x), dist.get_global_rank(group_named(group), peer)
        own = _own_group(channel_of(group, peer, sends=sends), group, x)
        work = dist.isend(flat, other, group=own) if sends else dist.irecv(flat, other, group=own)
        return lambda: [work]
    pg = meetings().host_of(group_named(group))
    channel = (pg.rank(), peer) if sends else (peer, pg.rank())
    tag = meetings().next_tag(group_named(group), channel)
    return pending().post(lambda: [pg.send([x], peer, tag) if sends else pg.recv([x], peer, tag)])


def channel_of(group: str, peer: int, *, sends: bool) -> Channel:
    """Return the ranks of the job that send and receive: this one, and the rank `peer` of a group."""
    here, other = dist.get_rank(), dist.get_global_rank(group_named(group), peer)
    return (here, other) if sends else (other, here)


def _own_group(channel: Channel, group: str, x: Tensor) -> dist.ProcessGroup:
    pg = group_for(group, x)
    return pg if backend_on(pg) == "fake" else the(ChannelGroups).of(*channel)


define(
    "send(Tensor x, int peer, str group, str edge) -> Tensor",
    send_start,
    lambda x, peer, group, edge: torch.empty(1, dtype=torch.uint8),
    traits=Traits(OnShard.REFUSED, Moves(Lane.LINK, lambda given, _: given["x"].nbytes), "send"),
)
define(
    "receive(int[] shape, int[] stride, int peer, str group, str edge, *, ScalarType dtype, Device device) -> Tensor",
    receive_start,
    lambda shape, stride, peer, group, edge, **options: _empty(shape, stride, **options),
    # It waits for the other rank, and takes that one's bytes.
    traits=Traits(OnShard.REFUSED, Moves(Lane.LINK, lambda given, out: out.nbytes), "receive"),
)
