"""Scratch files: one in each folder, of full size from the start, deleted when the process ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from ...util.errors import DiskError
from ...util.sizes import PAGE

_DIRECT = getattr(os, "O_DIRECT", 0)
_buffered: set[Path] = set()  # folders that were warned about for their missing O_DIRECT


class File:
    """An open scratch file. `direct`: it bypasses the page cache (O_DIRECT)."""

    def __init__(self, folder: Path, nbytes: int, name: str) -> None:
        self.folder, self.nbytes = folder, nbytes
        self.path = folder / f"zerofn-{name}-rank{_rank()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._pid, self._linked = os.getpid(), True
        try:
            self.fd, self.direct = opened(self.path, os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise _unusable(name, folder, error) from error
        with contextlib.suppress(OSError):  # nobody needs the name, and a crash would leave it behind
            self.path.unlink()
            self._linked = False
        try:
            os.posix_fallocate(self.fd, 0, nbytes)
            self._try_direct()
        except OSError as error:
            self.close()
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise _too_little(name, folder, nbytes, _free(folder)) from error
            raise _unusable(name, folder, error) from error

    def _try_direct(self) -> None:
        """Try one transfer: some file systems open with O_DIRECT and then refuse it."""
        page = mmap.mmap(-1, PAGE)
        try:
            if self.direct:
                os.preadv(self.fd, [page], 0)
        except OSError as error:
            self.direct = no_longer_direct(self.fd, self.direct, error)
        finally:
            page.close()
        if not self.direct and self.folder not in _buffered:
            _buffered.add(self.folder)
            warnings.warn(
                f"{self.folder}: the file system has no direct transfers (O_DIRECT). Reads and writes go through the "
                "page cache, which needs memory and another copy.",
                RuntimeWarning,
                stacklevel=2,
            )

    def close(self) -> None:
        """Release the file's space. Calling it again is harmless."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if self._linked and os.getpid() == self._pid:
            self.path.unlink(missing_ok=True)


def open_files(folders: Sequence[Path], nbytes: int, name: str) -> list[File]:
    """Open a scratch file of `nbytes` in each folder. Raises `DiskError`, with nothing left behind."""
    check_folders(folders, nbytes, name)
    with contextlib.ExitStack() as opened:
        files = []
        for folder in folders:
            files.append(File(folder, nbytes, name))
            opened.callback(files[-1].close)
        opened.pop_all()
    return files


def check_folders(folders: Sequence[Path], nbytes: int, name: str) -> None:
    """Raise `DiskError`, one sentence, for the first folder that cannot take a file of `nbytes`."""
    for folder in folders:
        if not folder.exists():
            raise DiskError(
                f"{name}: {folder} does not exist; write the path of a folder on the drive, or make it "
                f"with `mkdir -p {folder}`.",
                errno.ENOENT,
            )
        if not folder.is_dir():
            raise DiskError(
                f"{name}: {folder} is not a folder; write the path of a folder on the drive, such as {folder.parent}.",
                errno.ENOTDIR,
            )
        if not os.access(folder, os.W_OK | os.X_OK):
            raise _unwritable(name, folder, errno.EACCES)
    devices = [os.stat(folder).st_dev for folder in folders]
    asked = Counter(devices)
    for folder, device in zip(folders, devices, strict=True):
        if asked[device] * nbytes > _free(folder):
            raise _too_little(name, folder, asked[device] * nbytes, _free(folder))


def opened(path: Path, flags: int, mode: int) -> tuple[int, bool]:
    """Return a descriptor, and whether its transfers are direct: past the page cache, where the system can.

    `flags`: for a file to be written, such as `os.O_CREAT`; 0 to read one. Raises `OSError` as the system does.
    """
    exists = not flags & os.O_CREAT
    flags |= (os.O_RDONLY if exists else os.O_RDWR) | os.O_CLOEXEC
    if _DIRECT:
        try:
            return os.open(path, flags | _DIRECT, mode), True
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            if not exists:
                path.unlink(missing_ok=True)  # some file systems create the file and then refuse
    return os.open(path, flags, mode), False


def no_longer_direct(fd: int, direct: bool, error: OSError) -> bool:
    """Let transfers go through the page cache, and return False; raise the error unless a direct one was refused."""
    if not direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
        raise error
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~_DIRECT)
    return False


def _free(folder: Path) -> int:
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize


def _too_little(name: str, folder: Path, asked: int, free: int) -> DiskError:
    return DiskError(
        f"{name}: {folder} has {gigabytes(free)} free, but needs {gigabytes(asked)}. Make room, or add folders on "
        "other drives.",
        errno.ENOSPC,
    )


def _unusable(name: str, folder: Path, error: OSError) -> DiskError:
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return _unwritable(name, folder, error.errno)
    return DiskError(
        f"{name}: {folder} cannot hold a scratch file ({error.strerror}). Choose a folder on another drive.",
        error.errno,
    )


def _unwritable(name: str, folder: Path, number: int) -> DiskError:
    return DiskError(f"{name}: {folder} is not writable. Choose a folder that this user may write to.", number)


def gigabytes(nbytes: int) -> str:
    """Return bytes as gigabytes, for people.

    >>> gigabytes(2_500_000_000)
    '2.500 GB'
    """
    return f"{nbytes / 1e9:.3f} GB"


def _rank() -> str:
    if dist.is_available() and dist.is_initialized():
        return str(dist.get_rank())
    return os.environ.get("RANK", "0")
