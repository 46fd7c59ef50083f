"""Copies between host and device, each direction on a stream of its own."""

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

    def copy(self, out: Tensor, x: Tensor, device: torch.device, waited: bool = False) -> Any:
        """Copy between host and device on the stream of that direction, and return the event that follows the
        copy.

        `waited`: the device's stream waits for the copy before either tensor is freed, so the stream orders
        reuse of their memory. Otherwise memory is reused when the host sees that the copy is done, and a host
        that runs ahead of the device takes more meanwhile.
        """
        stream = self.stream(device, out.device.type)
        stream.wait_stream(torch.cuda.current_stream(device))
        for t in (out, x):
            if t.data_ptr() in self.landing:
                stream.wait_event(self.landing[t.data_ptr()])
        with torch.cuda.stream(stream):
            out.copy_(x, non_blocking=True)
            for t in (out, x):
                if t.device.type == "cuda" and not waited:
                    t.record_stream(stream)
            return stream.record_event()

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
        for event in list(self.landing.values()):
            event.synchronize()

    def end(self) -> None:
        """Wait for the streams, also on a device that has failed."""
        for stream in self._streams.values():
            with contextlib.suppress(RuntimeError):  # the device itself has failed
                stream.synchronize()


class Landed:
    """A copy, as a transfer to wait for: blocks the host, or makes a device's stream wait."""

    def __init__(self, event: Any, device: torch.device) -> None:
        self._event, self._device = event, device

    def wait(self, timeout: Any = None) -> None:
        """Wait until the copy is done."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).wait_event(self._event)
        else:
            self._event.synchronize()


def copies() -> CopyEngine:
    """Return the process's copies."""
    return the(CopyEngine)
