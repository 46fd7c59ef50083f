"""Tensors on drives as values of a graph: a *handle*, int64 [1], stands for a region that holds one tensor.

`zerofn::fetch` starts a read, `zerofn::wait` waits for it as for any transfer, `zerofn::write_drive_` starts a write
and returns at once. Reads go through one arena, in which a pass gives every fetch a place. A fetch into a place that is
still being written from waits for that write.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .._torch_compat import current_trace
from ..dry_run.fake_machine import host
from ..job.in_flight import pending
from ..memory.arena import arena_of, end, memory_at
from ..memory.pinned import ForDrives
from ..ops.registry import Lane, Moves, OnShard, Traits, define
from ..util.process import the
from .copy_engine import Landed, copies
from .disk import PAGE, Region, Request, aligned, pages
from .host_worker import worker

ops = torch.ops.zerofn
LOOSE = 2  # writes at a time from memory of their own


class Handles:
    """The regions of all handles, held weakly, and the writes under way from memory outside arenas."""

    def __init__(self) -> None:
        self.regions: WeakValueDictionary[int, Region] = WeakValueDictionary()
        self.loose: deque[Request] = deque()
        self._numbers = itertools.count(1)

    def add(self, region: Region) -> int:
        """Return the number of a new region."""
        number = next(self._numbers)
        self.regions[number] = region
        return number


def handle_of(region: Region) -> Tensor:
    """Return a new handle, valid while somebody holds the region."""
    return torch.tensor([the(Handles).add(region)])


def region_of(handle: Tensor) -> Region:
    """Return the region of a handle."""
    return the(Handles).regions[int(handle)]


class DriveTensor:
    """A tensor [size] on a drive, for a model that computes on `device`."""

    def __init__(self, handle: Tensor, dtype: torch.dtype, size: int, device: torch.device | None = None) -> None:
        self.handle, self.dtype, self.size, self.device = handle, dtype, size, device or host()
        self._region = None if current_trace() is not None else region_of(handle)  # held, so that it stays

    def __reduce__(self) -> Any:
        raise RuntimeError(
            f"{self.region.label} is on a drive and cannot be copied or pickled. Write zerofn.save(path, state), or "
            "zerofn.unshard(state) for a copy in memory."
        )

    @property
    def nbytes(self) -> int:
        """Bytes on the drive."""
        return self.size * self.dtype.itemsize

    @property
    def region(self) -> Region:
        """The region that stores it."""
        assert self._region is not None
        return self._region

    def fetched(self) -> Tensor:
        """Return its value in a step that is being captured. Raises `RuntimeError` elsewhere, where nobody asked
        for a read.
        """
        if current_trace() is None:
            raise RuntimeError(
                f"{self.region.label} is on a drive ({self.region.store.name}), where only compiled steps can use it. "
                "Write zerofn.compile(step), or call zerofn.unshard(state) first."
            )
        return ops.wait(ops.fetch(self.handle, self.size, self.dtype, [], self.device))

    def load(self) -> Tensor:
        """Read its value now."""
        buffer = aligned(self.nbytes)
        self.region.store.read(self.region, buffer).wait()
        return buffer[: self.nbytes].view(self.dtype)

    def save(self, x: Tensor) -> None:
        """Write its value now; what `load` returned, from where it is."""
        if x.dtype != self.dtype or not _fills_pages(x):
            buffer = aligned(self.nbytes)[: self.nbytes].view(self.dtype)
            x = buffer.copy_(x)
        self.region.store.write(self.region, _whole_pages(x)).wait()


class _Work:
    """A request with the interface of a transfer."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def wait(self, timeout: Any = None) -> None:
        """Wait until it is done."""
        self._request.wait()


class _Queued:
    """A write that the thread for updates starts, as a transfer that reads from an arena."""

    def __init__(self, job: Future[Request | None]) -> None:
        self._job = job

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._job.done() and (self._request is None or self._request.done)

    def wait(self) -> None:
        """Wait until it has ended."""
        worker().wait_for(self._job)
        if self._request is not None:
            self._request.wait()

    @property
    def _request(self) -> Request | None:
        return None if self._job.exception() else self._job.result()  # the worker tells what failed


