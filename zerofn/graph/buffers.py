"""What a scheduled step needs beside its state: memory and drive space that are made once, before it first runs.

Passes only write these specs down, on `Program`, and let nodes refer to them by their index there. So a schedule can be
planned, or tried and dropped, without anything being allocated. `runtime.buffers.Buffers` allocates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BufferSpec:
    """`nbytes` of memory in which nodes have places, each [index of the buffer, first byte].

    `device`: where it lies; None for host memory that drives read to and write from. `number`: which of a step's
    buffers on that device it is. Steps run one after the other, so all of a process share the buffer of one number.
    """

    device: torch.device | None
    number: int
    nbytes: int


@dataclass(frozen=True)
class DriveSpec:
    """`nbytes` on the drives that the folders `paths` are on. `label`: what errors call what lies there."""

    paths: tuple[str, ...]
    nbytes: int
    label: str


def add_buffer(buffers: list[BufferSpec], device: torch.device | None, nbytes: int) -> int:
    """Ask for one more buffer on a device; -> its index."""
    number = sum(x.device == device for x in buffers)
    buffers.append(BufferSpec(device, number, nbytes))
    return len(buffers) - 1
