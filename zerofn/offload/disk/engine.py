"""Requests, and the threads of each drive that carry them out block by block.

`os.preadv` and `os.pwritev` release Python's lock while the drive works, and so does the checksum. A few threads a
drive keep it busy, with no copy between the drive and the caller's memory.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue

import torch
from torch import Tensor

from ...util.errors import DiskError
from .checksum import checksum
from .files import File
from .region import Region
from .transfer import transfer

PATIENCE = 10.0  # seconds that `close` waits for a transfer under way
INVALID = -1  # the checksum of a block whose write began and did not succeed
Jobs = SimpleQueue["tuple[Request, int] | None"]


@dataclass
class Statistics:
    """What a store did: bytes moved, seconds with a request under way, seconds in `Request.wait`."""

    bytes_read: int = 0
    bytes_written: int = 0
    seconds_busy: float = 0.0
    seconds_waited: float = 0.0


class Request:
    """A read or write under way. It owns its buffer until it is done."""

    def __init__(self, engine: Engine, region: Region, buffer: Tensor, writes: bool) -> None:
        self.region, self.writes = region, writes
        self.left = len(region.blocks)  # blocks
        self.num_before, self.next = 0, list[Request]()  # requests that this one waits for; requests that wait for it
        self._engine, self._done = engine, threading.Event()
        self._memory = buffer.view(-1).view(torch.uint8).numpy().data  # keeps the buffer
        self._address = buffer.data_ptr()
        self._error: DiskError | None = None

    @property
    def done(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._done.is_set()

    def wait(self) -> None:
        """Wait until the request is done. Raises `DiskError` for a failure, at every call."""
        if not self._done.is_set():
            start = time.perf_counter()
            self._done.wait()
            self._engine.count(waited=time.perf_counter() - start)
        if self._error is not None:
            raise again(self._error)

    def end(self, error: DiskError | None) -> None:
        """Wake up those who wait."""
        self._error = self._error or error
        self._memory = memoryview(b"")
        self._done.set()

    def carry_out(self, file: File, number: int) -> None:
        """Move one block."""
        error = self._engine.failure
        try:
            if error is None:
                (self._write if self.writes else self._read)(file, number)
        except _Damaged as damaged:  # of this block only
            error = damaged
        except Exception as caught:
            error = self._engine.fail(self._failed(file, number, caught))
        self._error = self._error or error
        self._engine.end_block(self)

    def _write(self, file: File, number: int) -> None:
        block = self.region.blocks[number]
        found = checksum(self._address + block.start, block.nbytes)
        block.check = INVALID
        transfer(file, self._memory[block.start : block.start + block.nbytes], block.offset, True)
        block.check = found
        self._engine.count(written=block.nbytes)

    def _read(self, file: File, number: int) -> None:
        block = self.region.blocks[number]
        address = self._address + block.start
        if block.check is None:  # never written
            ctypes.memset(address, 0, block.nbytes)
            return
        transfer(file, self._memory[block.start : block.start + block.nbytes], block.offset, False)
        self._engine.count(read=block.nbytes)
        if checksum(address, block.nbytes) != block.check:
            raise _Damaged(
                f"{self._place(file, number)} is damaged: its bytes differ from those that were written. Check the "
                "drive, and continue from the last checkpoint."
            )

    def _place(self, file: File, number: int) -> str:
        block = self.region.blocks[number]
        return (
            f"{file.path}: {self.region.label}, block {number} of {len(self.region.blocks)} "
            f"({block.nbytes:,} bytes from {block.offset:,} on)"
        )

    def _failed(self, file: File, number: int, error: Exception) -> DiskError:
        verb = "written" if self.writes else "read"
        why = getattr(error, "strerror", None) or error
        return DiskError(f"{self._place(file, number)} cannot be {verb}: {why}.", getattr(error, "errno", None))


class _Damaged(DiskError):
    """A block read back with other bytes than were written."""


class Engine:
    """The files of a store, their threads, and the state that requests share."""

    def __init__(self, name: str, files: Sequence[File], depths: Sequence[int]) -> None:
        self.name, self.files = name, files
        self.failure: DiskError | None = None
        self._lock, self._pid = threading.Lock(), os.getpid()
        self._statistics = Statistics()
        self._under_way, self._since = 0, 0.0
        self._jobs = [Jobs() for _ in files]
        self._threads = [
            threading.Thread(target=_serve, args=(file, jobs), name=f"zerofn {name} {file.folder}", daemon=True)
            for file, jobs, depth in zip(files, self._jobs, depths, strict=True)
            for _ in range(depth)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def statistics(self) -> Statistics:
        """Return a copy of the counts so far."""
        with self._lock:
            return replace(self._statistics)

    def count(self, read: int = 0, written: int = 0, waited: float = 0.0) -> None:
        """Add to the statistics."""
        with self._lock:
            self._statistics.bytes_read += read
            self._statistics.bytes_written += written
            self._statistics.seconds_waited += waited

    def submit(self, request: Request) -> None:
        """Start a request when earlier ones on its region are done: a write waits for all, a read for writes."""
        if os.getpid() != self._pid:
            raise DiskError(
                f"{self.name}: the threads of this store are in process {self._pid}, and this process was forked from "
                "it. Make a Store in the process that uses it."
            )
        region = request.region
        with self._lock:
            if self.failure is not None:
                raise again(self.failure)
            for earlier in region.line_up(request):
                earlier.next.append(request)
                request.num_before += 1
            if not request.num_before:
                self._start(request)

    def _start(self, request: Request) -> None:
        if not self._under_way:
            self._since = time.perf_counter()
        self._under_way += 1
        for number, block in enumerate(request.region.blocks):
            self._jobs[block.drive].put((request, number))

    def end_block(self, request: Request) -> None:
        """Count down a request's blocks. The last one ends it and starts the requests that waited for it."""
        with self._lock:
            request.left -= 1
            if request.left:
                return
            self._under_way -= 1
            if not self._under_way:
                self._statistics.seconds_busy += time.perf_counter() - self._since
            ended = [request]
            while ended:
                one = ended.pop()
                one.region.forget(one)
                one.end(self.failure if one.left else None)
                for other in one.next:
                    other.num_before -= 1
                    if not other.num_before and self.failure:
                        ended.append(other)
                    elif not other.num_before:
                        self._start(other)

    def fail(self, error: DiskError) -> DiskError:
        """Make every later request raise `error`, or the error that came first."""
        with self._lock:
            self.failure = self.failure or error
            return self.failure

    def close(self) -> None:
        """End the threads after the transfers under way, drop waiting requests, and close the files."""
        if os.getpid() == self._pid:
            self.fail(DiskError(f"{self.name}: this store is closed."))
            for jobs in self._jobs:
                for _ in self._threads:  # one for each thread of the store; too many do no harm
                    jobs.put(None)
            end = time.monotonic() + PATIENCE
            others = [thread for thread in self._threads if thread is not threading.current_thread()]
            for thread in others:
                thread.join(max(0.0, end - time.monotonic()))
            if any(thread.is_alive() for thread in others):
                return  # the drive does not answer: keep its descriptor, so that no other file gets it
        for file in self.files:
            file.close()


def _serve(file: File, jobs: Jobs) -> None:
    """Run jobs in a thread until there is None. While it waits it holds no request, and so keeps no store alive."""
    while _do(file, jobs.get()):
        pass


def _do(file: File, job: tuple[Request, int] | None) -> bool:
    if job is None:
        return False
    request, number = job
    request.carry_out(file, number)
    return True


def again(error: DiskError) -> DiskError:
    """Return a copy of an error that can be raised once more."""
    return DiskError(str(error), error.errno)
