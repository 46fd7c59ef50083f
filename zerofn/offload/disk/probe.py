"""Measure the best block size and number of transfers in flight of a drive, once a boot.

The measurement times what the engine's threads do, checksums included. The process keeps the result, and writes it to
the user's cache folder, by device. Ranks of one machine wait for the first one's measurement instead of disturbing it.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import math
import os
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import torch

from ...memory.pinned import aligned
from ...util.errors import DiskError
from .checksum import checksum, function
from .files import File
from .transfer import transfer

SPACE = 64 << 20  # bytes of scratch; at most this is in flight
BLOCKS, DEPTHS = (1 << 20, 2 << 20, 4 << 20, 8 << 20), (2, 4, 8, 16)
ROUNDS, SECONDS = 3, 0.008  # of each trial; medians, because the machine also does other things
LONGEST = 1.2  # seconds; on slow drives later trials, with more in flight, are left out
ENOUGH = 0.95  # of the best rate
_known: dict[str, Drive] = {}


@dataclass(frozen=True)
class Drive:
    """The result: block size (bytes), depth (transfers in flight), the rates with these (bytes/s), and O_DIRECT."""

    block: int
    depth: int
    read: float
    write: float
    direct: bool

    @property
    def rate(self) -> float:
        """Bytes/s when as much is read as written."""
        return 2 / (1 / self.read + 1 / self.write)

    def describe(self) -> str:
        """Describe the drive."""
        return (
            f"reads {self.read / 1e9:.2f} GB/s, writes {self.write / 1e9:.2f} GB/s with {self.depth} blocks of "
            f"{self.block >> 20} MiB under way{'' if self.direct else ', without O_DIRECT'}"
        )


def probe(folder: Path, name: str = "probe") -> Drive:
    """Return the drive of `folder`, measured (1 to 2 s, 64 MiB) unless that was done since the machine started.

    `name` begins error messages. Raises `DiskError` if no scratch file can be made.
    """
    key = _key(folder)
    if key not in _known:
        with _cache() as file:
            stored = _stored(file)
            if key not in stored:
                stored[key] = measure(folder, name)
                if file is not None:
                    with contextlib.suppress(OSError):  # the home folder is full: measure again next time
                        os.ftruncate(file.fileno(), 0)
                        os.write(file.fileno(), json.dumps({k: asdict(drive) for k, drive in stored.items()}).encode())
            _known[key] = stored[key]
    return _known[key]


def measure(folder: Path, name: str = "probe") -> Drive:
    """Try block sizes and depths, and return the smallest that is about as fast as the best."""
    memory = aligned(SPACE)
    memory.view(torch.int64).random_()  # some drives compress zeros
    file = File(folder, SPACE, name)
    pairs = [pair for pair in itertools.product(BLOCKS, DEPTHS) if pair[0] * pair[1] <= SPACE]
    pairs.sort(key=lambda pair: (pair[0] * pair[1], pair[1]))
    found: dict[tuple[int, int], list[tuple[float, float]]] = {}
    try:
        transfer(file, memory.numpy().data, 0, writes=True)  # the first write to a block is slow
        end = time.monotonic() + LONGEST
        for _, pair in itertools.product(range(ROUNDS), pairs):
            if not found or time.monotonic() < end:
                rates = _trial(file, memory, *pair, writes=False), _trial(file, memory, *pair, writes=True)
                found.setdefault(pair, []).append(rates)
    except OSError as error:
        raise DiskError(f"{folder}: this drive cannot be measured: {error.strerror or error}.", error.errno) from error
    finally:
        file.close()
    drives = []
    for (block, depth), rounds in found.items():
        read, write = (statistics.median(rates) for rates in zip(*rounds, strict=True))
        drives.append(Drive(block, depth, read, write, file.direct))
    best = max(drive.rate for drive in drives)
    return next(drive for drive in drives if drive.rate >= ENOUGH * best)


def _trial(file: File, memory: torch.Tensor, block: int, depth: int, writes: bool) -> float:
    """Return bytes a second with `depth` threads."""
    address, view = memory.data_ptr(), memory.numpy().data
    places, moved, errors = itertools.cycle(range(0, SPACE, block)), [0] * depth, list[OSError]()

    def work(k: int) -> None:
        try:
            while not moved[k] or time.perf_counter() < begin + SECONDS:
                start = next(places)
                transfer(file, view[start : start + block], start, writes)
                checksum(address + start, block)
                moved[k] += block
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k,), daemon=True) for k in range(depth)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return sum(moved) / (time.perf_counter() - begin)


@contextlib.contextmanager
def _cache() -> Iterator[IO[str] | None]:
    """Return the path of the user's private cache file; None if there can be none."""
    with contextlib.ExitStack() as opened:
        file = None
        with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: a user without a home
            folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zerofn"
            folder.mkdir(parents=True, exist_ok=True)
            kept = opened.enter_context(open(folder / "drives.json", "a+"))
            fcntl.flock(kept, fcntl.LOCK_EX)
            kept.seek(0)
            file = kept
        yield file


def _stored(file: IO[str] | None) -> dict[str, Drive]:
    try:
        found = {name: Drive(**drive) for name, drive in json.loads(file.read()).items()} if file is not None else {}
    except (ValueError, TypeError, AttributeError, RecursionError):  # empty, cut by a crash, or of another version
        return {}
    return {name: drive for name, drive in found.items() if _is_possible(drive)}


def _is_possible(drive: Drive) -> bool:
    """Whether a measurement can have found this: with blocks of no bytes a transfer would never end."""
    rates = [x for x in (drive.read, drive.write) if type(x) is float and 0 < x < math.inf]
    return (
        drive.block in BLOCKS
        and drive.depth in DEPTHS
        and type(drive.block) is type(drive.depth) is int
        and type(drive.direct) is bool
        and len(rates) == 2
    )


def _key(folder: Path) -> str:
    """Identify the device, the machine's boot, and the checksum, which is part of what is timed."""
    return f"{os.stat(folder).st_dev} {_boot()} {function().__module__}"


def _boot() -> str:
    """Identify the machine's boot: device numbers may change with the next one."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return str(os.getpid())
