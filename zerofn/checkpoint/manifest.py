"""The manifest: which logical leaf is where in which file, as JSON.

It holds the SHA-256 of itself, taken with zeros in that place. It names every file with its size and the CRC-32 of its
header, and the headers hold those of all blocks. So one bit that differs anywhere is found.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..geometry.cuts import Intervals
from ..geometry.overlaps import Region
from ..util.errors import CheckpointError
from .folder import MANIFEST
from .json_fields import Field, as_number
from .locations import text_of
from .named_leaves import NamedLeaf
from .tensor_file import CODES, DTYPES, MALFORMED, FileIdentity, without_repeats

FORMAT = "zerofn-checkpoint"
VERSION = 4  # 1 called `num_shards` `num_pieces`; 2 had no checksum, and no `saved`; 3 had no slices of leaves
_WITHOUT_SLICES = 3
_ZEROS = "0" * 64
_SUM = re.compile(r'"sha256": "([0-9a-f]{64})"')
_FIX = "Load another checkpoint, or copy this one again."


@dataclass(frozen=True)
class SavedUnit:
    """A flat buffer. Its shards are the tensors called `tensor` in its tree's files."""

    name: str
    size: int  # elements, padding included
    dtype: torch.dtype
    trainable: bool
    tensor: str


@dataclass(frozen=True)
class SavedTree:
    """A `Sharded`: its key path, units and leaves. `files[p]` has the p-th of `num_shards` equal shards of
    each unit; a leaf is elements [offset, offset + numel) of its unit.

    Where ranks have slices of leaves, there is one for each slice (`packed`). Its leaves are slices, and those of
    several ranks are in one of them; a shard is then the elements of these leaves alone, one after the other.
    """

    path: str
    stage: int
    num_shards: int
    files: tuple[str, ...]
    units: tuple[SavedUnit, ...]
    leaves: tuple[NamedLeaf, ...]
    packed: bool = False

    @cached_property
    def by_unit(self) -> list[list[NamedLeaf]]:
        """The leaves of each unit, in the order in which they lie there."""
        found: list[list[NamedLeaf]] = [[] for _ in self.units]
        for leaf in self.leaves:
            found[leaf.unit].append(leaf)
        return found

    def in_shard(self, unit: int, shard: int) -> Iterator[tuple[NamedLeaf, int, int, int]]:
        """Yield (leaf, a, b, place): its elements [a, b) lie in this shard of its unit, from `place` on."""
        size = self.units[unit].size // self.num_shards
        start, stop, packed = shard * size, (shard + 1) * size, 0
        for leaf in self.by_unit[unit]:
            a, b = max(leaf.offset, start), min(leaf.offset + leaf.numel, stop)
            if a < b:
                yield leaf, a - leaf.offset, b - leaf.offset, packed if self.packed else a - start
                packed += b - a

    def shard_size(self, unit: int, shard: int) -> int:
        """Return the number of elements of a shard of a unit."""
        if self.packed:
            return sum(b - a for _, a, b, _ in self.in_shard(unit, shard))
        return self.units[unit].size // self.num_shards


@dataclass(frozen=True)
class SavedLeaf:
    """A replicated leaf: the tensor called `tensor` of `file`."""

    leaf: NamedLeaf
    file: str
    tensor: str


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint except its numbers.

    `step`: the state's step, if it has one. `saved`: by which save, process and job, and when (UTC). `notes`: what
    `Checkpoints` keeps beside the state. `digest`: of the file it was read from, the same for one checkpoint wherever
    it is read.
    """

    world_size: int
    trees: tuple[SavedTree, ...]
    replicated: tuple[SavedLeaf, ...]
    files: dict[str, FileIdentity]
    step: int | None = None
    versions: dict[str, str] = field(default_factory=dict)
    saved: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    digest: str = ""

    def leaves(self) -> Iterator[NamedLeaf]:
        """All logical leaves, each once."""
        seen = set()
        for leaf in self._parts():
            if leaf.name not in seen:
                seen.add(leaf.name)
                yield leaf

    def _parts(self) -> Iterator[NamedLeaf]:
        for t in self.trees:
            yield from t.leaves
        for r in self.replicated:
            yield r.leaf

    def text(self) -> str:
        """The contents of its file."""
        plain = _plain(asdict(self))
        del plain["digest"]
        version = VERSION if any(t.packed for t in self.trees) else _WITHOUT_SLICES
        text = _lines({"format": FORMAT, "version": version, "sha256": _ZEROS, **plain}) + "\n"
        return text.replace(_ZEROS, _digest(text), 1)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def digest_now(folder: Path) -> str:
    """Return what tells the checkpoint that is in a folder now from others; "" if there is none."""
    try:
        return _digest(text_of(folder / MANIFEST))
    except (OSError, ValueError, CheckpointError):
        return ""


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint. Raises `CheckpointError` for one that cannot be understood."""
    path = folder / MANIFEST
    try:
        text = text_of(path)
        data = Field(json.loads(text, object_pairs_hook=without_repeats))
        form, version = data["format"].text(), data["version"].count(1)
    except (*MALFORMED, FileNotFoundError) as error:
        raise CheckpointError(
            f"{path} is damaged: it is not the JSON of a ZeroFn checkpoint ({type(error).__name__}: {error}). {_FIX}"
        ) from error
    if form != FORMAT or version > VERSION:
        raise CheckpointError(
            f"{path} has format {form!r}, version {version!r}; this ZeroFn reads "
            f"{FORMAT!r} up to version {VERSION}. Load it with the ZeroFn that wrote it "
            f"({data.object().get('versions')!r})."
        )
    if version >= 3:
        found = _SUM.search(text)
        if found is None or _digest(text.replace(found[1], _ZEROS, 1)) != found[1]:
            raise CheckpointError(f"{path} is damaged: its checksum differs from the one stored in it. {_FIX}")
    try:
        return _checked(_parse(data, _digest(text)))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}. {_FIX}") from error


