"""What is read by intervals: a checkpoint, and plain safetensors files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from torch import Tensor

from ..geometry.overlaps import Region
from ..util.errors import CheckpointError
from .checksums import read_checksums
from .direct_io import ReadAhead
from .folder import MANIFEST, find
from .locations import fetch, text_of
from .manifest import Manifest, SavedLeaf, SavedTree, read_manifest
from .named_leaves import NamedLeaf
from .tensor_file import MALFORMED, FileIdentity, TensorFile
from .tensor_source import Read, Source

MAX_OPEN = 256  # files; systems allow 1,024 and more
_MAX_READERS = 64  # as many slices as there may be; each has some 6 MiB of its own


class _Files:
    """The files of one folder, at most `MAX_OPEN` of them open. Ask for a file at every read; it may be closed.

    `in_turn`: several files are read in turn, and each is read ahead. Else one is, which memory is for.
    """

    def __init__(self, folder: Path, expected: dict[str, FileIdentity] | None, fix: str, in_turn: bool = False) -> None:
        self.folder, self._expected, self._fix = folder, expected, fix  # expected: None for files of others
        self._files: dict[str, TensorFile] = {}
        self._reader = None if in_turn else ReadAhead()
        self._asked: set[str] = set()  # since all were closed

    def __getitem__(self, name: str) -> TensorFile:
        if name not in self._asked:
            if len(self._asked) == (_MAX_READERS if self._reader is None else MAX_OPEN):
                self.close()
            self._asked.add(name)
        if name not in self._files:
            if self._expected is not None:
                self._files[name] = TensorFile(self.folder / name, self._expected[name], self._fix, reader=self._reader)
            else:
                file = self.folder / name
                self._files[name] = TensorFile(file, *read_checksums(file, self._fix), reader=self._reader)
        return self._files[name]

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        else:
            for file in self._files.values():
                file.close()
            self._files.clear()  # with their memory
        self._asked.clear()


class Checkpoint(Source):
    """A checkpoint that `save` wrote. `whole=False`: only some of its files may be there.

    Raises `CheckpointError` if it does not exist, is incomplete, or has a file that is missing or of another size.
    """

    def __init__(self, path: Path, whole: bool = True) -> None:
        self.folder = find(path)
        self.manifest: Manifest = read_manifest(self.folder)
        fix = "Load another checkpoint, or copy this one again."
        self._files = _Files(self.folder, self.manifest.files, fix, any(t.packed for t in self.manifest.trees))
        self._where: dict[str, list[tuple[SavedTree | SavedLeaf, NamedLeaf]]] = {
            r.leaf.name: [(r, r.leaf)] for r in self.manifest.replicated
        }
        for t in self.manifest.trees:
            for leaf in t.leaves:
                self._where.setdefault(leaf.name, []).append((t, leaf))
        self._known: dict[tuple[int, int, int], tuple[int, dict[str, tuple[int, int, int]]]] = {}
        self.leaves = {leaf.name: leaf for leaf in self.manifest.leaves()}
        for name, written in self.manifest.files.items():
            file = self.folder / name
            if not file.exists() and not whole:
                continue
            if not file.exists():
                raise CheckpointError(
                    f"{file} is missing. The checkpoint has {len(self.manifest.files)} files, and each holds a part of "
                    f"every parameter. {fix}"
                )
            if file.stat().st_size != written.nbytes:
                TensorFile(file, written, fix)  # raises, and says what is wrong

    def places(self, name: str) -> Iterable[tuple[Region, Read]]:
        """Yield the slices in which a leaf lies, and what reads each of them."""
        for place, leaf in self._where[name]:
            if isinstance(place, SavedLeaf):
                yield (), partial(self._replicated, place)
            else:
                yield leaf.region, partial(self._sharded, place, leaf)

    def _replicated(self, place: SavedLeaf, start: int, into: Tensor) -> None:
        file = self._files[place.file]
        file.check(place.tensor, place.leaf.dtype, place.leaf.numel)
        file.read(place.tensor, start, into)

    def _sharded(self, tree: SavedTree, leaf: NamedLeaf, start: int, into: Tensor) -> None:
        unit = tree.units[leaf.unit]
        size, stop = unit.size // tree.num_shards, start + into.numel()
        for p in range((leaf.offset + start) // size, -(-(leaf.offset + stop) // size)):
            whole, inside = self._inside(tree, leaf.unit, p)
            first, last, place = inside[leaf.name]
            a, b = max(first, start), min(last, stop)
            file = self._files[tree.files[p]]
            file.check(unit.tensor, unit.dtype, whole)
            file.read(unit.tensor, place + a - first, into[a - start : b - start])

    def _inside(self, tree: SavedTree, unit: int, shard: int) -> tuple[int, dict[str, tuple[int, int, int]]]:
        """Return how many elements a shard of a unit has, and where in it leaves lie, by name."""
        key = (id(tree), unit, shard)
        if key not in self._known:
            inside = {leaf.name: (a, b, place) for leaf, a, b, place in tree.in_shard(unit, shard)}
            self._known[key] = tree.shard_size(unit, shard), inside
        return self._known[key]

    def read_all(self, file: str) -> None:
        """Read one of the files, and compare its checksums. Raises `CheckpointError` if they differ."""
        self._files[file].read_all()

    def close(self) -> None:
        """Close all files."""
        self._files.close()


class Weights(Source):
    """Plain safetensors files: one, or a folder with `model.safetensors` or `model.safetensors.index.json`.

    `rename(name in the file) -> name of the leaf`, or None to leave a tensor out.
    """

    def __init__(self, path: Path, rename: Callable[[str], str | None] | None = None) -> None:
        folder, names = _weight_files(path)
        self._files = _Files(folder, None, "Copy or download it again.")
        self._where: dict[str, tuple[str, str]] = {}
        self.leaves: dict[str, NamedLeaf] = {}
        for file in names:
            try:
                tensors = self._files[file].names
            except CheckpointError as error:
                if _is_pickled(folder / file):
                    raise CheckpointError(
                        f"load_safetensors: {folder / file} holds pickled weights, {_CONVERT}"
                    ) from error
                raise
            for tensor in tensors:
                name = tensor if rename is None else rename(tensor)
                if name is None:
                    continue
                if name in self._where:
                    raise ValueError(
                        f"load_safetensors: {self._where[name][1]!r} and {tensor!r} would both get the name {name!r}. "
                        "Let rename return None for one of them."
                    )
                self._where[name] = (file, tensor)
                opened = self._files[file]
                self.leaves[name] = NamedLeaf(name, opened.shape(tensor), opened.dtype(tensor))

    def places(self, name: str) -> Iterable[tuple[Region, Read]]:
        """Yield the slices in which a leaf lies, and what reads each of them."""
        file, tensor = self._where[name]
        yield (), lambda start, into: self._files[file].read(tensor, start, into)

    def close(self) -> None:
        """Close all files."""
        self._files.close()


def _weight_files(path: Path) -> tuple[Path, list[str]]:
    """(folder, file names) of the weights at `path`."""
    if path.is_file():
        if path.name.endswith(".index.json"):
            return path.parent, _indexed(path)
        return path.parent, [path.name]
    if not path.is_dir():
        raise CheckpointError(
            f"load_safetensors: {path} does not exist. Pass a .safetensors file, or a folder with model.safetensors or "
            "model.safetensors.index.json."
        )
    if (path / "model.safetensors").is_file():
        return path, ["model.safetensors"]
    if (path / "model.safetensors.index.json").is_file():
        return path, _indexed(path / "model.safetensors.index.json")
    if (path / MANIFEST).is_file():
        raise CheckpointError(
            f"load_safetensors: {path} is a ZeroFn checkpoint. Read it with zerofn.load(path, like=state), or convert "
            "it to plain weights with zerofn.export(path, out)."
        )
    found = sorted(p.name for p in path.glob("*.safetensors"))
    if len(found) == 1:
        return path, found
    raise CheckpointError(
        f"load_safetensors: {path} has neither model.safetensors nor its index"
        + (f", but {found}. Pass one of these files." if found else _pickled(path))
    )


_CONVERT = (
    "which load_safetensors does not read. Convert them once: safetensors.torch.save_file(torch.load(file, "
    "weights_only=True), 'model.safetensors')."
)


def _pickled(path: Path) -> str:
    found = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
    if not found:
        return " and no .safetensors file. Pass a path that has one."
    return f", but pickled weights, {found[:4]}, {_CONVERT}"


def _is_pickled(file: Path) -> bool:
    """Whether a file that is not a safetensors file begins as those of torch.save do: as a zip archive or a pickle."""
    begin = fetch(file, 0, 4)
    return begin == b"PK\3\4" or begin[:1] == b"\x80"


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
