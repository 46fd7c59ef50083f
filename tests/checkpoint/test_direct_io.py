"""Files past the page cache hold what was written, whatever the sizes, and where there are no direct transfers."""

import errno
import fcntl
import mmap
import os
import random
import resource
import threading

import pytest
import torch

from zerofn.checkpoint import direct_io
from zerofn.checkpoint.direct_io import PIECE, ReadAhead, Writer
from zerofn.util.sizes import PAGE


@pytest.fixture(params=["direct", "refused at the first transfer", "none"])
def how(request, monkeypatch):
    if request.param == "none":
        monkeypatch.setattr(
            direct_io, "opened", lambda path, flags, mode: (os.open(path, flags | os.O_RDWR, mode), False)
        )
    if request.param.startswith("refused"):
        for name in ("pwrite", "preadv"):
            monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    return request.param


def refusing(transfer):
    """A file system that opens with O_DIRECT and refuses to move anything so."""

    def call(fd, *args):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return transfer(fd, *args)

    return call


def write(path, head, parts):
    file = Writer(path, len(head) + sum(map(len, parts)))
    file.begin(bytes(len(head)))
    for part in parts:
        file.write(memoryview(bytearray(part)))
    file.end(head)
    file.close()


def drawn(sizes):
    return [random.Random(k).randbytes(n) for k, n in enumerate(sizes)]


SIZES = [[], [0], [1], [PAGE], [PIECE], [PIECE - 1, 3], [5, PIECE * 6, 1, 0, PIECE + 77]]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_file_holds_what_was_written(tmp_path, how, sizes):
    head, parts = random.Random(9).randbytes(2 * PAGE), drawn(sizes)
    write(tmp_path / "a", head, parts)
    assert (tmp_path / "a").read_bytes() == head + b"".join(parts)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o666 & ~umask()


def test_whole_pieces_are_written_from_where_they_are(tmp_path, how, monkeypatch):
    """If they begin at a page, in memory and in the file; others are copied first."""
    moved, head = [], bytes(PAGE)
    monkeypatch.setattr(
        Writer, "_move", lambda self, x, at, move=Writer._move: moved.append(x.data_ptr()) or move(self, x, at)
    )
    memory = mmap.mmap(-1, 4 * PIECE)
    memory.write(random.Random(0).randbytes(4 * PIECE))
    whole = [memoryview(memory)[k * PIECE : (k + 1) * PIECE] for k in range(4)]
    addresses = [torch.frombuffer(x, dtype=torch.uint8).data_ptr() for x in whole]
    for parts, from_there in (([*whole], 4), ([whole[0], whole[1][:PAGE], whole[2]], 1), ([whole[0][8:], whole[1]], 0)):
        moved.clear()
        file = Writer(tmp_path / "a", len(head) + sum(map(len, parts)))
        file.begin(head)
        for part in parts:
            file.write(part)
        file.end(head)
        file.close()
        assert len(set(moved) & set(addresses)) == from_there
        assert (tmp_path / "a").read_bytes() == head + b"".join(parts)


def umask():
    now = os.umask(0)
    os.umask(now)
    return now


def test_blocks_are_read_as_they_are_in_any_order(tmp_path, how):
    """In order, with some left out, and backwards; the end of a file is where it is."""
    data = random.Random(0).randbytes(7 * PIECE + 123)
    (tmp_path / "a").write_bytes(data)
    blocks = [(tmp_path / "a", k, min(100_001, len(data) - k)) for k in range(17, len(data), 100_001)]
    reader = ReadAhead()
    for order in (range(len(blocks)), range(0, len(blocks), 3), reversed(range(len(blocks)))):
        for k in order:
            found = reader.read(blocks[k], iter(blocks[k + 1 :]), lambda x: None)
            assert bytes(found.tolist() if len(found) < 99 else found.numpy()) == data[blocks[k][1] :][: blocks[k][2]]
    assert len(reader.read((tmp_path / "a", len(data) - 5, 50), iter(()), lambda x: None)) == 5
    assert len(reader.read((tmp_path / "a", len(data) + PAGE, 50), iter(()), lambda x: None)) == 0
    reader.close()


def test_reads_are_ahead_and_take_little_memory(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(bytes(40 * PIECE))
    blocks = [(tmp_path / "a", k * PIECE, PIECE) for k in range(40)]
    started = []
    monkeypatch.setattr(direct_io, "_buffers", lambda k, n, f=direct_io._buffers: started.append(k * n) or f(k, n))
    reader = ReadAhead()
    for k, block in enumerate(blocks):
        reader.read(block, iter(blocks[k + 1 :]), lambda x: None)
    reader.close()
    assert len(started) == 1 and sum(started) < 8 << 20


def test_a_block_that_is_wrong_is_not_kept(tmp_path):
    (tmp_path / "a").write_bytes(bytes(100))
    reader, asked = ReadAhead(), []

    def check(found):
        asked.append(len(found))
        if len(asked) < 3:
            raise ValueError("wrong")

    for _ in range(2):
        with pytest.raises(ValueError, match="wrong"):
            reader.read((tmp_path / "a", 0, 100), iter(()), check)
    for _ in range(2):
        assert len(reader.read((tmp_path / "a", 0, 100), iter(()), check)) == 100
    assert asked == [100] * 3
    reader.close()


@pytest.mark.parametrize("where", ["space", "transfer", "flush"])
def test_a_full_disk(tmp_path, monkeypatch, where):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, {"space": "posix_fallocate", "transfer": "pwrite", "flush": "fsync"}[where], full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "a", bytes(PAGE), drawn([PIECE * 12]))


def test_a_limit_of_the_system(tmp_path):
    """A real one: files of this process may not grow beyond 3 MiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write(tmp_path / "a", bytes(PAGE), drawn([PIECE * 12]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_descriptor_and_no_thread_is_left(tmp_path):
    num_open, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    write(tmp_path / "a", bytes(PAGE), drawn([PIECE * 3]))
    reader = ReadAhead()
    reader.read((tmp_path / "a", 0, 10), iter(()), lambda x: None)
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == num_open and threading.active_count() == threads
    assert torch.equal(
        reader.read((tmp_path / "a", 0, 10), iter(()), lambda x: None), torch.zeros(10, dtype=torch.uint8)
    )
    reader.close()


def test_a_system_without_threads_says_so(tmp_path, monkeypatch):
    def full(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", full)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        writer = Writer(tmp_path / "a", 8 * PIECE)
        try:
            writer.write(memoryview(bytearray(4 * PIECE)))
        finally:
            writer.close()