def _checked(manifest: Manifest) -> Manifest:
    """Raise `ValueError` unless every leaf lies in a file of this folder, which is large enough for it."""
    for name in manifest.files:
        if not re.fullmatch(r"[\w][\w.-]*", name, re.ASCII):
            raise ValueError(f"{name!r} is not a valid file name")
    for x in manifest.trees:
        _check_tree(x, manifest.files)
    for r in manifest.replicated:
        if r.file not in manifest.files:
            raise ValueError(
                f"{r.leaf.name!r} is stored in {r.file!r}, but the list of files does not contain this name"
            )
        _check_room(r.leaf.name, r.leaf.numel * r.leaf.dtype.itemsize, [r.file], manifest.files)
    parts: dict[str, list[NamedLeaf]] = {}
    for leaf in manifest._parts():
        parts.setdefault(leaf.name, []).append(leaf)
    for name, slices in parts.items():
        if len(slices) > 1 and not any(x.region for x in slices):
            raise ValueError(f"two leaves have the name {name!r}")
        if any(x.region for x in slices) and not _make_up(slices):
            raise ValueError(f"the slices of {name!r} do not cover each of its elements once")
    return manifest


def _check_tree(x: SavedTree, files: Mapping[str, FileIdentity]) -> None:
    if x.num_shards != len(x.files) or not set(x.files) <= set(files):
        raise ValueError(
            f"{x.path!r} must name {x.num_shards} of the manifest's files, one for each shard, got {list(x.files)}"
        )
    for unit in x.units:
        if unit.size % x.num_shards:
            raise ValueError(
                f"unit {unit.name!r} has {unit.size:,} elements, which do not divide into {x.num_shards} shards"
            )
    ends = [0] * len(x.units)
    for leaf in sorted(x.leaves, key=lambda leaf: (leaf.offset, leaf.offset + leaf.numel)):
        if not 0 <= leaf.unit < len(x.units) or not leaf.offset + leaf.numel <= x.units[leaf.unit].size:
            raise ValueError(f"{leaf.name!r} lies outside its unit")
        if leaf.offset < ends[leaf.unit]:
            raise ValueError(f"{leaf.name!r} overlaps another leaf")
        ends[leaf.unit] = leaf.offset + leaf.numel
    if len({leaf.name for leaf in x.leaves}) < len(x.leaves):
        raise ValueError(f"two leaves of {x.path!r} have the same name")
    sizes = [u.size for u in x.units]
    if x.packed:
        sizes = [sum(leaf.numel for leaf in leaves) for leaves in x.by_unit]
    _check_room(x.path, sum(n * u.dtype.itemsize for n, u in zip(sizes, x.units, strict=True)), x.files, files)


def _check_room(what: str, nbytes: int, names: Iterable[str], files: Mapping[str, FileIdentity]) -> None:
    """Raise `ValueError` for more bytes than files have: memory is taken for what is in files alone."""
    there = sum(files[name].nbytes for name in set(names))
    if nbytes > there:
        raise ValueError(f"{what!r} needs {nbytes:,} bytes, but its files have {there:,}")


def _make_up(slices: Sequence[NamedLeaf]) -> bool:
    """Return whether slices are of one leaf, and each of its elements is in one of them."""
    shape = slices[0].shape
    if len({(x.shape, x.dtype) for x in slices}) > 1 or sum(x.numel for x in slices) != math.prod(shape):
        return False
    return not any(_meet(a, b) for a, b in itertools.combinations([x for x in slices if x.numel], 2))


def _meet(one: NamedLeaf, other: NamedLeaf) -> bool:
    """Return whether an element is in both of two slices: in intervals of both, along every dim that both cut."""
    mine, theirs = dict(one.region), dict(other.region)
    return all(
        any(max(a, c) < min(b, d) for (a, b), (c, d) in itertools.product(mine[dim], theirs[dim]))
        for dim in mine.keys() & theirs.keys()
    )


