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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..parallel.overlaps import overlap
from ..util.errors import CheckpointError
from .contents import LeafInfo
from .folder import MANIFEST
from .tensor_file import CODES, DTYPES, MALFORMED, Written

FORMAT = "zerofn-checkpoint"
VERSION = 4  # 1 called `num_shards` `num_pieces`; 2 had no checksum, and no `saved`; 3 had no slices of leaves
_WITHOUT_SLICES = 3
MAX_BYTES = 1 << 30
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
    leaves: tuple[LeafInfo, ...]
    packed: bool = False

    @cached_property
    def by_unit(self) -> list[list[LeafInfo]]:
        """The leaves of each unit, in the order in which they lie there."""
        found: list[list[LeafInfo]] = [[] for _ in self.units]
        for leaf in self.leaves:
            found[leaf.unit].append(leaf)
        return found

    def in_shard(self, unit: int, shard: int) -> Iterator[tuple[LeafInfo, int, int, int]]:
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

    leaf: LeafInfo
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
    files: dict[str, Written]
    step: int | None = None
    versions: dict[str, str] = field(default_factory=dict)
    saved: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    digest: str = ""

    def leaves(self) -> Iterator[LeafInfo]:
        """All logical leaves, each once."""
        seen = set()
        for leaf in self._parts():
            if leaf.name not in seen:
                seen.add(leaf.name)
                yield leaf

    def _parts(self) -> Iterator[LeafInfo]:
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
        return _digest((folder / MANIFEST).read_text("utf-8"))
    except (OSError, ValueError):
        return ""


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint. Raises `CheckpointError` for one that cannot be understood."""
    path = folder / MANIFEST
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it has {path.stat().st_size:,} bytes")
        text = path.read_text("utf-8")
        data = json.loads(text)
        form, version = data["format"], data["version"]
    except MALFORMED as error:
        raise CheckpointError(f"{path} is damaged: it is no JSON of a ZeroFn checkpoint. {_FIX}") from error
    if form != FORMAT or not isinstance(version, int) or version > VERSION:
        raise CheckpointError(
            f"{path} has format {form!r}, version {version!r}; this ZeroFn reads "
            f"{FORMAT!r} up to version {VERSION}. Load it with the ZeroFn that wrote it "
            f"({data.get('versions')})."
        )
    if version >= 3:
        found = _SUM.search(text)
        if found is None or _digest(text.replace(found[1], _ZEROS, 1)) != found[1]:
            raise CheckpointError(f"{path} is damaged: it has another checksum than the one in it. {_FIX}")
    try:
        return _checked(_parse(data, _digest(text)))
    except MALFORMED as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}. {_FIX}") from error


def _checked(manifest: Manifest) -> Manifest:
    """Raise `ValueError` unless every leaf lies in a file of this folder."""
    for name in manifest.files:
        if not isinstance(name, str) or not re.fullmatch(r"[\w][\w.-]*", name):
            raise ValueError(f"file name {name!r}")
    for x in manifest.trees:
        if x.num_shards != len(x.files) or not set(x.files) <= set(manifest.files) or not x.files:
            raise ValueError(f"{x.path!r} has {x.num_shards} shards in {len(x.files)} files")
        for unit in x.units:
            if type(unit.size) is not int or unit.size < 0 or unit.size % x.num_shards:
                raise ValueError(f"unit {unit.name!r} of {unit.size} elements in {x.num_shards} shards")
        for leaf in x.leaves:
            whole = x.units[leaf.unit].size if 0 <= leaf.unit < len(x.units) else -1
            if not 0 <= leaf.offset <= leaf.offset + leaf.numel <= whole:
                raise ValueError(f"{leaf.name!r} does not lie in its unit")
    for r in manifest.replicated:
        if r.file not in manifest.files:
            raise ValueError(f"{r.leaf.name!r} is in {r.file!r}, which is not among the files")
    parts: dict[str, list[LeafInfo]] = {}
    for leaf in manifest._parts():
        parts.setdefault(leaf.name, []).append(leaf)
    for name, slices in parts.items():
        if len(slices) > 1 and not any(x.region for x in slices):
            raise ValueError(f"two leaves are called {name!r}")
        if any(x.region for x in slices) and not _make_up(slices):
            raise ValueError(f"the slices of {name!r} do not make up the whole")
    return manifest


def _make_up(slices: Sequence[LeafInfo]) -> bool:
    """Return whether slices are of one leaf, and each of its elements is in one of them."""
    shape = slices[0].shape
    if len({(x.shape, x.dtype) for x in slices}) > 1 or sum(x.numel for x in slices) != math.prod(shape):
        return False
    for x in slices:
        for dim, intervals in x.region:
            ends = [end for interval in sorted(intervals) for end in interval]
            if not 0 <= dim < len(shape) or not all(0 <= a <= b <= shape[dim] for a, b in intervals):
                return False
            if ends != sorted(ends):
                return False
    pairs = itertools.combinations(slices, 2)
    return not any(any(True for _ in overlap(shape, a.region, b.region, 0, b.numel)) for a, b in pairs)


def _parse(data: dict[str, Any], digest: str) -> Manifest:
    return Manifest(
        data["world_size"],
        tuple(map(tree_from_json, data["trees"])),
        tuple(SavedLeaf(_leaf(r["leaf"]), r["file"], r["tensor"]) for r in data["replicated"]),
        {name: Written(**w) for name, w in data["files"].items()},
        data["step"],
        data["versions"],
        data.get("saved", {}),
        data.get("notes", {}),
        digest,
    )


def tree_as_json(tree: SavedTree) -> Any:
    """Return what `tree_from_json` is given."""
    return _plain(asdict(tree))


def tree_from_json(t: dict[str, Any]) -> SavedTree:
    """Return a tree that was written as JSON."""
    return SavedTree(
        t["path"],
        t["stage"],
        t["num_shards"] if "num_shards" in t else t["num_pieces"],
        tuple(t["files"]),
        tuple(map(_unit, t["units"])),
        tuple(map(_leaf, t["leaves"])),
        t.get("packed", False),
    )


def _unit(u: dict[str, Any]) -> SavedUnit:
    return SavedUnit(u["name"], u["size"], DTYPES[u["dtype"]], u["trainable"], u["tensor"])


def _leaf(x: dict[str, Any]) -> LeafInfo:
    region = tuple((dim, tuple((a, b) for a, b in intervals)) for dim, intervals in x.get("region", ()))
    return LeafInfo(x["name"], tuple(x["shape"]), DTYPES[x["dtype"]], x["unit"], x["offset"], x["optional"], region)


def _plain(x: Any) -> Any:
    """Return `x` with dtypes as safetensors codes, and without what says that a leaf is whole."""
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in x.items() if v or k not in ("region", "packed")}
    if isinstance(x, list | tuple):
        return [_plain(v) for v in x]
    return CODES[x] if isinstance(x, torch.dtype) else x


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
