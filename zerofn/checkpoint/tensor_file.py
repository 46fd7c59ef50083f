"""safetensors files, written as a stream and read by intervals.

The library's own functions need all tensors of a file in memory at once, and map whole files. Here one block is held at
a time, and each block of a file that ZeroFn wrote is checked against its CRC-32 in the file's metadata. The format: 8
bytes with the header's length, the header (JSON: name -> dtype, shape and byte offsets), the bytes of all tensors
without gaps. https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..util.crc32 import crc32
from ..util.errors import CheckpointError
from ..util.sizes import PAGE
from .direct_io import Block, ReadAhead, Writer
from .locations import fetch, is_remote, upload

BLOCK = 1 << 20  # bytes: what is read, written and checked at a time; a multiple of every dtype's size
CHECKS, MARK = "zerofn.crc32", "zerofn.save"
MAX_HEADER = 100_000_000  # bytes; the format's own limit
_MARKED = re.compile(rb'.{8}\{"__metadata__": \{"' + MARK.encode() + rb'": "([0-9a-f]{12})"', re.DOTALL)
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "BOOL": torch.bool, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorToWrite:
    """A tensor to be written. `read(a, b)`: its raveled elements [a, b), on any device."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[int, int], Tensor] = field(repr=False)

    @staticmethod
    def of(name: str, tensor: Tensor) -> TensorToWrite:
        """An entry of a tensor in memory."""
        flat = tensor.detach().reshape(-1)
        return TensorToWrite(name, tensor.dtype, tuple(tensor.shape), lambda a, b: flat[a:b])

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class FileIdentity:
    """What identifies a written file: its size in bytes, and its header's CRC-32."""

    nbytes: int
    header: str


def write_file(
    path: Path, entries: Iterable[TensorToWrite], *, save: str | None
) -> tuple[FileIdentity, dict[str, str]]:
    """Write a safetensors file, one block in memory at a time, and flush it to the disk.

    `save`: the number of the save that it belongs to; the file then holds it and the CRC-32 of every block. Returns
    what identifies the file, and the blocks' CRC-32s in hexadecimal, one after the other, by tensor. Raises `OSError`
    as the disk does.
    """
    # Whole pages first, so that each begins at a page; then by size, so that each lies at a multiple of its own.
    ordered = sorted(entries, key=lambda e: (e.nbytes % PAGE > 0, -e.dtype.itemsize))
    head = _header(ordered, save, {e.name: "0" * 8 * num_blocks(e.nbytes) for e in ordered})
    nbytes = len(head) + sum(e.nbytes for e in ordered)
    try:
        if is_remote(path):
            found = {e.name: _write(lambda data: None, e) for e in ordered}  # they are in the beginning, which is final
            head = _header(ordered, save, found)
            with upload(path, nbytes) as remote:
                remote.write(head)
                again = {e.name: _write(remote.write, e) for e in ordered}
            if found != again:
                raise CheckpointError(f"{path}: the state changed while it was written.")
        else:
            file = Writer(path, nbytes)
            try:
                file.begin(head)
                found = {e.name: _write(file.write, e) for e in ordered}
                head = _header(ordered, save, found)
                file.end(head)
            finally:
                file.close()
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk does not say where
        raise
    return FileIdentity(nbytes, f"{crc32(head):08x}"), found


def num_blocks(nbytes: int) -> int:
    """The number of blocks of a tensor."""
    return -(-nbytes // BLOCK)


def mark_of(path: Path) -> str:
    """Return the number of the save that a file belongs to, as its first bytes say; "" if they do not."""
    found = _MARKED.match(fetch(path, 0, 256))
    return "" if found is None else found[1].decode()


def _header(entries: list[TensorToWrite], save: str | None, checks: dict[str, str]) -> bytes:
    inside = {} if save is None else {MARK: save, CHECKS: json.dumps(checks)}
    header: dict[str, Any] = {"__metadata__": inside | {"format": "pt"}}
    offset = 0
    for e in entries:
        place = [offset, offset + e.nbytes]
        header[e.name] = {"dtype": CODES[e.dtype], "shape": list(e.shape), "data_offsets": place}
        offset += e.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % PAGE)  # so that the tensors begin at a page
    return len(text).to_bytes(8, "little") + text


