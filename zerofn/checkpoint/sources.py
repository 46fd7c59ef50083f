"""Sources of named tensors, read by intervals: a checkpoint, and plain safetensors files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..util.errors import CheckpointError
from .checksums import read_checksums
from .contents import LeafInfo
from .direct import Reader
from .folder import MANIFEST, find
from .manifest import Manifest, SavedLeaf, SavedTree, read_manifest
from .places import text_of
from .tensor_file import MALFORMED, TensorFile, Written

MAX_OPEN = 256  # files; systems allow 1,024 and more


class Source(Protocol):
    """Named tensors on the disk. `leaves`: by name."""

    leaves: dict[str, LeafInfo]

    def read(self, name: str, start: int, into: Tensor) -> None:
        """Fill the 1-d `into` with the raveled leaf's elements from `start` on, cast to its dtype."""

    def close(self) -> None:
        """Close all files."""


class _Files:
    """The files of one folder, at most `MAX_OPEN` of them open. Ask for a file at every read; it may be closed."""

    def __init__(self, folder: Path, expected: dict[str, Written] | None, fix: str) -> None:
        self.folder, self._expected, self._fix = folder, expected, fix  # expected: None for files of others
        self._files: dict[str, TensorFile] = {}
        self._reader = Reader()
        self._asked: set[str] = set()  # since all were closed

    def __getitem__(self, name: str) -> TensorFile:
        if name not in self._files:
            if self._expected is not None:
                self._files[name] = TensorFile(self.folder / name, self._expected[name], self._fix, reader=self._reader)
            else:
                file = self.folder / name
                self._files[name] = TensorFile(file, *read_checksums(file, self._fix), reader=self._reader)
        if name not in self._asked:
            if len(self._asked) == MAX_OPEN:
                self.close()
            self._asked.add(name)
        return self._files[name]

    def close(self) -> None:
        self._reader.close()
        self._asked.clear()


class Checkpoint:
    """A checkpoint that `save` wrote. `whole=False`: only some of its files may be there.

    Raises `CheckpointError` if it does not exist, is incomplete, or has a file that is missing or of another size.
    """

    def __init__(self, path: Path, whole: bool = True) -> None:
        self.folder = find(path)
        self.manifest: Manifest = read_manifest(self.folder)
        fix = "Load another checkpoint, or copy this one again."
        self._files = _Files(self.folder, self.manifest.files, fix)
        self._where: dict[str, SavedTree | SavedLeaf] = {r.leaf.name: r for r in self.manifest.replicated}
        self._where |= {leaf.name: t for t in self.manifest.trees for leaf in t.leaves}
        self.leaves = {leaf.name: leaf for leaf in self.manifest.leaves()}
        for name, written in self.manifest.files.items():
            file = self.folder / name
            if not file.exists() and not whole:
                continue
            if not file.exists():
                raise CheckpointError(
                    f"{file} is missing: the checkpoint has {len(self.manifest.files)} "
                    f"files, and each holds a part of every parameter. {fix}"
                )
            if file.stat().st_size != written.nbytes:
                TensorFile(file, written, fix)  # raises, and says what is wrong

    def read(self, name: str, start: int, into: Tensor) -> None:
        """Fill the 1-d `into` with the raveled leaf's elements from `start` on, cast to its dtype."""
        place = self._where[name]
        leaf = self.leaves[name]
        if isinstance(place, SavedLeaf):
            file = self._files[place.file]
            file.check(place.tensor, leaf.dtype, torch.Size(leaf.shape).numel())
            file.read(place.tensor, start, into)
            return
        unit = place.units[leaf.unit]
        shard = unit.size // place.num_shards
        at, done = leaf.offset + start, 0
        while done < into.numel():
            p, first = divmod(at + done, shard)
            count = min(shard - first, into.numel() - done)
            file = self._files[place.files[p]]
            file.check(unit.tensor, unit.dtype, shard)
            file.read(unit.tensor, first, into[done : done + count])
            done += count

    def read_all(self, file: str) -> None:
        """Read one of the files, and compare its checksums. Raises `CheckpointError` if they differ."""
        self._files[file].read_all()

    def close(self) -> None:
        """Close all files."""
        self._files.close()


