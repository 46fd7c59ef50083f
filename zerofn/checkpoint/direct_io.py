"""Files past the page cache, at the rate of the drive, with a few MiB of memory.

Threads hold several transfers in flight, of aligned pieces (O_DIRECT). On a file system without such transfers they go
through the page cache, and are flushed now and then.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from ..memory.host_allocator import in_huge_pages
from ..offload.disk.files import no_longer_direct, opened
from ..util.sizes import PAGE, pages
from .locations import fetch, is_remote

PIECE = 1 << 20  # bytes of a transfer
DEPTH = 4  # transfers in flight
REMOTE_DEPTH = 16  # where each takes its time
SYNC_EVERY = 256  # pieces: what the page cache holds goes to the disk steadily, not all at the end
_Task = Callable[[], None]


class _Threads:
    """Threads that do tasks in order; `concurrent.futures` would take none once the main thread has ended."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def do(self, task: _Task, depth: int = DEPTH) -> None:
        while len(self._threads) < depth:
            thread = threading.Thread(target=self._work, name="zerofn-file", daemon=True)
            thread.start()  # which raises where a system has no more
            self._threads.append(thread)
        self._tasks.put(task)

    def close(self) -> None:
        """Finish, and end the threads."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # which holds memory


def _buffers(count: int, nbytes: int) -> list[Tensor]:
    """Return buffers that begin at pages. In small pages a transfer has more segments than the system sends at once:
    reads took 1.5 times as long.
    """
    return list(torch.frombuffer(in_huge_pages(mmap.mmap, count * nbytes), dtype=torch.uint8).split(nbytes))


class Writer:
    """A new file, written from its beginning to its end. `nbytes`: its size. Raises `OSError` as the disk does."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self._fd, self._direct = opened(path, os.O_CREAT | os.O_TRUNC, 0o666)
        self._nbytes, self._sent = nbytes, 0
        self._threads, self._error = _Threads(), list[OSError]()
        self._free: SimpleQueue[Tensor] = SimpleQueue()
        for buffer in _buffers(DEPTH + 1, PIECE):
            self._free.put(buffer)
        self._piece, self._filled = self._free.get(), 0

    def begin(self, head: bytes) -> None:
        """Write the beginning, whole pages, and only then take space for the rest: whose file it is can be read."""
        self._move(self._staged(head), 0)
        self._sent = len(head)
        try:
            os.posix_fallocate(self._fd, 0, pages(self._nbytes))
        except OSError as error:
            if error.errno not in (22, 95):  # EINVAL, EOPNOTSUPP: it cannot be done here, and need not
                raise

    def write(self, data: memoryview) -> None:
        """Write what comes next. It must stay as it is until the end: whole pieces are not copied where they can be
        written from where they are.
        """
        if self._error:
            raise self._error[0]
        start, flat = 0, torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
        if len(data) == PIECE and not self._filled and flat.data_ptr() % PAGE == 0:
            self._send(flat)
            return
        while start < len(data):
            count = min(len(data) - start, PIECE - self._filled)
            self._piece[self._filled : self._filled + count].copy_(flat[start : start + count])
            self._filled, start = self._filled + count, start + count
            if self._filled == PIECE:
                self._send(self._piece)

    def end(self, head: bytes) -> None:
        """Write the rest, and the beginning again; flush all to the disk."""
        if self._filled:
            self._piece[self._filled :] = 0
            self._send(self._piece[: pages(self._filled)])
        self._threads.close()
        if self._error:
            raise self._error[0]
        self._move(self._staged(head), 0)
        os.ftruncate(self._fd, self._nbytes)
        os.fsync(self._fd)

    def close(self) -> None:
        """Release the file."""
        self._threads.close()
        os.close(self._fd)

    def _send(self, piece: Tensor) -> None:
        """Let a thread write whole pages. It holds the memory for a piece meanwhile, so that few are in flight."""
        at, held = self._sent, self._piece
        sync = not self._direct and at // PIECE % SYNC_EVERY == SYNC_EVERY - 1
        self._sent, self._filled = at + len(piece), 0

        def task() -> None:
            try:
                if not self._error:
                    self._move(piece, at)
                    if sync:
                        os.fsync(self._fd)
            except OSError as error:
                self._error.append(error)
            self._free.put(held)

        self._threads.do(task)
        self._piece = self._free.get()

    def _staged(self, head: bytes) -> Tensor:
        (memory,) = _buffers(1, len(head))
        memory.copy_(torch.frombuffer(bytearray(head), dtype=torch.uint8))
        return memory

    def _move(self, memory: Tensor, at: int) -> None:
        data, done = memory.numpy().data, 0
        while done < len(data):
            try:
                done += os.pwrite(self._fd, data[done:], at + done)
            except OSError as error:
                self._direct = no_longer_direct(self._fd, self._direct, error)


