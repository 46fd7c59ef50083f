"""The files of torch's distributed checkpoints, read without executing what their metadata, a pickle, says."""

from __future__ import annotations

import contextlib
import pickle
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

import zerofn

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
            f"load_dcp: {self.path} has no {missing + suffix!r} below any prefix; it has {some}, ... "
            f"({len(self._tensors)} tensors). Build `like` with the model that was saved"
            + (", or pass only='params'." if suffix else ".")
        )

    def below(self, prefix: str, names: list[str], suffix: str) -> dict[str, Any]:
        """Return tensors to read, by name."""
        return {name: _Stored(self._reader, f"{prefix}{name}{suffix}", self._tensors) for name in names}

    def step(self, prefix: str, name: str) -> int:
        """Return the optimizer's step count, 0 if it was not saved as a tensor."""
        key = f"{prefix}{name}.step"
        return int(_Stored(self._reader, key, self._tensors).whole()) if key in self._tensors else 0


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
        found = torch.empty(self.shape, dtype=self.dtype)
        try:
            with alone():
                dcp.load({self._key: found}, storage_reader=self._reader, no_dist=True)
        except Exception as error:
            raise zerofn.CheckpointError(f"load_dcp: {self._key!r} cannot be read: {error}") from error
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
        self.last: tuple[str, Tensor] | None = None  # the name and the values of the tensor that was read last

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata, read once. Raises `zerofn.CheckpointError`."""
        if self._known is None:
            if not self._file.is_file():
                raise zerofn.CheckpointError(
                    f"load_dcp: {self._file} is not there; give the folder that torch.distributed.checkpoint.save "
                    "wrote."
                )
            try:
                with open(self._file, "rb") as opened:
                    known = _Unpickler(opened).load()
            except zerofn.CheckpointError:
                raise
            except Exception as error:
                raise zerofn.CheckpointError(f"load_dcp: {self._file} is damaged: {error}") from error
            self._known = self._checked(known)
        return self._known

    def _checked(self, metadata: Any) -> Metadata:
        if not isinstance(metadata, Metadata):
            raise zerofn.CheckpointError(f"load_dcp: {self._file} is no metadata of torch's checkpoints.")
        for info in metadata.storage_data.values():
            if (
                Path(info.relative_path).name != info.relative_path
                or not (self._file.parent / info.relative_path).is_file()
            ):
                raise zerofn.CheckpointError(
                    f"load_dcp: {self._file.parent / info.relative_path} is missing, or lies elsewhere; copy all "
                    "files again."
                )
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise zerofn.CheckpointError(
            f"load_dcp: the metadata wants to use {module}.{name} when it is read, and is not read: a pickle may "
            "execute anything."
        )


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside, torch does not warn that this process alone reads or writes: that is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is ", UserWarning)
        yield
