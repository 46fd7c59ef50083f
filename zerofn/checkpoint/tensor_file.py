"""safetensors files, written as a stream and read by intervals.

The library's own functions need all tensors of a file in memory at once, and map whole files. Here one block is held at
a time, and each block of a file that ZeroFn wrote is checked against its CRC-32 in the file's metadata. The format: 8
bytes with the header's length, the header (JSON: name -> dtype, shape and byte offsets), the bytes of all tensors
without gaps. https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..comm.agreement import alive
from ..util.errors import CheckpointError

BLOCK = 1 << 20  # bytes: what is read, written and checked at a time; a multiple of every dtype's size
SYNC_EVERY = 256  # blocks: written data goes to the disk steadily, not all at the end
CHECKS = "zerofn.crc32"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "BOOL": torch.bool, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """A tensor to be written. `read(a, b)`: its raveled elements [a, b), on any device."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[int, int], Tensor] = field(repr=False)

    @staticmethod
    def of(name: str, tensor: Tensor) -> Entry:
        """An entry of a tensor in memory."""
        flat = tensor.detach().reshape(-1)
        return Entry(name, tensor.dtype, tuple(tensor.shape), lambda a, b: flat[a:b])

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Written:
    """What identifies a written file: its size in bytes, and its header's CRC-32."""

    nbytes: int
    header: str


