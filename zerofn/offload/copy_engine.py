"""Copies between host and device, each direction on a stream of its own.

Memory is reused in the order of the device's own stream: it waits for a copy before what the copy has read is freed.
`record_stream` would leave that to the host, which runs ahead and finds nothing freed.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from ..util.process import the


class CopyEngine:
    """The copies under way.

    `landing`: address of memory that is copied to -> the event that says the copy is done. `leaving`: address of
    host memory that is copied from -> the event that says it was read.
    """

    def __init__(self) -> None:
        self.landing: dict[int, Any] = {}
        self.leaving: dict[int, Any] = {}
        self._streams: dict[tuple[torch.device, str], Any] = {}  # (device, type of the device that it copies to)
        self._reading: dict[torch.device, tuple[Any, Tensor]] = {}  # the last copy from a device: its event, its source

    def copy(self, out: Tensor, x: Tensor, device: torch.device, waited: bool = False) -> Any:
        """Copy between host and device on the stream of that direction, and return the event that follows the
        copy.

        `waited`: the device's stream waits for the copy before either tensor is freed. Otherwise the source of a copy
        to the host is kept until the next such copy, before which the device's stream waits for this one. Who reads
        a copy on the device waits for it there, so that it is freed after it was filled.
        """
        stream = self.stream(device, out.device.type)
        compute = torch.cuda.current_stream(device)
        if has_streams(x.device) and device in self._reading:
            compute.wait_event(self._reading.pop(device)[0])
        stream.wait_stream(compute)
        for t in (out, x):
            if t.data_ptr() in self.landing:
                stream.wait_event(self.landing[t.data_ptr()])
        with torch.cuda.stream(stream):
            out.copy_(x, non_blocking=True)
            event = stream.record_event()
        if has_streams(x.device) and not waited:
            self._reading[device] = event, x
        return event

    def stream(self, device: torch.device, towards: str) -> Any:
        """Return a device's stream for copies to one type of device."""
        if (device, towards) not in self._streams:
            self._streams[device, towards] = torch.cuda.Stream(device)
        return self._streams[device, towards]

    def settle(self, x: Tensor) -> None:
        """Block the host until the copy to `x` is done."""
        event = self.landing.pop(x.data_ptr(), None)
        if event is not None:
            event.synchronize()

    def left(self, x: Tensor) -> None:
        """Block the host until the copy from `x` was read: `x` is about to be written."""
        event = self.leaving.pop(x.data_ptr(), None)
        if event is not None:
            event.synchronize()

    def wait_for_all(self) -> None:
        """Block the host until all copies are done."""
        for event in [*self.landing.values(), *(event for event, _ in self._reading.values())]:
            event.synchronize()
        self._reading.clear()

    def end(self) -> None:
        """Wait for the streams, also on a device that has failed."""
        for stream in self._streams.values():
            with contextlib.suppress(RuntimeError):  # the device itself has failed
                stream.synchronize()
        self._reading.clear()


class Landed:
    """A copy, as a transfer to wait for: blocks the host, or makes a device's stream wait."""

    def __init__(self, event: Any, device: torch.device) -> None:
        self._event, self._device = event, device

    def wait(self, timeout: Any = None) -> None:
        """Wait until the copy is done."""
        if has_streams(self._device):
            torch.cuda.current_stream(self._device).wait_event(self._event)
        else:
            self._event.synchronize()


def has_streams(device: torch.device) -> bool:
    """Whether a device copies from and to the host on streams."""
    return device.type == "cuda"


def copies() -> CopyEngine:
    """Return the process's copies."""
    return the(CopyEngine)
