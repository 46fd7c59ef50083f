"""Requests for memory and drive space that a scheduled step needs beside its state.

Passes append these specs to `Program`, and nodes refer to them by index. So a schedule can be planned, or tried and
dropped, without any allocation. `runtime.buffers.Buffers` allocates before the first run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BufferSpec:
    """A request for one buffer of `nbytes`. Nodes have *places* in it: [index of the buffer, first byte].

    `device`: the buffer's device; None for host memory that drives read to and write from. `number`: counts the
    step's buffers on one device. Steps run one after the other, so the steps of a process share buffers of the same
    device and number.
    """

    device: torch.device | None
    number: int
    nbytes: int


@dataclass(frozen=True)
class DriveSpec:
    """A request for `nbytes` on the drives of the folders `paths`. `label`: what errors call these bytes."""

    paths: tuple[str, ...]
    nbytes: int
    label: str


def add_buffer(buffers: list[BufferSpec], device: torch.device | None, nbytes: int) -> int:
    """Append a request for one more buffer on a device, and return its index."""
    number = sum(x.device == device for x in buffers)
    buffers.append(BufferSpec(device, number, nbytes))
    return len(buffers) - 1
