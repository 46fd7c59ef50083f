"""Saves behind the steps: a copy of this rank's part in host memory, and a thread that writes it."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - it registers its end before `InFlight` does, so it ends after it
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from ..job.heartbeat import beside
from ..memory.host_allocator import zeros
from ..util.errors import CheckpointError
from ..util.process import the
from ..util.sizes import pages
from .tensor_file import TensorToWrite

log = logging.getLogger("zerofn")

_CHUNK = 16 << 20  # bytes that are copied at a time, and decoded for it where what is stored is encoded
_NICE = 19  # the steps go first where cores are scarce


class Saving:
    """A save. `path`: as it was given; `blocked_s`: the seconds that the call of `save` took."""

    def __init__(self, path: str | os.PathLike[str], blocked_s: float) -> None:
        self.path, self.blocked_s = path, blocked_s
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def begin(self, name: str, channel: str, work: Callable[[], None]) -> None:
        """Let a thread of this name do the work, in which it agrees with the same threads of other ranks."""

        def run() -> None:
            with contextlib.suppress(OSError, AttributeError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
            try:
                with beside(channel):
                    work()
            except BaseException as error:
                log.error("save: %s", error)
                self._error = error

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()  # which raises where a system has no more
        self._thread = thread

    def done(self) -> bool:
        """Whether the save has ended. If it failed, `wait` raises its error."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is complete on all ranks.

        Raises what went wrong, and `TimeoutError` if it takes longer than `timeout` seconds.
        """
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise TimeoutError(
                    f"save: {self.path} is not complete after {timeout:g} s. The save continues in the background."
                )
        error, self._error = self._error, None
        if error is not None:
            raise error

    def __repr__(self) -> str:
        return f"Saving({str(self.path)!r}, {'done' if self.done() else 'in flight'})"


class InFlight:
    """The process's save behind the steps, if there is one: the next save waits for it."""

    def __init__(self) -> None:
        self._saving: Saving | None = None
        self._registered = False

    def finish(self) -> None:
        """Wait for it. Raises `CheckpointError` if it failed and nobody has been told."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        try:
            saving.wait()
        except Exception as error:
            raise CheckpointError(f"the previous save, to {saving.path}, failed: {error}") from error

    def begin(self, path: str | os.PathLike[str], work: Callable[[], None], start: float) -> Saving:
        """Let a thread do the work of a save; `start`: when `save` was called (`time.perf_counter`)."""
        self._saving = saving = Saving(path, 0.0)
        if not self._registered:  # `atexit` comes after the end of all executors, which a network needs
            getattr(threading, "_register_atexit", atexit.register)(_at_exit)
            self._registered = True
        saving.begin("zerofn-save", " of saves", work)
        saving.blocked_s = time.perf_counter() - start
        return saving

    def forked(self) -> None:
        """The thread is the parent's."""
        self._saving = None


def _at_exit() -> None:
    with contextlib.suppress(CheckpointError):  # it was logged
        the(InFlight).finish()


class Snapshot:
    """Host memory as large as this rank's part of a state, which saves copy to in turn."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def of(self, entries: list[TensorToWrite]) -> Callable[[], list[TensorToWrite]]:
        """Return what gives the same entries with the values that they have now, or raises what the copying did."""
        try:
            copies = self._copies(entries)
        except Exception as error:
            failed = error  # told by the thread, to which the other ranks listen

            def fail() -> list[TensorToWrite]:
                raise failed

            return fail
        return lambda: copies

    def _copies(self, entries: list[TensorToWrite]) -> list[TensorToWrite]:
        sizes = [pages(entry.nbytes) for entry in entries]  # what begins at a page is written from there
        if sum(sizes) > self._memory.numel():
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = zeros(sum(sizes), torch.uint8, torch.device("cpu"))
        copies, at = [], 0
        for entry, size in zip(entries, sizes, strict=True):
            copies.append(_copied(entry, self._memory[at : at + entry.nbytes]))
            at += size
        return copies


def _copied(entry: TensorToWrite, memory: Tensor) -> TensorToWrite:
    flat, step = memory.view(entry.dtype), max(1, _CHUNK // entry.dtype.itemsize)
    for start in range(0, entry.numel, step):
        stop = min(start + step, entry.numel)
        flat[start:stop].copy_(entry.read(start, stop))
    return TensorToWrite(entry.name, entry.dtype, entry.shape, lambda a, b: flat[a:b])
