"""Drives that fail, lie, are full or are not there; processes that end in the middle."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch

from tests.support.disk_stores import BLOCK, behind_its_back, filled, small_store, written
from zerofn.offload.disk import PAGE, DiskError, Store, aligned, files, pages

direct_or_not = pytest.mark.filterwarnings("ignore:.*O_DIRECT")
ROOT = Path(__file__).resolve().parents[3]


# --- what comes back --------------------------------------------------------------------------


@direct_or_not
@pytest.mark.parametrize("place", [0, BLOCK - 1, BLOCK, 3 * BLOCK + 77])
def test_a_changed_byte_is_noticed(tmp_path, place):
    with small_store(tmp_path) as store:
        region, _ = written(store, 4 * BLOCK)
        other, data = written(store, BLOCK, "layers.4 exp_avg", seed=1)
        with behind_its_back(store) as fd:
            byte = os.pread(fd, 1, place)[0]
            os.pwrite(fd, bytes([byte ^ 4]), place)
            os.fsync(fd)
        said = (
            f"layers.3 exp_avg, block {place // BLOCK} of 4 .* is damaged: its bytes differ from those that were "
            "written"
        )
        for _ in range(2):
            with pytest.raises(DiskError, match=f"^{tmp_path}.*{said}"):
                store.read(region, aligned(4 * BLOCK)).wait()
        store.read(other, found := aligned(BLOCK)).wait()  # the others are as they were
        assert torch.equal(found, data)
        store.write(region, filled(4 * BLOCK, seed=2)).wait()
        store.read(region, aligned(4 * BLOCK)).wait()


@direct_or_not
def test_blocks_of_another_time_or_place_are_noticed(tmp_path):
    with small_store(tmp_path) as store:
        region, old = written(store, 2 * BLOCK, seed=1)
        store.write(region, filled(2 * BLOCK, seed=2)).wait()
        with behind_its_back(store) as fd:
            os.pwrite(fd, old[:BLOCK].numpy().tobytes(), 0)  # a write that was lost
            os.fsync(fd)
        with pytest.raises(DiskError, match="block 0 of 2 .* is damaged"):
            store.read(region, aligned(2 * BLOCK)).wait()


@direct_or_not
@pytest.mark.parametrize("left", [0, PAGE, BLOCK + 1000])
def test_a_file_cut_short(tmp_path, left):
    with small_store(tmp_path, nbytes=2 * BLOCK, depth=1) as store:
        region, _ = written(store, 2 * BLOCK)
        with behind_its_back(store) as fd:
            os.ftruncate(fd, left)
        offset = left // BLOCK * BLOCK
        with pytest.raises(DiskError, match=f"from {offset:,} on.* cannot be read: .* of 8,192 bytes were read"):
            store.read(region, aligned(2 * BLOCK)).wait()


# --- transfers that fail ----------------------------------------------------------------------


@direct_or_not
@pytest.mark.parametrize("name", ["preadv", "pwritev"])
@pytest.mark.parametrize("most", [PAGE, 3 * PAGE, PAGE + 100])
def test_short_transfers_are_continued(tmp_path, monkeypatch, name, most):
    move = getattr(os, name)
    with small_store(tmp_path, block=8 * PAGE) as store:
        monkeypatch.setattr(os, name, lambda fd, views, at: min(most, move(fd, [views[0][: pages(most)]], at)))
        region, data = written(store, 20 * PAGE)
        found = aligned(20 * PAGE)
        store.read(region, found).wait()
        assert torch.equal(found, data)


@direct_or_not
@pytest.mark.parametrize("moved", [0, 100])
def test_short_transfers_without_an_end(tmp_path, monkeypatch, moved):
    with small_store(tmp_path) as store:
        region = store.allocate(BLOCK, "layers.3 exp_avg")
        monkeypatch.setattr(os, "pwritev", lambda *_: moved)
        said = f"layers.3 exp_avg, block 0 of 1 .8,192 bytes from 0 on. cannot be written: {moved} of 8,192 bytes were"
        with pytest.raises(DiskError, match=said):
            store.write(region, filled(BLOCK)).wait()


@direct_or_not
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_after_an_error_everything_raises_it(tmp_path, monkeypatch, name, number):
    all_asked = threading.Event()

    def fails(fd, views, offset):
        assert all_asked.wait(10)
        if offset == 2 * BLOCK:
            raise OSError(number, os.strerror(number))
        return move(fd, views, offset)

    store = small_store(tmp_path)
    region, _ = written(store, 4 * BLOCK)
    other, _ = written(store, BLOCK, "other")
    move = getattr(os, name)
    monkeypatch.setattr(os, name, fails)
    begin = store.read if name == "preadv" else store.write
    begin(region, filled(4 * BLOCK))
    last = store.read(region, aligned(4 * BLOCK))
    all_asked.set()
    verb = "read" if name == "preadv" else "written"
    said = rf"^{tmp_path}.*: layers.3 exp_avg, block 2 of 4 \(8,192 bytes from 16,384 on\) cannot be {verb}: "
    for _ in range(2):
        with pytest.raises(OSError, match=said + os.strerror(number)) as caught:
            last.wait()
        assert caught.value.errno == number
    monkeypatch.undo()
    for begin in (store.read, store.write):
        with pytest.raises(DiskError, match=said):
            begin(other, aligned(BLOCK))
    store.close()
    with pytest.raises(DiskError, match=said):
        store.read(other, aligned(BLOCK))


@direct_or_not
def test_a_write_that_failed_never_verifies(tmp_path, monkeypatch):
    """Even where the bytes came to the drive, and where the failure is forgotten."""
    move = os.pwritev

    def fails(*arguments):
        move(*arguments)
        raise OSError(errno.EIO, "late")

    with small_store(tmp_path) as store:
        region, data = written(store, BLOCK)
        monkeypatch.setattr(os, "pwritev", fails)
        with pytest.raises(DiskError, match="cannot be written: late"):
            store.write(region, data).wait()
        store._engine.failure = None
        with pytest.raises(DiskError, match="is damaged"):
            store.read(region, aligned(BLOCK)).wait()


# --- folders ----------------------------------------------------------------------------------


def refused(said, *folders, nbytes=1 << 20):
    with pytest.raises(DiskError, match=said) as caught:
        small_store(*folders, nbytes=nbytes)
    assert str(caught.value).count("\n") == 0
    return caught.value.errno


def test_folders_that_are_none(tmp_path):
    (tmp_path / "file").write_text("")
    missing = tmp_path / "missing"
    number = refused(f"^moments: {missing} does not exist; .* `mkdir -p {missing}`", tmp_path, missing)
    assert number == errno.ENOENT
    assert refused(f"^moments: {tmp_path}/file is not a folder; ", tmp_path / "file") == errno.ENOTDIR
    assert sorted(os.listdir(tmp_path)) == ["file"]


def test_a_folder_without_permission(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    assert refused(f"^moments: {tmp_path} is not writable. ", tmp_path) == errno.EACCES
    monkeypatch.undo()
    monkeypatch.setattr(os, "open", raising(errno.EROFS))
    assert refused(f"^moments: {tmp_path} is not writable. ", tmp_path) == errno.EROFS


def test_too_little_space_is_summed_over_folders_of_one_drive(tmp_path, monkeypatch):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    free = os.statvfs(tmp_path)
    free = free.f_bavail * free.f_frsize
    monkeypatch.setattr(os, "posix_fallocate", pytest.fail)
    said = rf"^moments: {folders[0]} has [\d.]+ GB free, but needs [\d.]+ GB. "
    assert refused(said, *folders, nbytes=free + (1 << 30)) == errno.ENOSPC
    assert [os.listdir(folder) for folder in folders] == [[], []]


def test_space_that_is_refused_on_the_second_drive(tmp_path, monkeypatch):
    """A quota, say: nothing is left on the first one."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    taken, opened = os.posix_fallocate, []

    def fallocate(fd, *rest):
        opened.append(fd)
        return taken(fd, *rest) if len(opened) == 1 else raising(errno.EDQUOT)()

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert refused(f"^moments: {folders[1]} has .* but needs", *folders) == errno.ENOSPC
    assert [os.listdir(folder) for folder in folders] == [[], []]
    assert not any(os.path.exists(f"/proc/self/fd/{fd}") for fd in opened)