Block = tuple[Path, int, int]  # file, first byte, bytes


def _depth(path: Path) -> int:
    return REMOTE_DEPTH if is_remote(path) else DEPTH


class ReadAhead:
    """Blocks of files, read ahead: those that follow the one that is asked for are on their way."""

    def __init__(self) -> None:
        self._threads = _Threads()
        self._files: dict[Path, tuple[int, bool]] = {}
        self._ahead: dict[Block, _Read] = {}
        self._free: list[Tensor] = []
        self._held: tuple[Block, _Read] | None = None

    def read(self, block: Block, following: Iterator[Block], check: Callable[[Tensor], None]) -> Tensor:
        """Return a block's bytes, fewer if the file ends: valid until the next call. `following`: those after it.

        The block of the last call is not read again. Raises what `check` does of the bytes, and `OSError` as the disk
        does.
        """
        if self._held is not None and self._held[0] == block:
            return self._held[1].result()
        self._release()
        found = self._ahead.pop(block, None)
        if found is None:  # another place than was expected
            self._drop()
            found = self._start(block)
        for next_one in following:
            if len(self._ahead) >= _depth(block[0]):
                break
            if next_one not in self._ahead:
                self._ahead[next_one] = self._start(next_one)
        try:
            bytes_read = found.result()
            check(bytes_read)
        except BaseException:
            self._free.append(found.memory)
            raise
        self._held = block, found
        return bytes_read

    def close(self) -> None:
        """Close all files."""
        self._drop()
        self._release()
        self._threads.close()
        for fd, _ in self._files.values():
            os.close(fd)
        self._files.clear()

    def _start(self, block: Block) -> _Read:
        path, start, nbytes = block
        if nbytes > PIECE:
            raise ValueError(f"a block has {nbytes:,} bytes, but may have at most {PIECE:,}.")
        self._free = self._free or _buffers(DEPTH + 2, PIECE + 2 * PAGE)  # one that is held, and one to come
        memory = self._free.pop()
        if is_remote(path):
            read: _Read = _Fetch(path, start, nbytes, memory)
        else:
            if path not in self._files:
                self._files[path] = opened(path, 0, 0)
            read = _Read(*self._files[path], start, nbytes, memory)
        self._threads.do(read.carry_out, _depth(path))
        return read

    def _release(self) -> None:
        if self._held is not None:
            self._free.append(self._held[1].memory)
            self._held = None

    def _drop(self) -> None:
        for read in self._ahead.values():
            read.done.wait()
            self._free.append(read.memory)
        self._ahead.clear()


class _Read:
    """A block on its way into memory that has room for the pages it lies in."""

    def __init__(self, fd: int, direct: bool, start: int, nbytes: int, memory: Tensor) -> None:
        self._fd, self._direct, self._start, self._nbytes, self.memory = fd, direct, start, nbytes, memory
        self.done, self._count = threading.Event(), 0
        self._error: Exception | None = None
        self._first = start - start % PAGE

    def carry_out(self) -> None:
        try:
            self._read()
        except Exception as error:
            self._error = error
        self.done.set()

    def _read(self) -> None:
        data, want = self.memory.numpy().data, self._start + self._nbytes - self._first
        end = pages(want)
        while self._count < want:
            try:
                count = os.preadv(self._fd, [data[self._count : end]], self._first + self._count)
            except OSError as error:
                self._direct = no_longer_direct(self._fd, self._direct, error)
                continue
            self._count += count
            if count == 0 or self._count % PAGE:  # the file ends here
                return

    def result(self) -> Tensor:
        self.done.wait()
        if self._error is not None:
            raise self._error
        skipped = self._start - self._first
        return self.memory[skipped : max(skipped, min(self._count, skipped + self._nbytes))]


class _Fetch(_Read):
    """A block of a remote file."""

    def __init__(self, path: Path, start: int, nbytes: int, memory: Tensor) -> None:
        super().__init__(-1, False, start, nbytes, memory)
        self._path, self._first = path, start

    def _read(self) -> None:
        data = fetch(self._path, self._start, self._start + self._nbytes)
        self._count = len(data)
        if data:
            self.memory[: len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