def _write(write: Callable[[memoryview], object], entry: TensorToWrite) -> str:
    """Write blocks, and return the CRC-32 of each, in hexadecimal."""
    step, found = BLOCK // entry.dtype.itemsize, []
    for start in range(0, entry.numel, step):
        data = as_bytes(entry.read(start, min(start + step, entry.numel)))
        write(data)
        found.append(f"{crc32(data):08x}")
    return "".join(found)


def as_bytes(flat: Tensor) -> memoryview:
    """Return the bytes of a 1-d tensor, without a copy if it is contiguous in host memory."""
    plain = flat.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.view(torch.uint8).numpy().data


class TensorFile:
    """A safetensors file, read by intervals of raveled tensors.

    `expected`: what identifies it; `checks`: the CRC-32s of its blocks, from `write_file`, where the file does not hold
    them. Raises `CheckpointError` for a file that is truncated, malformed, another than `expected`, or has a damaged
    block, before memory is taken for what it claims to hold. `fix` ends these messages. `reader`: one that it shares
    with other files.
    """

    def __init__(
        self,
        path: Path,
        expected: FileIdentity | None = None,
        fix: str = "Copy or download it again.",
        checks: dict[str, str] | None = None,
        reader: ReadAhead | None = None,
    ) -> None:
        self.path, self.fix, self._reader = path, fix, reader or ReadAhead()
        self._data = 0
        try:
            header = self._read_header(expected)
            metadata = header.pop("__metadata__", None) or {}
            self._entries = checked_entries(header, path.stat().st_size - self._data)
            self._after = dict(zip(self._entries, [*list(self._entries)[1:], ""], strict=True))
            self._checks = checks if checks is not None else json.loads(metadata.get(CHECKS, "{}"))
            self._check_checks(checks is not None or CHECKS in metadata)
        except MALFORMED as error:
            raise CheckpointError(f"{path} is not a valid safetensors file: {_reason(error)}. {fix}") from error

    @property
    def names(self) -> list[str]:
        """The tensors' names, in file order."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return self._entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """A tensor's dtype."""
        return self._entries[name].dtype

    def check(self, name: str, dtype: torch.dtype, numel: int) -> None:
        """Raise `CheckpointError` unless the file has a tensor of this name, dtype and number of elements."""
        place = self._entries.get(name)
        if place is None or (place.dtype, math.prod(place.shape)) != (dtype, numel):
            raise CheckpointError(f"{self.path} has no tensor {name!r} with {numel:,} elements of {dtype}. {self.fix}")

    def read(self, name: str, start: int, into: Tensor) -> None:
        """Fill the 1-d `into` with the raveled tensor's elements from `start` on, cast to its dtype."""
        dtype = self.dtype(name)
        step, stop = BLOCK // dtype.itemsize, start + into.numel()
        for k in range(start // step, -(-stop // step)):
            a, b = max(start, k * step), min(stop, (k + 1) * step)
            into[a - start : b - start].copy_(self._load(name, k).view(dtype)[a - k * step : b - k * step])

    def read_all(self) -> None:
        """Read every block, and compare its checksum. Raises `CheckpointError` for the first that is damaged."""
        for name, place in self._entries.items():
            for k in range(num_blocks(place.nbytes)):
                self._load(name, k)

    def close(self) -> None:
        """Close the file, with all that share its reader; the next read opens it again."""
        self._reader.close()

    def _load(self, name: str, k: int) -> Tensor:
        """Return the k-th block of a tensor as bytes, valid until the next call."""
        place, expected = self._place(name, k), self._checks.get(name, "")[8 * k : 8 * k + 8]

        def check(block: Tensor) -> None:
            if block.numel() != place[2]:
                raise CheckpointError(f"{self.path} became shorter while it was read. {self.fix}")
            if expected and f"{crc32(block.numpy().data):08x}" != expected:
                raise CheckpointError(
                    f"{self.path} is damaged: the bytes of {name!r} from {k * BLOCK:,} on differ from those that were "
                    f"written. {self.fix}"
                )

        return self._reader.read(place, self._places_after(name, k), check)

    def _place(self, name: str, k: int) -> Block:
        entry = self._entries[name]
        return self.path, self._data + entry.start + k * BLOCK, min(BLOCK, entry.nbytes - k * BLOCK)

    def _places_after(self, name: str, k: int) -> Iterator[Block]:
        while name:
            yield from (self._place(name, j) for j in range(k + 1, num_blocks(self._entries[name].nbytes)))
            name, k = self._after[name], -1

    def _check_checks(self, there: bool) -> None:
        if there and {n: len(x) for n, x in self._checks.items()} != {
            n: 8 * num_blocks(e.nbytes) for n, e in self._entries.items()
        }:
            raise ValueError("its checksums belong to other tensors")

    def _read_header(self, expected: FileIdentity | None) -> dict[str, Any]:
        size = self.path.stat().st_size
        if expected is not None and size != expected.nbytes:
            raise CheckpointError(
                f"{self.path} has {size:,} bytes, but {expected.nbytes:,} were written: it is "
                f"{'truncated' if size < expected.nbytes else 'a different file'}. {self.fix}"
            )
        begin = fetch(self.path, 0, 8) if size else b""
        length = int.from_bytes(begin, "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(
                f"{self.path} is truncated, or not a safetensors file: its {size:,} bytes end inside its header. "
                f"{self.fix}"
            )
        if length > MAX_HEADER:
            raise ValueError(f"its header has {length:,} bytes, more than the allowed {MAX_HEADER:,}")
        text = fetch(self.path, 8, 8 + length) if length else b""
        if expected is not None and f"{crc32(text, crc32(begin)):08x}" != expected.header:
            raise CheckpointError(
                f"{self.path} is damaged, or from another save: its header differs from the one that was written. "
                f"{self.fix}"
            )
        self._data = 8 + length
        header = json.loads(text, object_pairs_hook=without_repeats)
        if not isinstance(header, dict) or not isinstance(header.get("__metadata__") or {}, dict):
            raise ValueError("its header is not a JSON object")
        return header


MALFORMED = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)  # of JSON that is no good