def raising(number):
    def fails(*_, **__):
        raise OSError(number, os.strerror(number))

    return fails


def refuse_direct(monkeypatch, at_open):
    """A file system without O_DIRECT: it says so when a file is opened, or at the first transfer."""
    files._buffered.clear()
    opened, move = os.open, os.preadv

    def open_(path, flags, *rest):
        return raising(errno.EINVAL)() if flags & os.O_DIRECT else opened(path, flags, *rest)

    def preadv(fd, *rest):
        import fcntl

        return raising(errno.EINVAL)() if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT else move(fd, *rest)

    monkeypatch.setattr(os, *(("open", open_) if at_open else ("preadv", preadv)))


@pytest.mark.parametrize("at_open", [True, False])
def test_without_direct_transfers(tmp_path, monkeypatch, at_open):
    refuse_direct(monkeypatch, at_open)
    with pytest.warns(RuntimeWarning, match=f"^{tmp_path}: the file system has no direct transfers") as told:
        store = small_store(tmp_path)
    assert len(told) == 1
    region, data = written(store, 10_000)
    store.read(region, found := aligned(10_000)).wait()
    assert torch.equal(found, data)
    assert "through the page cache" in store.describe()
    store.close()
    small_store(tmp_path).close()  # told once; another warning would be an error here
    assert os.listdir(tmp_path) == []


