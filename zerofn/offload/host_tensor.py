"""Tensors that lie in host memory while the model computes on a device, as values of a graph.

`zerofn::bring` starts to copy one to the device, or one of the device to the host; `zerofn::wait` waits for that as for
any transfer; `zerofn::put_` starts to copy back. On CUDA each direction has a stream of its own, and what lies on the
host is page-locked. What the host updates it updates on a thread of its own, *aside*, so that the caller goes on
launching kernels.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from .._torch_compat import below_autograd
from ..comm.transport import under_way
from ..dry_run.fake_machine import host
from ..memory.host_allocator import zeros
from ..ops.registry import Lane, Moves, OnShard, Traits, define
from ..util.errors import said
from .disk import locked

ops = torch.ops.zerofn
_landing: dict[int, Any] = {}  # address of memory that is being copied to -> the event after which it is there
_leaving: dict[int, Any] = {}  # address of host memory that is being copied from -> the event after which it was
_streams: dict[tuple[torch.device, str], Any] = {}  # (device, towards which kind of device) -> where copies run
_jobs: deque[Future[Any]] = deque()  # what was given to the updates' thread, but for what is known to be done
BEHIND = 12  # jobs that may wait for that thread while more gradients are sent to it: two or three units' updates
_failed: list[BaseException] = []  # what an update aside has raised, until it is told: those after it must not run
_owed: WeakSet[Any] = WeakSet()  # the `Sharded`s that what is done aside writes to


class Hosted:
    """A tensor [size] in host memory, for a model that computes on `device`."""

    def __init__(self, host: Tensor, device: torch.device) -> None:
        self.ticket, self.device = host, device
        self.dtype, self.size, self.nbytes = host.dtype, host.numel(), host.nbytes

    def fetched(self) -> Tensor:
        """Its value on the device."""
        return ops.wait(ops.bring(self.ticket, self.device))

    def load(self) -> Tensor:
        """Its value where it lies."""
        _settle(self.ticket)
        return self.ticket

    def save(self, x: Tensor) -> None:
        """Write its value."""
        if x is not self.ticket:
            self.ticket.copy_(x)


def on_host(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros [size] in host memory, page-locked for a CUDA device."""
    return locked(size, dtype) if device.type == "cuda" else zeros(size, dtype, host())


def bring(x: Tensor, device: torch.device, *, parked: bool = False) -> Tensor:
    """Start to copy `x` to `device`, after all that was asked of it before. Wait before use.

    `parked`: on the host nobody reads it, it waits there to be brought back. Then waiting for it does not let the host
    wait, but the device's stream: behind that `x` may be let go, its memory is the device's again when the copy has
    read it, and what brings it back, which is waited for before that is let go, comes after it.
    """
    accelerator = next((d for d in (x.device, device) if d.type == "cuda"), None)
    if accelerator is None:
        _settle(x)
        return under_way(x.to(device, copy=True), tuple, (x,))
    if device.type == "cpu" and x.dim() and not parked:
        _hold_back()
    out = torch.empty_like(x, device=device, pin_memory=device.type == "cpu")
    event = _copy(out, x, accelerator, waited=parked)
    if x.device.type == "cpu" and not parked:
        _leaving[x.data_ptr()] = event
    return under_way(out, lambda: [_Landed(event, accelerator if parked else device)], (x,))


def put_(host: Tensor, x: Tensor) -> None:
    """Start to copy `x` to where it belongs, on the host or on the device."""
    accelerator = next((t.device for t in (host, x) if t.device.type == "cuda"), None)
    if accelerator is None:
        host.copy_(x)
        return
    event = _landing[host.data_ptr()] = _copy(host, x, accelerator)
    if host.device == accelerator:  # whoever computes with it waits
        under_way(host, lambda: [_Landed(event, accelerator)], (x,))


def _copy(out: Tensor, x: Tensor, device: torch.device, waited: bool = False) -> Any:
    """Copy between host and device on the stream of that direction; -> the event after which it is done. `waited`: the
    device's stream waits for that before either is let go. Then its memory is used again in the order of that stream;
    else when the host sees that the copy was done, and a host that is ahead of the device takes more meanwhile."""
    stream = _stream(device, out.device.type)
    stream.wait_stream(torch.cuda.current_stream(device))
    for t in (out, x):
        if t.data_ptr() in _landing:
            stream.wait_event(_landing[t.data_ptr()])
    with torch.cuda.stream(stream):
        out.copy_(x, non_blocking=True)
        for t in (out, x):
            if t.device.type == "cuda" and not waited:
                t.record_stream(stream)
        return stream.record_event()


