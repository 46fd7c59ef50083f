"""Copies between host and device, each direction on a stream of its own."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from ..util.process import the


class CopyEngine:
    """Which copies are under way. `landing`: address of memory that is being copied to -> the event after which it is
    there; `leaving`: address of host memory that is being copied from -> the event after which it was read."""

    def __init__(self) -> None:
        self.landing: dict[int, Any] = {}
        self.leaving: dict[int, Any] = {}
        self._streams: dict[tuple[torch.device, str], Any] = {}  # (device, kind of device it goes to)

    def copy(self, out: Tensor, x: Tensor, device: torch.device, waited: bool = False) -> Any:
        """Copy between host and device on the stream of that direction; -> the event after which it is done.

        `waited`: the device's stream waits for that before either is let go. Then its memory is used again in the order
        of that stream; else when the host sees that the copy was done, and a host that is ahead of the device takes
        more meanwhile.
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
        """The stream of a device for copies towards a kind of device."""
        if (device, towards) not in self._streams:
            self._streams[device, towards] = torch.cuda.Stream(device)
        return self._streams[device, towards]

    def settle(self, x: Tensor) -> None:
        """Let the host wait until what is copied to `x` is there."""
        event = self.landing.pop(x.data_ptr(), None)
        if event is not None:
            event.synchronize()

    def left(self, x: Tensor) -> None:
        """Let the host wait until what is copied from `x` was read: it is about to be written."""
        event = self.leaving.pop(x.data_ptr(), None)
        if event is not None:
            event.synchronize()

    def wait_for_all(self) -> None:
        """Let the host wait for all that is copied anywhere."""
        for event in list(self.landing.values()):
            event.synchronize()

    def end(self) -> None:
        """Wait for the streams, whatever has become of the device."""
        for stream in self._streams.values():
            with contextlib.suppress(RuntimeError):  # the device itself has failed
                stream.synchronize()


class Landed:
    """A copy, for whoever uses its result: the host waits for it, a device's stream is told to."""

    def __init__(self, event: Any, device: torch.device) -> None:
        self._event, self._device = event, device

    def wait(self, timeout: Any = None) -> None:
        """Until it is there."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).wait_event(self._event)
        else:
            self._event.synchronize()


def copies() -> CopyEngine:
    """The process's copies."""
    return the(CopyEngine)
