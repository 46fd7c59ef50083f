"""`save`: every rank writes its own shards; the checkpoint appears once all of them are written."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..comm.agreement import alive, exchange, first_difference, on_rank_0, rank_and_size, together
from ..sharding.sharded import Sharded, is_sharded
from ..sharding.storage import Stored
from ..util.errors import CheckpointError
from ..util.version import __version__
from . import folder
from .contents import Part, describe, leaves_of, take_apart
from .manifest import Manifest, SavedLeaf, SavedTree, SavedUnit
from .tensor_file import BLOCK, Entry, Written, as_bytes, write_file

WHAT = "zerofn.save"


def save(path: str | os.PathLike[str], state: Any) -> None:
    """Write a state to the folder `path`, where `load` finds it. Every rank must call it. Nothing is pickled.

    Each rank writes one safetensors file with its shards, with one MiB in memory at a time. Rank 0 also writes what
    is replicated, and a JSON manifest of logical names. At stage 0 each rank writes its N-th part, so nothing is
    written twice. All ranks must see `path` (a shared file system, on several machines). An older checkpoint at
    `path` stays until the new one is complete; a process that is killed leaves one or the other.

    Raises, on every rank: `TypeError` for a leaf that cannot be stored, `ValueError` if two leaves have one name or
    a replicated leaf differs between ranks, `CheckpointError` if the disk fails or `path` is no checkpoint, and
    `RuntimeError` within 30 s if a rank does not come.
    """
    target, (rank, _) = Path(path).resolve(), rank_and_size()
    job = together(WHAT, lambda: _Job(target, _plan(state)))
    job.compare(str(path))
    owners = job.owners()
    on_rank_0(WHAT, lambda: folder.start(target))
    try:
        written = together(WHAT, lambda: job.write(owners))
        files = _collect(written)
        on_rank_0(WHAT, lambda: job.finish(owners, files))
    except Exception:
        if rank == 0:
            folder.give_up(target)
        raise
    if rank == 0:
        folder.clean_up(target)


def _plan(state: Any) -> list[Part]:
    parts, _ = take_apart(state, WHAT)
    for part in parts:
        for tensor in part.value.parts if is_sharded(part.value) else [part.tensor]:
            if tensor.is_meta:
                raise ValueError(f"{WHAT}: {part.name!r} is on the meta device, so it has no values to save.")
    return parts


@dataclass(frozen=True)
class _Job:
    """One save. Ranks are those of the whole job; `owners[k][p]` writes shard p of the k-th `Sharded`."""

    path: Path
    parts: list[Part]

    @property
    def trees(self) -> list[Part]:
        """The sharded parts."""
        return [p for p in self.parts if is_sharded(p.value)]

    @property
    def replicated(self) -> list[Part]:
        """The others."""
        return [p for p in self.parts if not is_sharded(p.value)]

    def compare(self, given: str) -> None:
        """Raise unless all ranks save the same, and replicated leaves are equal on all."""
        lines = [f"path {given}", *describe(self.parts)]
        if rank_and_size()[1] > 1:
            lines += [f"{name} = {digest}" for name, digest in self._replicas()]
        found = first_difference(WHAT, lines)
        if found is None:
            return
        rank, here, there = found
        name = here.partition(" = ")[0]
        if " = " in here and name == there.partition(" = ")[0]:
            raise ValueError(
                f"{WHAT}: the replicated leaf {name!r} differs between rank "
                f"{rank_and_size()[0]} and rank {rank}; make it equal before saving "
                "(zerofn.collectives.all_reduce, or the same code and seed on all ranks), or "
                "keep what differs outside the state."
            )
        raise ValueError(
            f"{WHAT}: ranks must save the same state to the same path.\n  rank "
            f"{rank_and_size()[0]}: {here}\n  rank {rank}: {there}"
        )

    def _replicas(self) -> Iterator[tuple[str, str]]:
        """(name, digest) of every leaf that each rank holds whole."""
        for part in self.replicated:
            yield part.name, _digest(part.tensor)
        for part in self.trees:
            sharded: Sharded = part.value
            if sharded.spec.stage == 0 and sharded.spec.axis.size > 1:
                for unit, leaves in groupby(leaves_of(part), key=lambda leaf: leaf.unit):
                    whole = sharded.stored[unit].loaded()
                    for leaf in leaves:
                        yield leaf.name, _digest(whole.read(leaf.offset, leaf.offset + _numel(leaf.shape)))

    def owners(self) -> list[list[int]]:
        """Return who writes each shard: the first of the ranks that hold it (on a mesh of several axes several do)."""
        mine = [p.value.spec.axis.rank for p in self.trees]
        held = [json.loads(text) for text in exchange(WHAT, json.dumps(mine))]
        out = []
        for k, part in enumerate(self.trees):
            first = {ranks[k]: r for r, ranks in reversed(list(enumerate(held)))}
            size = part.value.spec.axis.size
            if len(first) != size:
                raise CheckpointError(
                    f"{WHAT}: {part.name!r} is in {size} shards, but only ranks "
                    f"{sorted(first)} of its axis are here; every rank must call save."
                )
            out.append([first[p] for p in range(size)])
        return out

    def write(self, owners: list[list[int]]) -> Written | None:
        """Write this rank's file."""
        rank, _ = rank_and_size()
        entries = []
        for part, owner, saved in zip(self.trees, owners, self._saved_trees(owners), strict=True):
            spec = part.value.spec
            if owner[spec.axis.rank] == rank:
                entries += [_own(u.tensor, part.value, i) for i, u in enumerate(saved.units)]
        if rank == 0:
            entries += [
                Entry.of(r.tensor, p.tensor) for r, p in zip(self._saved_leaves(), self.replicated, strict=True)
            ]
        if not entries:
            return None
        return write_file(folder.saving(self.path) / _file(rank), entries)

    def finish(self, owners: list[list[int]], files: dict[str, Written]) -> None:
        """On rank 0: see that every file has arrived, write the manifest, and rename."""
        for name, written in files.items():
            file = folder.saving(self.path) / name
            if not file.exists() or file.stat().st_size != written.nbytes:
                raise CheckpointError(
                    f"{WHAT}: rank 0 does not see the whole of {file}; {self.path} must "
                    "lie on a file system that all ranks share."
                )
        step = next((p.tensor for p in self.replicated if p.name == "step"), None)
        number = int(step) if step is not None and step.numel() == 1 else None
        manifest = Manifest(
            rank_and_size()[1],
            tuple(self._saved_trees(owners)),
            tuple(self._saved_leaves()),
            files,
            number,
            _versions(),
        )
        manifest.write(folder.saving(self.path))
        folder.put_in_place(self.path)

    def _saved_trees(self, owners: list[list[int]]) -> Iterator[SavedTree]:
        used: set[str] = {p.name for p in self.replicated}
        for part, owner in zip(self.trees, owners, strict=True):
            sharded: Sharded = part.value
            files = tuple(map(_file, owner))
            units = tuple(
                SavedUnit(u.name, u.size, p.dtype, u.trainable, _unique(f"{part.name}/{u.name}", used))
                for u, p in zip(sharded.layout.units, sharded.stored, strict=True)
            )
            yield SavedTree(part.name, sharded.spec.stage, len(files), files, units, tuple(leaves_of(part)))

    def _saved_leaves(self) -> Iterator[SavedLeaf]:
        for part in self.replicated:
            yield SavedLeaf(leaves_of(part)[0], _file(0), part.name)


