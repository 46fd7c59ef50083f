"""The files of torch's distributed checkpoints, read without executing what their metadata, a pickle, says."""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

import zerofn

from .torch_files import check_size

# What torch's own metadata is made of; a pickle may name anything, and calls what it names.
_OF_METADATA = {
    "torch.distributed.checkpoint.metadata": "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata "
    "TensorProperties MetadataIndex StorageMeta _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    "torch": "Size",
    "torch.serialization": "_get_layout",
    "collections": "OrderedDict",
    "pathlib": "PosixPath",
}
_ALLOWED = {(module, name) for module, names in _OF_METADATA.items() for name in names.split()}


class Saved:
    """A checkpoint's tensors, by the name that its nested dicts give them."""

    def __init__(self, path: Path) -> None:
        self.path, self._reader = path, _Reader(path)
        metadata = self._reader.read_metadata()
        self._tensors = {
            key: x for key, x in metadata.state_dict_metadata.items() if isinstance(x, TensorStorageMetadata)
        }

    def prefix(self, names: list[str], suffix: str) -> str:
        """Return what comes before every name. Raises `zerofn.CheckpointError` if nothing does."""
        first = names[0] + suffix
        found = [key[: -len(first)] for key in self._tensors if key == first or key.endswith(f".{first}")]
        lacking = {x: [n for n in names if f"{x}{n}{suffix}" not in self._tensors] for x in found}
        good = sorted((x for x in found if not lacking[x]), key=len)
        if good:
            return good[0]
        missing = min(lacking.values(), key=len)[0] if lacking else names[0]
        some = ", ".join(list(self._tensors)[:3])
        raise zerofn.CheckpointError(
            f"load_dcp: {self.path} has no {missing + suffix!r}, with any prefix; its tensors are {some}, ... "
            f"({len(self._tensors)} in all). Build `like` with the saved model"
            + (", or pass only='params'." if suffix else ".")
        )

    def below(self, prefix: str, names: list[str], suffix: str) -> dict[str, Any]:
        """Return tensors to read, by name."""
        return {name: _Stored(self._reader, f"{prefix}{name}{suffix}", self._tensors) for name in names}

    def step(self, prefix: str, name: str) -> int:
        """Return the optimizer's step count, 0 if it was not saved as a tensor."""
        key = f"{prefix}{name}.step"
        if key not in self._tensors:
            return 0
        stored = _Stored(self._reader, key, self._tensors)
        value = float(stored.whole()) if math.prod(stored.shape) == 1 and not stored.dtype.is_complex else -1.0
        if not 0 <= value < 2**53:
            raise zerofn.CheckpointError(
                f"load_dcp: {self.path}: {key!r} must be a number of steps, but has shape {stored.shape} and value "
                f"{value}."
            )
        return int(value)


class _Stored:
    """A tensor there."""

    def __init__(self, reader: _Reader, key: str, tensors: Mapping[str, TensorStorageMetadata]) -> None:
        self._reader, self._key = reader, key
        self.shape, self.dtype = tuple(tensors[key].size), tensors[key].properties.dtype

    def whole(self) -> Tensor:
        """Read it, unless it was read last."""
        if self._reader.last is not None and self._reader.last[0] == self._key:
            return self._reader.last[1]
        self._reader.last = None  # one is in memory at a time
        self._reader.check(self._key, math.prod(self.shape) * self.dtype.itemsize)
        found = torch.empty(self.shape, dtype=self.dtype)
        with failing(f"load_dcp: {self._key!r} cannot be read"), alone():
            dcp.load({self._key: found}, storage_reader=self._reader, no_dist=True)
        self._reader.last = self._key, found
        return found

    def read(self, start: int, into: Tensor) -> None:
        """Fill the 1-d `into` with elements from `start` on, cast to its dtype."""
        into.copy_(self.whole().view(-1)[start : start + into.numel()])


