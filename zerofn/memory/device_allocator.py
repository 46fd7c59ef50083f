"""torch's allocator of CUDA devices, told of a step's budget."""

from __future__ import annotations

import math
import os

import torch

from .._torch_compat import set_allocator
from ..util.process import the

ROOM = 8, 1 << 30  # for workspace and fragments: this part of a budget, at least these bytes
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class DeviceLimits:
    """The most bytes that torch's allocator may take from each device, for steps with a budget."""

    def __init__(self) -> None:
        self.limits: dict[torch.device, float] = {}
        self._grows = False

    def hold(self, device: torch.device, budget: int | None, there: int) -> None:
        """Hold the allocator to a step's `budget`, with room for what a plan does not know, beside what is allocated
        apart from the step's own `there` bytes. Nearing that, it frees what it has cached. Steps without a budget
        (None) lift the limit.

        Its segments grow from now on, which leaves fewer holes, unless the environment says otherwise.
        """
        limit = math.inf
        if budget is not None:
            others = max(torch.cuda.memory_allocated(device) - there, 0)
            limit = others + budget + max(budget // ROOM[0], ROOM[1])
            self._grow_segments()
        limit = max(limit, self.limits.get(device, 0))
        if limit != self.limits.get(device, math.inf):
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(limit / total, 1.0), device)
        self.limits[device] = limit

    def _grow_segments(self) -> None:
        said = ",".join(filter(None, map(os.environ.get, _VARIABLES)))
        if not self._grows and "expandable_segments" not in said:
            self._grows = True
            set_allocator(",".join(filter(None, [said, "expandable_segments:True"])))


def hold(device: torch.device, budget: int | None, there: int) -> None:
    """See `DeviceLimits.hold`, which is the process's; nothing for other devices than CUDA's."""
    if device.type == "cuda":
        the(DeviceLimits).hold(device, budget, there)