def test_a_name_that_cannot_be_taken_away_early_goes_when_the_store_is_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "unlink", raising(errno.EBUSY))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store = small_store(tmp_path)
    (name,) = os.listdir(tmp_path)
    assert name.startswith(f"zerofn-moments-rank0-{os.getpid()}-")
    monkeypatch.undo()
    store.close()
    assert os.listdir(tmp_path) == []


# --- other processes --------------------------------------------------------------------------

PROGRAM = """
import os, sys, warnings
warnings.simplefilter("ignore")
from zerofn.offload.disk import Store, aligned
store = Store(sys.argv[1], 64 << 20, name="moments", block=1 << 20, depth=2)
regions = [store.allocate(32 << 20, f"layers.{k}") for k in range(2)]
buffers = [aligned(32 << 20).fill_(k + 1) for k in range(2)]
"""


def program(text, folder, *before):
    command = [*before, sys.executable, "-c", PROGRAM + textwrap.dedent(text), str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
                            env=os.environ | {"PYTHONPATH": str(ROOT)})  # fmt: skip


@pytest.mark.whole
@pytest.mark.slow
def test_a_killed_process_leaves_nothing(tmp_path):
    writing = """
    for turn in range(10_000):
        requests = [store.write(r, b) for r, b in zip(regions, buffers)]
        if turn == 3: print("writing", flush=True)
        for request in requests: request.wait()
    """
    child = program(writing, tmp_path)
    assert child.stdout.readline() == "writing\n"
    child.kill()
    child.communicate()
    assert child.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_process_ends_with_requests_under_way(tmp_path):
    child = program("for _ in range(100): [store.write(r, b) for r, b in zip(regions, buffers)]", tmp_path)
    start = time.monotonic()
    _, said = child.communicate(timeout=30)
    assert (child.returncode, said) == (0, "")
    assert time.monotonic() - start < 20
    assert os.listdir(tmp_path) == []


@pytest.mark.whole
@pytest.mark.slow
def test_a_forked_process_is_told_and_leaves_the_store_alone(tmp_path):
    forking = """
    store.write(regions[0], buffers[0]).wait()
    child = os.fork()
    if child == 0:
        try: store.read(regions[0], buffers[0])
        except OSError as error: print(error, flush=True)
        sys.exit()
    os.waitpid(child, 0)
    store.read(regions[0], buffers[1]).wait()
    print(bool((buffers[1] == 1).all()))
    """
    child = program(forking, tmp_path)
    found, said = child.communicate(timeout=30)
    assert (child.returncode, said) == (0, "")
    told, right = found.splitlines()
    assert told.startswith("moments: the threads of this store are in process ") and right == "True"


@pytest.mark.slow
def test_a_drive_that_is_really_full(tmp_path):
    """A mounted file system of 8 MB, in a mount namespace of its own."""
    mount = f'mount -t tmpfs -o size=8m none {tmp_path} && exec "$@"'
    unshare = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"]), "sh", "-c", mount, "sh"]
    if not shutil.which("unshare") or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a file system")
    child = program("", tmp_path, *unshare)
    _, said = child.communicate(timeout=30)
    assert child.returncode == 1
    assert said.splitlines()[-1].endswith(
        f"DiskError: moments: {tmp_path} has 0.008 GB free, but needs 0.067 GB. Make room, or add folders on other "
        "drives."
    )


def test_the_path_may_be_text(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Store(str(tmp_path), 1, name="one", block=PAGE, depth=1).close()