def _parse(data: Field, digest: str) -> Manifest:
    step = data.get("step", None)
    return Manifest(
        data["world_size"].count(1),
        tuple(map(_tree, data["trees"].each())),
        tuple(SavedLeaf(_leaf(r["leaf"]), r["file"].text(), r["tensor"].text()) for r in data["replicated"].each()),
        {name: FileIdentity(w["nbytes"].count(), w["header"].text()) for name, w in data["files"].items()},
        None if step.is_null() else step.count(),
        {name: version.text() for name, version in data["versions"].items()},
        _saved(data.get("saved", {})),
        _notes(data.get("notes", {})),
        digest,
    )


def _saved(saved: Field) -> dict[str, Any]:
    """Return by which save and process it was written, when, and where: texts and whole numbers, and under "stored" a
    text for each tree.
    """
    stored = {path: where.text() for path, where in saved.get("stored", {}).items() if not where.is_null()}
    numbers = {name: saved.get(name, 0).count() for name in ("pid", "started")}
    texts = {name: x.text() for name, x in saved.items() if name not in ("stored", *numbers)}
    return {**texts, **{name: n for name, n in numbers.items() if n}, **({"stored": stored} if stored else {})}


def _notes(notes: Field) -> dict[str, Any]:
    """Return what `Checkpoints` has noted: numbers under "metrics", and a list under "ranks"."""
    metrics = {name: x.number() for name, x in notes.get("metrics", {}).items()}
    notes.get("ranks", []).each()
    return {**notes.object(), **({"metrics": metrics} if metrics else {})}


def tree_as_json(tree: SavedTree) -> Any:
    """Return what `tree_from_json` is given."""
    return _plain(asdict(tree))


def tree_from_json(t: dict[str, Any]) -> SavedTree:
    """Return a tree that was written as JSON."""
    return _tree(Field(t), files=0)


def _tree(t: Field, files: int = 1) -> SavedTree:
    """`files`: how many there must be at least."""
    names = tuple(x.text() for x in t["files"].each())
    if len(names) < files:
        raise ValueError(f"{t['path'].text()!r} has no files")
    return SavedTree(
        t["path"].text(),
        t["stage"].count(0, 3),
        t["num_shards" if "num_shards" in t.object() else "num_pieces"].count(1),
        names,
        tuple(map(_unit, t["units"].each())),
        tuple(map(_leaf, t["leaves"].each())),
        t.get("packed", False).flag(),
    )


def _unit(u: Field) -> SavedUnit:
    return SavedUnit(
        u["name"].text(), u["size"].count(), u["dtype"].word(DTYPES), u["trainable"].flag(), u["tensor"].text()
    )


def _leaf(x: Field) -> NamedLeaf:
    shape = tuple(n.count() for n in x["shape"].each())
    region: Region = tuple(_cut(pair, shape) for pair in x.get("region", []).each())
    if len({dim for dim, _ in region}) < len(region):
        raise ValueError(f"{x['name'].text()!r} is cut twice along the same dim")
    place = (x["unit"].count(-1), x["offset"].count(), x["optional"].flag(), region)
    return NamedLeaf(x["name"].text(), shape, x["dtype"].word(DTYPES), *place)


def _cut(pair: Field, shape: tuple[int, ...]) -> tuple[int, Intervals]:
    """Return a dim and the intervals of it that a slice has, which do not meet."""
    dim, intervals = pair.several(2)
    number = dim.count(0, len(shape) - 1)
    found = tuple((a.count(), b.count(0, shape[number])) for a, b in (x.several(2) for x in intervals.each()))
    ends = [end for interval in sorted(found) for end in interval]
    if ends != sorted(ends):
        raise ValueError(f"intervals {found} of dim {number} overlap")
    return number, found


def _plain(x: Any) -> Any:
    """Return `x` with dtypes as safetensors codes, and without what says that a leaf is whole."""
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in x.items() if v or k not in ("region", "packed")}
    if isinstance(x, list | tuple):
        return [_plain(v) for v in x]
    return CODES[x] if isinstance(x, torch.dtype) else as_number(x)


def _lines(x: Any, indent: str = "") -> str:
    """Return JSON for people: an object without inner objects is one line."""
    items = list(x.values()) if isinstance(x, dict) else x if isinstance(x, list) else []
    inner = [w for v in items for w in (v if isinstance(v, list) else [v])]
    if not any(isinstance(w, dict) for w in inner):
        return json.dumps(x)
    keys = [f"{json.dumps(k)}: " for k in x] if isinstance(x, dict) else [""] * len(items)
    body = ",\n".join(f"{indent} {k}{_lines(v, indent + ' ')}" for k, v in zip(keys, items, strict=True))
    left, right = "{}" if isinstance(x, dict) else "[]"
    return f"{left}\n{body}\n{indent}{right}"