class _Reader(dcp.FileSystemReader):
    """torch's reader, which would unpickle whatever the metadata says."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file = path / ".metadata"
        self._known: Metadata | None = None
        self._places: dict[str, list[Any]] = {}  # where in files a tensor's chunks are
        self.last: tuple[str, Tensor] | None = None  # the name and the values of the tensor that was read last

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata, read once. Raises `zerofn.CheckpointError`."""
        if self._known is None:
            if not self._file.is_file():
                raise zerofn.CheckpointError(
                    f"load_dcp: {self._file} does not exist. Pass the folder that torch.distributed.checkpoint.save "
                    "wrote."
                )
            try:
                with open(self._file, "rb") as opened:
                    known = _Unpickler(opened).load()
            except zerofn.CheckpointError:
                raise
            except Exception as error:
                raise zerofn.CheckpointError(f"load_dcp: {self._file} is damaged: {error}.") from error
            self._known = self._checked(known)
        return self._known

    def _checked(self, metadata: Any) -> Metadata:
        """Raise `zerofn.CheckpointError` unless tensors lie in files of this folder: nothing was looked at so far."""
        if not isinstance(metadata, Metadata):
            raise zerofn.CheckpointError(
                f"load_dcp: {self._file} is not the metadata of a torch.distributed.checkpoint."
            )
        tensors, storage = (getattr(metadata, name, None) for name in ("state_dict_metadata", "storage_data"))
        sizes: dict[str, int] = {}
        try:
            for name, x in _items(tensors):
                if isinstance(x, TensorStorageMetadata):
                    _check_tensor(name, x)
            for index, info in _items(storage):
                if info.relative_path not in sizes:
                    sizes[info.relative_path] = self._size(info.relative_path)
                _check_place(index, info, sizes[info.relative_path])
                self._places.setdefault(index.fqn, []).append(info)
        except (AttributeError, TypeError, ValueError) as error:
            raise zerofn.CheckpointError(f"load_dcp: {self._file} is damaged: {error}.") from error
        return metadata

    def _size(self, name: str) -> int:
        file = self._file.parent / name
        if Path(name).name != name or not file.is_file():
            raise zerofn.CheckpointError(f"load_dcp: {file} is missing, or outside the folder. Copy all files again.")
        return file.stat().st_size

    def check(self, key: str, nbytes: int) -> None:
        """Raise `zerofn.CheckpointError` unless a tensor of that many bytes is in the files, and nothing larger."""
        places, what = self._places.get(key, ()), f"load_dcp: {key!r} in {self._file.parent}"
        there = sum(info.length for info in places)
        if nbytes > there:
            raise zerofn.CheckpointError(
                f"{what} needs {nbytes:,} bytes, but the files contain only {there:,} bytes of it. Copy all files "
                "again."
            )
        for info in places:
            with open(self._file.parent / info.relative_path, "rb") as opened:
                check_size(cast("IO[bytes]", _Slice(opened, info.offset, info.length)), info.length, what)


class _Slice(io.RawIOBase):
    """Some bytes of an open file, as a file."""

    def __init__(self, opened: IO[bytes], start: int, nbytes: int) -> None:
        self._opened, self._start, self._nbytes, self._at = opened, start, nbytes, 0

    def seekable(self) -> bool:
        """Whether there is `seek`."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place, and return it."""
        place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence]
        if place < 0:
            raise ValueError("cannot seek to a place before the first byte")
        self._at = place
        return self._at

    def tell(self) -> int:
        """Return the place."""
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Return bytes from here on, `size` at most."""
        left = max(0, self._nbytes - self._at)
        self._opened.seek(self._start + self._at)
        found = self._opened.read(left if size < 0 else min(size, left))
        self._at += len(found)
        return found


def _items(found: Any) -> Iterable[tuple[Any, Any]]:
    if not isinstance(found, dict):
        raise TypeError("its dict of tensors, or its dict of their places in files, is missing")
    return found.items()


def _check_tensor(name: Any, x: TensorStorageMetadata) -> None:
    """Raise `TypeError` or `ValueError` unless chunks of a tensor lie inside it."""
    if not isinstance(name, str) or not isinstance(x.properties.dtype, torch.dtype):
        raise TypeError(f"{name!r} has the dtype {x.properties.dtype!r}, which is not a torch.dtype")
    size = _numbers(name, x.size)
    for chunk in x.chunks:
        offsets, sizes = _numbers(name, chunk.offsets), _numbers(name, chunk.sizes)
        ends = [a + b for a, b in zip(offsets, sizes, strict=False)]
        if not len(size) == len(offsets) == len(sizes) or any(a > n for a, n in zip(ends, size, strict=True)):
            raise ValueError(
                f"{name!r} has shape {list(size)}, but its chunk of shape {list(sizes)} at offsets {list(offsets)} "
                "lies outside this shape"
            )


def _numbers(name: str, found: Any) -> tuple[int, ...]:
    if not isinstance(found, tuple | list) or not all(type(n) is int and n >= 0 for n in found):
        raise ValueError(f"the shape or offsets of {name!r} must be whole numbers of 0 or more, got {found!r}")
    return tuple(found)


def _check_place(index: Any, info: Any, nbytes: int) -> None:
    """Raise `TypeError` or `ValueError` unless something lies in a file of `nbytes` bytes, and as it is."""
    offset, length = _numbers(index.fqn, (info.offset, info.length))
    if offset + length > nbytes:
        raise ValueError(
            f"{index.fqn!r} ends at byte {offset + length:,} of {info.relative_path}, which has only {nbytes:,} bytes"
        )
    if getattr(info, "transform_descriptors", None):
        raise ValueError(
            f"{index.fqn!r} was saved with the storage extensions {info.transform_descriptors!r}, so ZeroFn cannot "
            "check its size before reading it. Save it without the argument _extensions= of FileSystemWriter"
        )


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise zerofn.CheckpointError(
            f"load_dcp: the metadata would call {module}.{name} when it is unpickled, so it is not read: a pickle can "
            "execute any code."
        )


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside, torch does not warn that this process alone reads or writes: that is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is ", UserWarning)
        yield


@contextlib.contextmanager
def failing(what: str) -> Iterator[None]:
    """Inside, what torch raises is a `zerofn.CheckpointError` that begins with `what`: its own `CheckpointException` is
    no `Exception`.
    """
    try:
        yield
    except dcp.CheckpointException as error:
        first, *_ = [x for x, _ in error.failures.values()] or [error]
        raise zerofn.CheckpointError(f"{what}: {type(first).__name__}: {first}") from error
    except Exception as error:
        raise zerofn.CheckpointError(f"{what}: {type(error).__name__}: {error}") from error
