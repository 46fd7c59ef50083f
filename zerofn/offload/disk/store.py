"""Regions of scratch files on drives, read and written while the caller computes."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from ...dry_run.fake_machine import fake_machine
from ...util.sizes import PAGE, pages
from .engine import Engine, Request, Statistics
from .files import check_folders, gigabytes, open_files
from .probe import probe
from .region import Block, Region


class Store:
    """`nbytes` of scratch space, striped in blocks over the drives of the folders in `paths`.

    The space is allocated at once. It is released when the store is closed or collected, or when the process ends
    in any way. `name` begins error messages. `block` (bytes, whole pages) and `depth` (transfers in flight per drive)
    come from a short measurement of each drive if they are not given. Any thread may make requests.

    Raises `DiskError`, with nothing written, for a path that is missing, is not a folder, is not writable or is too
    full.
    """

    def __init__(
        self,
        paths: str | os.PathLike | Sequence[str | os.PathLike],
        nbytes: int,
        *,
        name: str,
        block: int | None = None,
        depth: int | None = None,
    ) -> None:
        folders = [Path(p) for p in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
        if not folders:
            raise ValueError(f"{name}: paths must be one or more folders, not {paths!r}.")
        if nbytes < 1:
            raise ValueError(f"{name}: nbytes must be 1 or more, not {nbytes}.")
        if block is not None and (block < PAGE or block % PAGE):
            raise ValueError(f"{name}: block must be a multiple of {PAGE} bytes, not {block}.")
        if depth is not None and depth < 1:
            raise ValueError(f"{name}: depth must be 1 or more, not {depth}.")
        self.name, self.nbytes, self.allocated = name, pages(nbytes), 0
        check_folders(folders, self.nbytes // len(folders), name)
        self._drives = [probe(folder, name) for folder in folders] if block is None or depth is None else []
        self.block = block or max(drive.block for drive in self._drives)
        depths = [depth or drive.depth for drive in self._drives] or [depth or 1] * len(folders)
        # A block goes to the file with the fewest blocks, so each gets at most one above its share.
        share = self.nbytes if len(folders) == 1 else pages(-(-self.nbytes // len(folders))) + self.block
        self._engine = Engine(name, open_files(folders, share, name), depths)
        self._filled, self._filling = [0] * len(folders), threading.Lock()
        self._closing = weakref.finalize(self, self._engine.close)

    def allocate(self, nbytes: int, label: str) -> Region:
        """Return a region of `nbytes`, which takes `pages(nbytes)`. Errors call it `label`.

        Raises `ValueError` if the store does not have enough room.
        """
        if nbytes < 1:
            raise ValueError(f"{self.name}: {label} must have 1 byte or more, not {nbytes}.")
        size, blocks = pages(nbytes), []
        with self._filling:
            if self.allocated + size > self.nbytes:
                raise ValueError(
                    f"{self.name}: {label} needs {size:,} bytes, but {self.nbytes - self.allocated:,} of "
                    f"{self.nbytes:,} are left. Make the Store larger: its size must be the sum of `pages(nbytes)` "
                    "over all regions."
                )
            for start in range(0, size, self.block):
                length = min(self.block, size - start)
                drive = self._filled.index(min(self._filled))
                blocks.append(Block(drive, self._filled[drive], start, length))
                self._filled[drive] += length
            self.allocated += size
        return Region(self, label, nbytes, blocks)

    def read(self, region: Region, buffer: Tensor) -> Request:
        """Start to fill `buffer` with the region, up to the end of its last page.

        `buffer`: contiguous, page-aligned (see `aligned`), any dtype, at least `pages(region.nbytes)` bytes.
        The read follows earlier writes to the region.
        """
        return self._begin(region, buffer, writes=False)

    def write(self, region: Region, buffer: Tensor) -> Request:
        """Start to write `buffer` (as for `read`) to the region, after earlier requests on it."""
        return self._begin(region, buffer, writes=True)

    def _begin(self, region: Region, buffer: Tensor, writes: bool) -> Request:
        if region.store is not self:
            raise ValueError(f"{self.name}: {region.label} belongs to another store, {region.store.name}.")
        size = pages(region.nbytes)
        if buffer.device.type != "cpu" or not buffer.is_contiguous() or buffer.data_ptr() % PAGE:
            raise ValueError(
                f"{self.name}: the buffer for {region.label} must be contiguous, in host memory, and begin at a "
                f"multiple of {PAGE} bytes. Get one from zerofn.offload.disk.aligned({region.nbytes})."
            )
        if buffer.nbytes < size:
            raise ValueError(
                f"{self.name}: the buffer for {region.label} has {buffer.nbytes:,} bytes, but whole pages are "
                f"transferred, here {size:,} bytes. Get a buffer from zerofn.offload.disk.aligned({region.nbytes})."
            )
        request = Request(self._engine, region, buffer.detach(), writes)
        self._engine.submit(request)
        return request

    @property
    def failed(self) -> bool:
        """Whether a drive has failed or the store was closed. Every later request then raises the reason."""
        return self._engine.failure is not None

    @property
    def statistics(self) -> Statistics:
        """Bytes and seconds so far."""
        return self._engine.statistics

    def describe(self) -> str:
        """Describe the store, one line per drive."""
        lines = [f"{self.name}: {gigabytes(self.nbytes)} in blocks of {self.block >> 10:,} KiB"]
        for k, file in enumerate(self._engine.files):
            how = "directly" if file.direct else "through the page cache"
            lines.append(f"  {file.folder}: {gigabytes(file.nbytes)}, {how}")
            if self._drives:
                lines[-1] += f"; measured: {self._drives[k].describe()}"
        return "\n".join(lines)

    def close(self) -> None:
        """Release the space. Requests under way end with an error. Calling it again is harmless."""
        self._closing()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _FakeStore(Store):
    """Space on the drives of a fake machine."""

    def __init__(self) -> None:
        self.name = "offload"

    def allocate(self, nbytes: int, label: str) -> Region:
        """Return a region without space."""
        return Region(self, label, nbytes, [])


def scratch_space(paths: str | os.PathLike | Sequence[str | os.PathLike], nbytes: int) -> Store:
    """Return a store for offloaded values."""
    return Store(paths, nbytes, name="offload") if fake_machine() is None else _FakeStore()
