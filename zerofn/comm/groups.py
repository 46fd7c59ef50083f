"""The job's process groups: one for each set of ranks that transfers go over."""

from __future__ import annotations

import weakref

import torch.distributed as dist

from ..job.failures import refuse_in_fork


class ProcessGroups:
    """Process groups by their ranks, of the job's present group."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, ...], str] = {}
        self._world: weakref.ref[dist.ProcessGroup] | None = None

    def of(self, ranks: tuple[int, ...]) -> str:
        """Return the name of the group of these ranks. They must all ask, if it is for the first time."""
        world = dist.group.WORLD
        assert world is not None
        if self._world is None or self._world() is not world:
            self._names, self._world = {tuple(range(world.size())): world.group_name}, weakref.ref(world)
        if ranks not in self._names:
            refuse_in_fork()
            group = dist.new_group(list(ranks), use_local_synchronization=True)
            self._names[ranks] = group.group_name
        return self._names[ranks]

    def know(self, ranks: tuple[int, ...], name: str) -> None:
        """Take a group that somebody else has made."""
        self.of(tuple(range(dist.get_world_size())))  # so that names of an earlier job are gone
        self._names.setdefault(ranks, name)
