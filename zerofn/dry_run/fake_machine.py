"""Plan for machines that need not exist.

Inside a fake machine, a state's tensors are fake: shapes without memory. No drive is touched, and no other rank is
asked. Fake CUDA tensors cannot be differentiated without a GPU. So the device "cpu", for which torch has every
operation of a GPU, stands for an accelerator, and "meta" for its host's memory.
"""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .._torch_compat import FakeTensorMode
from ..util.context import inside

_current: ContextVar[FakeMachine | None] = ContextVar("fake_machine", default=None)


@dataclass(frozen=True)
class FakeMachine:
    """`accelerator`: whether models compute on a device with memory of its own. `dram`, `link`: bytes per second that
    a rank has of its host's memory, and between host and device.
    """

    accelerator: bool
    dram: float
    link: float
    mode: FakeTensorMode = field(default_factory=lambda: FakeTensorMode(allow_non_fake_inputs=True), compare=False)

    def __call__(self) -> contextlib.AbstractContextManager[FakeMachine]:
        """Inside, the process plans for this machine."""
        return inside(_current, self)

    def zeros(self, size: int | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor without memory."""
        with self.mode:
            return torch.zeros(size, dtype=dtype, device=device)

    def like(self, x: Tensor) -> Tensor:
        """A tensor without memory, of the shape, strides and dtype of `x`, where models compute; a number is 0."""
        if not x.dim():
            return torch.zeros((), dtype=x.dtype)
        with self.mode:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")


def fake_machine() -> FakeMachine | None:
    """Return the fake machine that is planned for; None outside a dry run."""
    return _current.get()


def host() -> torch.device:
    """Return the device that stands for host memory."""
    machine = fake_machine()
    return torch.device("meta" if machine is not None and machine.accelerator else "cpu")


def is_host(device: torch.device) -> bool:
    """Return whether a device is the host."""
    return device.type == host().type
