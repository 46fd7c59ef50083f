"""What is in a checkpoint, and how two of them differ, for `zerofn inspect` and `zerofn diff`.

A block of a leaf is in memory at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..util.errors import printable
from ..util.sizes import counted
from .file_sources import Checkpoint
from .folder import MANIFEST, is_complete
from .locations import check_answers, located
from .manifest import Manifest, read_manifest
from .named_leaves import NamedLeaf
from .steps import complete_steps, path_of
from .tensor_file import BLOCK, CODES


def checkpoints_at(path: str | os.PathLike[str]) -> list[Path]:
    """Return the checkpoint at a path, or all of the run whose folder it is."""
    path = located(path)
    check_answers(path / MANIFEST)
    steps = [] if is_complete(path) else complete_steps(path)
    return [path_of(path, step) for step in steps] or [path]


def described(path: str | os.PathLike[str]) -> str:
    """Return a page about a checkpoint; about a run, a line for each of its checkpoints.

    Raises `CheckpointError` if there is none, or its manifest is damaged.
    """
    found = checkpoints_at(path)
    if found == [located(path)]:
        return _page(found[0], Checkpoint(found[0]).manifest)
    return "\n".join(_line(p, read_manifest(p)) for p in found)


def _page(path: Path, manifest: Manifest) -> str:
    saved, sizes = manifest.saved, [w.nbytes for w in manifest.files.values()]
    leaves = list(manifest.leaves())
    program = f" by {saved['program']}" if saved.get("program") else ""
    program += f" on {saved['host'].partition(' ')[0]}" if "host" in saved else ""
    rows = [
        ("checkpoint", str(path)),
        ("saved", f"{_when(manifest)}{program}"),
        ("with", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())),
        ("step", "-" if manifest.step is None else str(manifest.step)),
        ("ranks", f"{manifest.world_size}; {len(sizes)} files, {_size(sum(sizes))}"),
        ("leaves", f"{len(leaves)}, {sum(_numel(x) for x in leaves):,} elements"),
    ]
    rows += [(f"  {path or 'state'}", _tree(manifest, path)) for path in dict.fromkeys(t.path for t in manifest.trees)]
    if manifest.replicated:
        rows.append(("  replicated", _leaves([r.leaf for r in manifest.replicated])))
    if manifest.notes.get("metrics"):
        rows.append(("metrics", _metrics(manifest)))
    if manifest.notes.get("ranks"):
        rows.append(("loader", f"state of {counted(len(manifest.notes['ranks']), 'rank')}"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(printable(f"{name:<{width}}  {text}".replace("\n", "\\n")) for name, text in rows)


def _tree(manifest: Manifest, path: str) -> str:
    parts = [t for t in manifest.trees if t.path == path]
    leaves = {leaf.name: leaf for t in parts for leaf in t.leaves}
    cut = len({leaf.name for t in parts for leaf in t.leaves if leaf.region})
    where = manifest.saved.get("stored", {}).get(path)
    slices = f", {cut} of them in slices" if cut else ""
    return f"stage {parts[0].stage}, {_leaves(list(leaves.values()))}{slices}" + (f", {where}" if where else "")


def _leaves(leaves: list[NamedLeaf]) -> str:
    kinds = sorted({str(x.dtype).removeprefix("torch.") for x in leaves})
    return f"{len(leaves)} leaves, {sum(_numel(x) for x in leaves):,} elements of {', '.join(kinds) or 'nothing'}"


def _line(path: Path, manifest: Manifest) -> str:
    size = _size(sum(w.nbytes for w in manifest.files.values()))
    return (
        f"{path.name}  {_when(manifest)}  {counted(manifest.world_size, 'rank')}  {size}  {_metrics(manifest)}".rstrip()
    )


def _metrics(manifest: Manifest) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in manifest.notes.get("metrics", {}).items())


def _when(manifest: Manifest) -> str:
    return str(manifest.saved.get("time", "at an unknown time")).partition(".")[0].replace("T", " ")


def _size(nbytes: float) -> str:
    """Bytes for people.

    >>> _size(999), _size(1_500_000)
    ('999 B', '1.5 MB')
    """
    units = ["B", "KB", "MB", "GB", "TB", "PB"]
    while nbytes >= 1000 and len(units) > 1:
        nbytes, units = nbytes / 1000, units[1:]
    return f"{nbytes:.3g} {units[0]}"


@dataclass(frozen=True)
class Difference:
    """A leaf that is not the same in two checkpoints."""

    name: str
    text: str

    def __str__(self) -> str:
        return printable(f"{self.name}: {self.text}".replace("\n", "\\n"))


def differences(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> Iterator[Difference]:
    """Yield how the leaves of two checkpoints differ, bit by bit, whatever their ranks and stages.

    Raises `CheckpointError` for one that cannot be read.
    """
    a, b = Checkpoint(located(one)), Checkpoint(located(other))
    try:
        for name in sorted(set(a.leaves) | set(b.leaves)):
            if name not in a.leaves or name not in b.leaves:
                yield Difference(name, f"only in {(a if name in a.leaves else b).folder}")
            elif text := _difference(a, b, name):
                yield Difference(name, text)
    finally:
        a.close()
        b.close()


def _difference(a: Checkpoint, b: Checkpoint, name: str) -> str:
    mine, theirs = a.leaves[name], b.leaves[name]
    if mine.shape != theirs.shape:
        return f"shape {list(mine.shape)} and {list(theirs.shape)}"
    cast = f"{CODES[mine.dtype]} and {CODES[theirs.dtype]}" if mine.dtype != theirs.dtype else ""
    count, largest = 0, 0.0
    step = BLOCK // 8
    for start in range(0, _numel(mine), step):
        x, y = (_read(c, name, start, min(start + step, _numel(mine))) for c in (a, b))
        if not cast and torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
            continue
        u, v = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (x, y))
        unequal = (u != v) & ~(u.isnan() & v.isnan()) if cast else _bits_differ(x, y)
        count += int(unequal.sum())
        largest = max(largest, float((u - v).abs().nan_to_num(0.0)[unequal].max()) if unequal.any() else 0.0)
    values = f"{count:,} of {_numel(mine):,} elements differ, by at most {largest:.3g}" if count else ""
    return ", ".join(filter(None, [cast, values]))


def _bits_differ(x: Tensor, y: Tensor) -> Tensor:
    u, v = (t.view(torch.uint8).view(t.numel(), -1) for t in (x, y))
    return (u != v).any(1)


def _read(source: Checkpoint, name: str, start: int, stop: int) -> Tensor:
    flat = torch.empty(stop - start, dtype=source.leaves[name].dtype)
    source.read(name, start, flat)
    return flat


def _numel(leaf: NamedLeaf) -> int:
    return torch.Size(leaf.shape).numel()
