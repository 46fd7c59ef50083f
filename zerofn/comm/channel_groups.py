"""Groups of two ranks, one for each direction, over which devices send messages.

What a communicator of NCCL is given, it moves one after the other. If messages of both directions, or those of other
ranks, shared one, ranks would wait for each other for ever. So the messages from one rank to another have a group of
their own. (gloo needs none: its messages have tags.)
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from ..job.failures import group_named

Channel = tuple[int, int]  # the rank that sends, and the one that receives, in the job


class ChannelGroups:
    """The groups of channels, of the job's present group."""

    def __init__(self) -> None:
        self._names: dict[Channel, str] = {}  # of all ranks' channels; "" for one of two others
        self._world: weakref.ref[dist.ProcessGroup] | None = None

    def open(self, channels: Iterable[Channel], device: torch.device) -> None:
        """Make the groups of these channels that are not there yet. All ranks of the job must call it, with the same
        channels. `device`: on which this rank's messages lie.

        Torch names a group by the number of groups that a process has. So a rank without a channel in a round makes a
        group of itself: then all ranks have as many.
        """
        world = dist.group.WORLD
        if self._world is None or self._world() is not world:
            assert world is not None
            self._names, self._world = {}, weakref.ref(world)
        me = dist.get_rank()
        for together in rounds(sorted(set(channels) - self._names.keys())):
            self._names |= dict.fromkeys(together, "")
            mine = next((x for x in together if me in x), None)
            group = dist.new_group(list(mine or (me,)), use_local_synchronization=True)
            if mine is not None:
                self._names[mine] = group.group_name
                _connect(mine, group, device)

    def of(self, source: int, target: int) -> dist.ProcessGroup:
        """Return the group of the messages from one rank to another. One of the two must be this one."""
        return group_named(self._names[source, target])


def rounds(channels: Iterable[Channel]) -> Iterator[list[Channel]]:
    """Yield channels such that no rank is in two of one round.

    >>> list(rounds([(0, 1), (1, 0), (1, 2), (2, 3)]))
    [[(0, 1), (2, 3)], [(1, 0)], [(1, 2)]]
    """
    left = list(channels)
    while left:
        busy: set[int] = set()
        now, later = [], []
        for channel in left:
            if busy.isdisjoint(channel):
                now.append(channel)
                busy.update(channel)
            else:
                later.append(channel)
        yield now
        left = later


def _connect(channel: Channel, group: dist.ProcessGroup, device: torch.device) -> None:
    """Send an element: a communicator is made by its first transfer, for which both ranks wait."""
    source, target = channel
    x = torch.zeros(1, dtype=torch.uint8, device=device)
    sends = dist.get_rank() == source
    work = dist.isend(x, target, group=group) if sends else dist.irecv(x, source, group=group)
    assert work is not None
    work.wait()
