"""Requests for memory and drive space that a scheduled step needs beside its state.

Passes append these specs to `Program`, and nodes refer to them by index. So a schedule can be planned, or tried and
dropped, without any allocation. `runtime.buffers.Buffers` allocates before the first run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BufferSpec:
    """`nbytes` of memory in which nodes have places, each [index of the buffer, first byte].

    `device`: its device; None for host memory that drives read to and write from. `number`: its number among the
    step's buffers on that device. Steps run one after the other, so all steps of a process share the buffer of one
    number.
    """

    device: torch.device | None
    number: int
    nbytes: int


@dataclass(frozen=True)
class DriveSpec:
    """`nbytes` on the drives of the folders `paths`. Errors call the contents `label`."""

    paths: tuple[str, ...]
    nbytes: int
    label: str


def add_buffer(buffers: list[BufferSpec], device: torch.device | None, nbytes: int) -> int:
    """Request one more buffer on a device, and return its index."""
    number = sum(x.device == device for x in buffers)
    buffers.append(BufferSpec(device, number, nbytes))
    return len(buffers) - 1
