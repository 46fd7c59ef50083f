"""The meshes of the process."""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist


class Meshes:
    """The meshes that were made, and those over which states are sharded, in the present group of the job."""

    def __init__(self) -> None:
        self._known: list[Any] = []
        self._world: weakref.ref[dist.ProcessGroup] | None = None

    def known(self) -> list[Any]:
        """Return them, each once, in the order in which they came."""
        world = dist.group.WORLD if dist.is_initialized() else None
        if world is None or self._world is None or self._world() is not world:
            self._known, self._world = [], None if world is None else weakref.ref(world)
        return self._known

    def know(self, mesh: Any) -> Any:
        """Note a mesh, and return it. One that is only planned for has no ranks."""
        if mesh.num_ranks > 1 and mesh.ranks and mesh not in self.known():
            self.known().append(mesh)
        return mesh