def write_file(path: Path, entries: Iterable[Entry], *, checks: bool = True) -> Written:
    """Write a safetensors file, one block in memory at a time, and flush it to the disk.

    `checks`: with the CRC-32 of every block. Raises `OSError` as the disk does.
    """
    ordered = sorted(entries, key=lambda e: -e.dtype.itemsize)  # so that each lies at a multiple of its size
    blank = {e.name: "0" * 8 * -(-e.nbytes // BLOCK) for e in ordered}
    with open(path, "wb") as file:
        file.write(_header(ordered, blank if checks else None))
        found = {e.name: _write(file, e, checks) for e in ordered}
        header = _header(ordered, found if checks else None)
        nbytes = file.tell()
        file.seek(0)
        file.write(header)
        file.flush()
        os.fsync(file.fileno())
    return Written(nbytes, f"{zlib.crc32(header):08x}")


def _header(entries: list[Entry], checks: dict[str, str] | None) -> bytes:
    metadata = {"format": "pt"} | ({} if checks is None else {CHECKS: json.dumps(checks)})
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for e in entries:
        place = [offset, offset + e.nbytes]
        header[e.name] = {"dtype": CODES[e.dtype], "shape": list(e.shape), "data_offsets": place}
        offset += e.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write(file: BinaryIO, entry: Entry, checks: bool) -> str:
    """Write blocks, and return the CRC-32 of each, in hexadecimal."""
    step, found = BLOCK // entry.dtype.itemsize, []
    for k, start in enumerate(range(0, entry.numel, step)):
        data = as_bytes(entry.read(start, min(start + step, entry.numel)))
        file.write(data)
        if checks:
            found.append(f"{zlib.crc32(data):08x}")
        if k % SYNC_EVERY == SYNC_EVERY - 1:
            file.flush()
            os.fsync(file.fileno())
        alive()
    return "".join(found)


def as_bytes(flat: Tensor) -> memoryview:
    """Return the bytes of a 1-d tensor, without a copy if it is contiguous in host memory."""
    plain = flat.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.view(torch.uint8).numpy().data


class TensorFile:
    """A safetensors file, read by intervals of raveled tensors.

    Raises `CheckpointError` for a file that is truncated, differs from `expected`, or has a damaged block. `fix`
    ends these messages.
    """

    def __init__(self, path: Path, expected: Written | None = None, fix: str = "Copy or download it again.") -> None:
        self.path, self.fix = path, fix
        self._file: BinaryIO | None = None
        self._held: tuple[str, int] = ("", -1)
        self._block = torch.empty(0, dtype=torch.uint8)
        header = self._read_header(expected)
        metadata = header.pop("__metadata__", None) or {}
        self._checks: dict[str, str] = json.loads(metadata[CHECKS]) if CHECKS in metadata else {}
        self._entries: dict[str, dict[str, Any]] = header

    @property
    def names(self) -> list[str]:
        """The tensors' names, in file order."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return tuple(self._entries[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """A tensor's dtype."""
        return DTYPES[self._entries[name]["dtype"]]

    def read(self, name: str, start: int, into: Tensor) -> None:
        """Fill the 1-d `into` with the raveled tensor's elements from `start` on, cast to its dtype."""
        dtype = self.dtype(name)
        step, stop = BLOCK // dtype.itemsize, start + into.numel()
        for k in range(start // step, -(-stop // step)):
            a, b = max(start, k * step), min(stop, (k + 1) * step)
            into[a - start : b - start].copy_(self._load(name, k).view(dtype)[a - k * step : b - k * step])
            alive()

    def close(self) -> None:
        """Close the file; the next read opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _load(self, name: str, k: int) -> Tensor:
        """Return the k-th block of a tensor as bytes. Reads of one block in a row read it once."""
        if self._held == (name, k):
            return self._block
        first, last = self._entries[name]["data_offsets"]
        size = min(BLOCK, last - first - k * BLOCK)
        block = torch.empty(size, dtype=torch.uint8)
        file = self._open()
        file.seek(self._data + first + k * BLOCK)
        data = block.numpy().data
        if file.readinto(data) != size:  # type: ignore[attr-defined]
            raise CheckpointError(f"{self.path} became shorter while it was read. {self.fix}")
        check = self._checks.get(name, "")[8 * k : 8 * k + 8]
        if check and f"{zlib.crc32(data):08x}" != check:
            raise CheckpointError(
                f"{self.path} is damaged: the bytes of {name!r} from {k * BLOCK:,} on are "
                f"not those that were written. {self.fix}"
            )
        self._held, self._block = (name, k), block
        return block

    def _open(self) -> BinaryIO:
        if self._file is None:
            self._file = open(self.path, "rb")
        return self._file

    def _read_header(self, expected: Written | None) -> dict[str, Any]:
        size = os.stat(self.path).st_size
        if expected is not None and size != expected.nbytes:
            raise CheckpointError(
                f"{self.path} has {size:,} bytes, but {expected.nbytes:,} were written: "
                f"it is {'truncated' if size < expected.nbytes else 'another file'}. "
                f"{self.fix}"
            )
        with open(self.path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(min(length, size))
        if size < 8 or length > size - 8:
            raise CheckpointError(
                f"{self.path} is truncated or no safetensors file: its {size:,} bytes end inside its header. {self.fix}"
            )
        crc = zlib.crc32(text, zlib.crc32(length.to_bytes(8, "little")))
        if expected is not None and f"{crc:08x}" != expected.header:
            raise CheckpointError(
                f"{self.path} is damaged, or from another save: its header is not the one that was written. {self.fix}"
            )
        self._data = 8 + length
        return self._checked(text, size)

    def _checked(self, text: bytes, size: int) -> dict[str, Any]:
        """The header, if every tensor in it is there."""
        try:
            header = json.loads(text)
            tensors = [(n, e) for n, e in header.items() if n != "__metadata__"]
            end = self._data + max((e["data_offsets"][1] for _, e in tensors), default=0)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"{self.path} is no safetensors file: its header cannot be read. {self.fix}"
            ) from error
        if size < end:
            raise CheckpointError(f"{self.path} is truncated: it has {size:,} of {end:,} bytes. {self.fix}")
        for name, e in tensors:
            first, last = e["data_offsets"]
            dtype = DTYPES.get(e["dtype"])
            if dtype is None:
                raise CheckpointError(
                    f"{self.path}: {name!r} has dtype {e['dtype']}, which cannot be read. Known are {sorted(DTYPES)}."
                )
            if first < 0 or last - first != math.prod(e["shape"]) * dtype.itemsize:
                raise CheckpointError(
                    f"{self.path} is no valid safetensors file: {name!r} has shape "
                    f"{e['shape']} and dtype {e['dtype']}, but {last - first} bytes. "
                    f"{self.fix}"
                )
        return header
