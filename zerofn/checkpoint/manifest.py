"""The manifest: which logical leaf is where in which file, as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..util.errors import CheckpointError
from .contents import LeafInfo
from .folder import MANIFEST, flush
from .tensor_file import CODES, DTYPES, Written

FORMAT = "zerofn-checkpoint"
VERSION = 2  # 1 called `num_shards` `num_pieces`


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
    """

    path: str
    stage: int
    num_shards: int
    files: tuple[str, ...]
    units: tuple[SavedUnit, ...]
    leaves: tuple[LeafInfo, ...]


@dataclass(frozen=True)
class SavedLeaf:
    """A replicated leaf: the tensor called `tensor` of `file`."""

    leaf: LeafInfo
    file: str
    tensor: str


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint except its numbers. `step`: the state's step, if it has one."""

    world_size: int
    trees: tuple[SavedTree, ...]
    replicated: tuple[SavedLeaf, ...]
    files: dict[str, Written]
    step: int | None = None
    versions: dict[str, str] = field(default_factory=dict)

    def leaves(self) -> Iterator[LeafInfo]:
        """All logical leaves."""
        for t in self.trees:
            yield from t.leaves
        for r in self.replicated:
            yield r.leaf

    def write(self, folder: Path) -> None:
        """Write it into `folder`, and flush it to the disk."""
        data = {"format": FORMAT, "version": VERSION, **_plain(asdict(self))}
        with open(folder / MANIFEST, "w") as file:
            file.write(_lines(data) + "\n")
            file.flush()
            os.fsync(file.fileno())
        flush(folder)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint. Raises `CheckpointError` for one that cannot be understood."""
    path = folder / MANIFEST
    try:
        data = json.loads(path.read_text())
        form, version = data["format"], data["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is damaged: it is no JSON of a ZeroFn checkpoint. Load another checkpoint, or copy this one again."
        ) from error
    if form != FORMAT or not isinstance(version, int) or version > VERSION:
        raise CheckpointError(
            f"{path} has format {form!r}, version {version!r}; this ZeroFn reads "
            f"{FORMAT!r} up to version {VERSION}. Load it with the ZeroFn that wrote it "
            f"({data.get('versions')})."
        )
    try:
        return _parse(data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is damaged: {type(error).__name__}: {error}. Load another checkpoint, or copy this one again."
        ) from error


def _parse(data: dict[str, Any]) -> Manifest:
    return Manifest(
        data["world_size"],
        tuple(map(_tree, data["trees"])),
        tuple(SavedLeaf(_leaf(r["leaf"]), r["file"], r["tensor"]) for r in data["replicated"]),
        {name: Written(**w) for name, w in data["files"].items()},
        data["step"],
        data["versions"],
    )


def _tree(t: dict[str, Any]) -> SavedTree:
    return SavedTree(
        t["path"],
        t["stage"],
        t["num_shards"] if "num_shards" in t else t["num_pieces"],
        tuple(t["files"]),
        tuple(map(_unit, t["units"])),
        tuple(map(_leaf, t["leaves"])),
    )


def _unit(u: dict[str, Any]) -> SavedUnit:
    return SavedUnit(u["name"], u["size"], DTYPES[u["dtype"]], u["trainable"], u["tensor"])


def _leaf(x: dict[str, Any]) -> LeafInfo:
    return LeafInfo(x["name"], tuple(x["shape"]), DTYPES[x["dtype"]], x["unit"], x["offset"], x["optional"])


def _plain(x: Any) -> Any:
    """Return `x` with dtypes as safetensors codes."""
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in x.items()}
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