class _Read:
    """A copy to a device, as a transfer that reads from an arena."""

    def __init__(self, event: Any) -> None:
        self._event = event

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Block the host until it has ended."""
        self._event.synchronize()


def fetch(handle: Tensor, size: int, dtype: torch.dtype, place: Sequence[int], device: torch.device) -> Tensor:
    """Start to read `size` elements. The wait starts their copy to `device` if that is not the host, and lets the
    device's stream wait for it.

    `place`: [arena, byte]; empty for memory of its own.
    """
    region, nbytes = region_of(handle), size * dtype.itemsize
    pending().wait(handle)  # until the thread for updates has begun to write there
    buffer = memory_at(place, pages(nbytes)) if place else aligned(nbytes)
    work, held = _Work(region.store.read(region, buffer)), buffer[:nbytes].view(dtype)
    if device.type == "cpu":
        return pending().start(held, lambda: [work], (buffer,))
    out = torch.empty(size, dtype=dtype, device=device)

    def finish() -> None:
        event = copies().copy(out, held, device)
        Landed(event, device).wait()
        if (arena := arena_of(buffer)) is not None:
            arena.leave(buffer, buffer.nbytes, _Read(event))
        else:
            the(ForDrives).keep(buffer, _Read(event))

    return pending().start(out, lambda: [work], (buffer,), finish)


def drive_buffer(size: int, dtype: torch.dtype, place: Sequence[int]) -> Tensor:
    """Return memory [size] in an arena, for a value that will be written to a drive. `place`: [arena, byte]."""
    nbytes = size * dtype.itemsize
    return memory_at(place, pages(nbytes))[:nbytes].view(dtype)


def write_drive_(handle: Tensor, x: Tensor) -> None:
    """Start to write `x` [size].

    In an arena, `x` must not change until a fetch takes its place. Other memory, such as the state's, may be
    written at any time, so it is copied first.
    """
    arena = arena_of(x)
    if arena is not None and x.data_ptr() % PAGE == 0:
        arena.leave(x, pages(x.nbytes), _write(handle, x))
        return
    region, nbytes = region_of(handle), x.nbytes
    loose = the(Handles).loose
    while len(loose) >= LOOSE:
        end(loose.popleft())
    buffer = aligned(nbytes)
    buffer[:nbytes].view(x.dtype).copy_(x)
    loose.append(region.store.write(region, buffer))


def aside_write_drive_(handle: Tensor, x: Tensor) -> None:
    """Start to write `x` [size], which is in an arena, on the thread for updates: it is not complete yet."""
    arena = arena_of(x)
    assert arena is not None
    job = worker().submit_for(handle, _write, handle, x)
    arena.leave(x, pages(x.nbytes), _Queued(job))


def _write(handle: Tensor, x: Tensor) -> Request:
    """Start to write `x` [size] and the rest of its last page."""
    region = region_of(handle)
    return region.store.write(region, _whole_pages(x))


def _fills_pages(x: Tensor) -> bool:
    """Return whether `x` [size] begins a page of host memory, and its storage goes on to the end of its last page."""
    there = x.untyped_storage().nbytes() - x.storage_offset() * x.element_size()
    return x.device.type == "cpu" and x.data_ptr() % PAGE == 0 and x.is_contiguous() and there >= pages(x.nbytes)


def _whole_pages(x: Tensor) -> Tensor:
    """Return uint8 [...], the memory of `x` [size] and the rest of its last page."""
    return torch.empty(0, dtype=torch.uint8).set_(
        x.untyped_storage(), x.storage_offset() * x.element_size(), (pages(x.nbytes),), (1,)
    )


def _no_copy(handle: Tensor, x: Tensor) -> Tensor:
    raise RuntimeError(
        f"{region_of(handle).label} is on a drive, which has room for one state only, but a step with donate=False "
        "needs the old state and the new one. Leave out donate=False, or store the state in memory."
    )


define(
    "fetch(Tensor handle, int size, ScalarType dtype, int[] place, Device device) -> Tensor",
    fetch,
    lambda handle, size, dtype, place, device: handle.new_empty(size, dtype=dtype, device=device),
    traits=Traits(OnShard.KEEPS, Moves(Lane.READ, lambda _, result: result.nbytes), lends=True),
)
define(
    "drive_buffer(int size, ScalarType dtype, int[] place) -> Tensor",
    drive_buffer,
    lambda size, dtype, place: torch.empty(size, dtype=dtype),
    traits=Traits(OnShard.REFUSED, lends=True, bucket=True, free=True),
)
define(
    "drive_handle(int number) -> Tensor",
    lambda number: torch.tensor([number]),
    lambda number: torch.empty(1).long(),
    traits=Traits(OnShard.REFUSED, free=True),
)
define(
    "write_drive(Tensor handle, Tensor x) -> Tensor",
    _no_copy,
    lambda handle, x: handle.new_empty(handle.shape),
    traits=Traits(OnShard.KEEPS, stores="new"),
)
define(
    "write_drive_(Tensor(a!) handle, Tensor x) -> ()",
    write_drive_,
    lambda handle, x: None,
    traits=Traits(OnShard.KEEPS, Moves(Lane.WRITE, lambda given, _: given["x"].nbytes), stores="in place"),
    aside=aside_write_drive_,
)