def _own(name: str, sharded: Sharded, index: int) -> Entry:
    """Return this rank's N-th of a unit; at stage 0 a part of the whole unit, which it has."""
    spec, shard, unit = sharded.spec, sharded.stored[index], sharded.layout.units[index]
    start, stop = spec.layout.cut(unit, spec.axis.rank)
    shift = start - spec.bounds(unit)[0]
    held: list[Stored] = []  # a shard from a drive, while it is being written

    def read(a: int, b: int) -> Tensor:
        held[:] = held or [shard.loaded()]
        values = held[0].read(shift + a, shift + b)
        if b == stop - start:
            held.clear()
        return values

    return Entry(name, shard.dtype, (stop - start,), read)


def _collect(written: Written | None) -> dict[str, Written]:
    """Return what every rank has written, by file name."""
    mine = None if written is None else [written.nbytes, written.header]
    texts = exchange(WHAT, json.dumps(mine))
    found = {_file(r): json.loads(text) for r, text in enumerate(texts)}
    return {name: Written(*w) for name, w in found.items() if w is not None}


def _file(rank: int) -> str:
    return folder.file_of(rank, rank_and_size()[1])


def _versions() -> dict[str, str]:
    return {"zerofn": __version__, "torch": str(torch.__version__)}


def _unique(name: str, used: set[str]) -> str:
    while name in used:
        name += "'"
    used.add(name)
    return name


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _digest(tensor: Tensor) -> str:
    digest, flat = hashlib.sha256(), tensor.detach().reshape(-1)
    step = BLOCK // flat.element_size()
    for start in range(0, flat.numel(), step):
        digest.update(as_bytes(flat[start : start + step]))
        alive()
    return digest.hexdigest()[:16]