class Renamed:
    """A source with other names. `rename(its name) -> name here`, or None to leave a leaf out; `what` begins errors."""

    def __init__(self, source: Source, rename: Callable[[str], str | None], what: str) -> None:
        self._source = source
        self._names: dict[str, str] = {}
        for name in source.leaves:
            new = rename(name)
            if new in self._names:
                raise ValueError(
                    f"{what}: {self._names[new]!r} and {name!r} would both be {new!r}; let rename return None for one "
                    "of them."
                )
            if new is not None:
                self._names[new] = name
        self.leaves = {new: replace(source.leaves[name], name=new) for new, name in self._names.items()}

    def read(self, name: str, start: int, into: Tensor) -> None:
        """Fill the 1-d `into` with the raveled leaf's elements from `start` on, cast to its dtype."""
        self._source.read(self._names[name], start, into)

    def close(self) -> None:
        """Close all files."""
        self._source.close()


class Weights:
    """Plain safetensors files: one, or a folder with `model.safetensors` or `model.safetensors.index.json`.

    `rename(name in the file) -> name of the leaf`, or None to leave a tensor out.
    """

    def __init__(self, path: Path, rename: Callable[[str], str | None] | None = None) -> None:
        folder, names = _weight_files(path)
        self._files = _Files(folder, None, "Copy or download it again.")
        self._where: dict[str, tuple[str, str]] = {}
        self.leaves: dict[str, LeafInfo] = {}
        for file in names:
            for tensor in self._files[file].names:
                name = tensor if rename is None else rename(tensor)
                if name is None:
                    continue
                if name in self._where:
                    raise ValueError(
                        f"load_safetensors: {self._where[name][1]!r} and {tensor!r} would both "
                        f"be {name!r}; let rename return None for one of them."
                    )
                self._where[name] = (file, tensor)
                opened = self._files[file]
                self.leaves[name] = LeafInfo(name, opened.shape(tensor), opened.dtype(tensor))

    def read(self, name: str, start: int, into: Tensor) -> None:
        """Fill the 1-d `into` with the raveled leaf's elements from `start` on, cast to its dtype."""
        file, tensor = self._where[name]
        self._files[file].read(tensor, start, into)

    def close(self) -> None:
        """Close all files."""
        self._files.close()


def _weight_files(path: Path) -> tuple[Path, list[str]]:
    """(folder, file names) of the weights at `path`."""
    if path.is_file():
        if path.name.endswith(".index.json"):
            return path.parent, _indexed(path)
        _check_not_pickled(path)
        return path.parent, [path.name]
    if not path.is_dir():
        raise CheckpointError(
            f"load_safetensors: {path} is not there; give a .safetensors file, or a "
            "folder with model.safetensors or model.safetensors.index.json."
        )
    if (path / "model.safetensors").is_file():
        return path, ["model.safetensors"]
    if (path / "model.safetensors.index.json").is_file():
        return path, _indexed(path / "model.safetensors.index.json")
    if (path / MANIFEST).is_file():
        raise CheckpointError(
            f"load_safetensors: {path} is a ZeroFn checkpoint; read it with "
            "zerofn.load(path, like=state), or make plain weights of it with "
            "zerofn.export(path, out)."
        )
    found = sorted(p.name for p in path.glob("*.safetensors"))
    if len(found) == 1:
        return path, found
    raise CheckpointError(
        f"load_safetensors: {path} has neither model.safetensors nor its index"
        + (f", but {found}; give one of these files." if found else _pickled(path))
    )


_CONVERT = (
    "which are not read here; convert them once: "
    "safetensors.torch.save_file(torch.load(file, weights_only=True), 'model.safetensors')."
)


def _pickled(path: Path) -> str:
    found = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
    if not found:
        return " and no .safetensors file; give a path that has one."
    return f", but pickled weights, {found[:4]}, {_CONVERT}"


def _check_not_pickled(file: Path) -> None:
    """Raise `CheckpointError` for a file of torch.save: a zip archive or a bare pickle."""
    with file.open("rb") as opened:
        begin = opened.read(4)
    if begin == b"PK\3\4" or begin[:1] == b"\x80":
        raise CheckpointError(f"load_safetensors: {file} holds pickled weights, {_CONVERT}")


def _indexed(index: Path) -> list[str]:
    try:
        files = sorted(set(json.loads(text_of(index))["weight_map"].values()))
        if outside := [f for f in files if Path(f).name != f]:
            raise ValueError(outside[0])
    except MALFORMED as error:
        raise CheckpointError(
            f"{index} is damaged: it has no 'weight_map' from names to files. Copy or download it again."
        ) from error
    missing = [f for f in files if not (index.parent / f).is_file()]
    if missing:
        raise CheckpointError(
            f"{index.parent / missing[0]} is missing, though {index.name} names it. Copy or download it again."
        )
    return files