@dataclass(frozen=True)
class _Place:
    """Where a tensor is in a file: `start` bytes behind the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


def checked_entries(header: dict[str, Any], nbytes: int) -> dict[str, _Place]:
    """Return where each tensor is in `nbytes` bytes. Raises `ValueError` unless they lie side by side and fill them."""
    found: dict[str, _Place] = {}
    for name, e in header.items():
        if not isinstance(e, dict) or set(e) != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"{name!r} must have exactly a dtype, a shape and data_offsets")
        if not isinstance(e["dtype"], str) or e["dtype"] not in DTYPES:
            raise ValueError(f"{name!r} has dtype {e['dtype']}, which cannot be read; ZeroFn reads {sorted(DTYPES)}")
        shape, (start, stop), dtype = e["shape"], e["data_offsets"], DTYPES[e["dtype"]]
        if type(shape) is not list or any(type(n) is not int or not 0 <= n < 1 << 63 for n in (*shape, start, stop)):
            raise ValueError(
                f"{name!r} has shape {shape} and offsets {start}, {stop}, but needs whole numbers from 0 on"
            )
        if stop - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(
                f"{name!r} has shape {shape} and dtype {e['dtype']}, but its offsets span {stop - start} bytes"
            )
        found[name] = _Place(dtype, tuple(shape), start, stop - start)
    end = 0
    for name, place in sorted(found.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if place.start != end:
            raise ValueError(
                f"{name!r} begins at byte {place.start:,} after the header, but the tensors before it end at {end:,}"
            )
        end += place.nbytes
    if end > nbytes:
        raise ValueError(f"the file is truncated: {nbytes:,} of {end:,} bytes follow the header")
    if end < nbytes:
        raise ValueError(f"the file has {nbytes - end:,} bytes after the last tensor")
    return found


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON. Raises `ValueError` if a name is there twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        times = Counter(name for name, _ in pairs)
        raise ValueError(f"the name {next(x for x in times if times[x] > 1)!r} occurs twice")
    return found


def _reason(error: Exception) -> str:
    return str(error) if type(error) is ValueError else "its header cannot be read"