def _stream(device: torch.device, towards: str) -> Any:
    if (device, towards) not in _streams:
        _streams[device, towards] = torch.cuda.Stream(device)
    return _streams[device, towards]


def _settle(x: Tensor) -> None:
    """Let the host wait until what is copied to `x` is there."""
    event = _landing.pop(x.data_ptr(), None)
    if event is not None:
        event.synchronize()


def _left(x: Tensor) -> None:
    """Let the host wait until what is copied from `x` was read: it is about to be written."""
    event = _leaving.pop(x.data_ptr(), None)
    if event is not None:
        event.synchronize()


class _Landed:
    """A copy, for whoever uses its result: the host waits for it, a device's stream is told to."""

    def __init__(self, event: Any, device: torch.device) -> None:
        self._event, self._device = event, device

    def wait(self, timeout: Any = None) -> None:
        """Until it is there."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).wait_event(self._event)
        else:
            self._event.synchronize()


# --- updates on the host, aside ---------------------------------------------------------------------------------


class _Job:
    """What is done aside, and the tensor that it ends with writing."""

    def __init__(self, future: Future[Any], written: Tensor) -> None:
        self._future, self._written = future, written

    def wait(self, timeout: Any = None) -> None:
        """Until it is done; raises what it raised."""
        _tell(self._future)
        event = _landing.pop(self._written.data_ptr(), None)
        if event is not None:
            _Landed(event, self._written.device).wait()


@functools.cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="zerofn update")


def aside(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
    """Call it on the updates' own thread, after what was given to that before. Results of those may be arguments."""
    while _jobs and _jobs[0].done() and not _jobs[0].exception():
        _jobs.popleft()
    _jobs.append(_thread().submit(_call, function, args, kwargs))
    return _jobs[-1]


def _hold_back() -> None:
    """Let the caller wait while the updates' thread is far behind: each gradient that waits for it takes memory."""
    while len(_jobs) > BEHIND and not _failed:
        wait([_jobs.popleft()])


def finish() -> None:
    """Wait for all that is done aside, and let the host wait for what that puts elsewhere. Raises what it raised."""
    while _jobs:
        _tell(_jobs.popleft())
    _owed.clear()
    for event in list(_landing.values()):
        event.synchronize()


def owe(states: Callable[[], Iterable[Any]]) -> None:
    """Say which `Sharded`s a step returns whose updates are done aside: they are lost where one of those fails. Asked
    for where there are any."""
    if _jobs:
        _owed.update(states())


def end_updates() -> None:
    """Wait for what is done aside, also for the step before one that failed: its state is to be whole. And for copies
    into memory that a failed step has let go without waiting: the next one may get it. Nothing is raised; where
    something failed, what came after it was left out and the states are lost."""
    wait(_jobs)
    _jobs.clear()
    for stream in _streams.values():
        with contextlib.suppress(RuntimeError):  # the device itself has failed
            stream.synchronize()
    for state in list(_owed) if _failed else ():
        state.donate(f"This state was lost when its update failed: {said(_failed[0])}. Load the last checkpoint.")
    _owed.clear()
    _failed.clear()


def _tell(future: Future[Any]) -> None:
    """Wait for one; raise what the first that failed has raised, once."""
    wait([future])
    if _failed:
        error = _failed[0]
        end_updates()
        raise error
    future.result()


def _call(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if _failed:
        return None
    try:
        with below_autograd():
            return function(*map(_value, args), **{k: _value(x) for k, x in kwargs.items()})
    except BaseException as error:
        _failed.append(error)
        raise


def _value(x: Any) -> Any:
    if isinstance(x, list | tuple):
        return [_value(y) for y in x]
    x = x.result() if isinstance(x, Future) else x
    if isinstance(x, Tensor) and x.device.type == "cpu":
        _left(x)
    return x


def aside_put_(place: Tensor, x: Tensor) -> None:
    """`put_` aside; whoever uses `place` next waits for it."""
    future = aside(put_, place, x)
    under_way(place, lambda: [_Job(future, place)], (x,))


def aside_updated_(place: Tensor) -> None:
    """Whoever uses `place` next waits for what was given to the updates' thread before."""
    future = aside(_nothing)
    under_way(place, lambda: [_Job(future, place)], ())


def _nothing(*args: Any) -> None:
    pass


define("updated_(Tensor(a!) x) -> ()", _nothing, _nothing, traits=Traits(OnShard.KEEPS), aside=aside_updated_)
define(
    "bring(Tensor x, Device device, *, bool parked=False) -> Tensor",
    bring,
    lambda x, device, parked=False: torch.empty_like(x, device=device),
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
