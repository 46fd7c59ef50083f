"""Tensors in host memory, for a model that computes on a device, as values of a graph.

`zerofn::bring` starts a copy to or from the device, `zerofn::wait` waits for it as for any transfer, `zerofn::put_`
starts a copy back. On CUDA each direction has its own stream, and host memory is page-locked. The host updates state on
a thread of its own: see `host_worker`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..dry_run.fake_machine import host
from ..job.in_flight import pending
from ..memory.host_allocator import zeros
from ..memory.pinned import like, locked
from ..ops.registry import Lane, Moves, OnShard, Traits, define
from .copy_engine import Landed, copies, has_streams
from .host_worker import worker

ops = torch.ops.zerofn


class HostTensor:
    """A tensor [size] in host memory, for a model that computes on `device`."""

    def __init__(self, host: Tensor, device: torch.device) -> None:
        self.handle, self.device = host, device
        self.dtype, self.size, self.nbytes = host.dtype, host.numel(), host.nbytes

    def fetched(self) -> Tensor:
        """Return its value on the device."""
        return ops.wait(ops.bring(self.handle, self.device))

    def load(self) -> Tensor:
        """Return its value in host memory."""
        copies().settle(self.handle)
        return self.handle

    def save(self, x: Tensor) -> None:
        """Write its value."""
        if x is not self.handle:
            self.handle.copy_(x)


def on_host(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros [size] in host memory, page-locked for a CUDA device."""
    return locked(size, dtype, device) if has_streams(device) else zeros(size, dtype, host())


def bring(x: Tensor, device: torch.device, *, offloaded: bool = False) -> Tensor:
    """Start to copy `x` to `device`, after earlier work on it. Wait before use.

    `offloaded`: nobody reads the copy on the host; it waits there to be copied back. Then the wait blocks the
    device's stream and not the host. After the wait, `x` may be freed: the stream orders its reuse after the copy.
    """
    accelerator = next((d for d in (x.device, device) if has_streams(d)), None)
    if accelerator is None:
        copies().settle(x)
        return pending().start(x.to(device, copy=True), list, (x,))
    if device.type == "cpu" and x.dim() and not offloaded:
        worker().hold_back()
    out = like(x, accelerator) if device.type == "cpu" else torch.empty_like(x, device=device)
    event = copies().copy(out, x, accelerator, waited=offloaded)
    if x.device.type == "cpu" and not offloaded:
        copies().leaving[x.data_ptr()] = event
    return pending().start(out, lambda: [Landed(event, accelerator if offloaded else device)], (x,))


def put_(host: Tensor, x: Tensor) -> None:
    """Start to copy `x` to its place on the host or the device."""
    accelerator = next((t.device for t in (host, x) if has_streams(t.device)), None)
    if accelerator is None:
        host.copy_(x)
        return
    event = copies().landing[host.data_ptr()] = copies().copy(host, x, accelerator)
    if host.device == accelerator:  # the next reader waits
        pending().start(host, lambda: [Landed(event, accelerator)], (x,))


def aside_put_(place: Tensor, x: Tensor) -> None:
    """Run `put_` on the thread for updates; the next user of `place` waits for it."""
    worker().submit_for(place, put_, place, x)


def aside_updated_(place: Tensor) -> None:
    """Let the next user of `place` wait for the earlier jobs of the thread for updates."""
    worker().submit_for(place, _nothing)


def _nothing(*args: Any) -> None:
    pass


define("updated_(Tensor(a!) x) -> ()", _nothing, _nothing, traits=Traits(OnShard.KEEPS), aside=aside_updated_)
define(
    "bring(Tensor x, Device device, *, bool offloaded=False) -> Tensor",
    bring,
    lambda x, device, offloaded=False: torch.empty_like(x, device=device),
    traits=Traits(OnShard.KEEPS, Moves(Lane.COPY, lambda _, result: result.nbytes, lambda given: given["device"])),
)
define(
    "put(Tensor host, Tensor x) -> Tensor",
    lambda host, x: x.to(host.device, copy=True),
    lambda host, x: host.new_empty(host.shape),
    traits=Traits(OnShard.KEEPS, stores="new"),
)
define(
    "put_(Tensor(a!) host, Tensor x) -> ()",
    put_,
    lambda host, x: None,
    traits=Traits(
        OnShard.KEEPS,
        Moves(Lane.COPY, lambda given, _: given["x"].nbytes, lambda given: given["host"].device),
        stores="in place",
    ),
    aside=aside_put_,
)
