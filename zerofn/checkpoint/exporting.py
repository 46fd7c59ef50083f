"""`export`: write a checkpoint's parameters as plain safetensors files, which other libraries read."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ..memory.turns import refuse_while_capturing
from ..util.arguments import checked
from ..util.errors import CheckpointError
from .checksums import SUFFIX, checksums_of, checksums_text
from .file_sources import Checkpoint
from .folder import MANIFEST, flush
from .locations import check_answers, is_remote, located
from .named_leaves import NamedLeaf, missing_leaf
from .tensor_file import TensorToWrite, write_file

WHAT = "zerofn.export"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_FRESH = re.compile(r"\.zerofn-[0-9a-f]{12}$")  # of a file that is to take another name
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip


@checked()
def export(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    part: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str | None = None,
    rename: Callable[[str], str | None] | None = None,
) -> list[Path]:
    """Write the full parameters of a checkpoint under their logical names, and return the files.

    `out`: a file that ends in .safetensors, or a folder that gets `model.safetensors`. `max_shard_size` (bytes, or a
    string such as "5GB") splits them over several files in a folder, with the index that Hugging Face's libraries read.
    For each file, NAME.crc32.json has checksums, which `load_safetensors` compares. `part`: the key path whose leaves
    are written, with names relative to it; by default "params" if the state has it. `dtype`: the dtype of
    floating-point leaves; as stored by default. `rename`: name -> name in the file, None to leave a leaf out. Only one
    MiB is in memory at a time. Call it in one process; it does not need other ranks.

    Raises `CheckpointError` for a checkpoint that cannot be read, `ValueError` for a part or size that does not
    exist.

    >>> import tempfile, zerofn
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saving = zerofn.save(f"{folder}/step-1", {"w": torch.ones(2)})
    ...     [x.name for x in export(f"{folder}/step-1", f"{folder}/out")]
    ['model.safetensors']
    """
    refuse_while_capturing(WHAT)
    if is_remote(located(out)):
        raise ValueError(
            f"{WHAT}: out={str(out)!r} is not a local path. Export to a local folder, and copy the files from it."
        )
    check_answers(located(path) / MANIFEST)
    checkpoint, target = Checkpoint(located(path)), Path(out).expanduser()
    try:
        entries = _entries(checkpoint, _part(checkpoint, part), dtype, rename)
        if target.suffix == ".safetensors":
            if max_shard_size is not None:
                raise ValueError(
                    f"{WHAT}: several files need a folder, but out is the file {target}. Pass a folder as out, or "
                    "leave max_shard_size out."
                )
            target.parent.mkdir(parents=True, exist_ok=True)
            _clear(target.parent)
            with _Fresh() as fresh:
                fresh.weights(target, entries)
                fresh.put_in_place()
            return [target]
        target.mkdir(parents=True, exist_ok=True)
        _clear(target)
        return _write_folder(target, _split(entries, _bytes(max_shard_size)))
    finally:
        checkpoint.close()


def _part(checkpoint: Checkpoint, part: str | None) -> dict[str, NamedLeaf]:
    """Return the leaves to write, by their names in the file."""
    chosen = "params." if part is None else part + "." if part else ""
    found = {n.removeprefix(chosen): leaf for n, leaf in checkpoint.leaves.items() if n.startswith(chosen)}
    if part is None and not found:
        return dict(checkpoint.leaves)
    if not found:
        raise ValueError(
            f"{WHAT}: {missing_leaf(part or '', str(checkpoint.folder), checkpoint.leaves, 1)} "
            f"The checkpoint has the parts {sorted({n.split('.')[0] for n in checkpoint.leaves})}."
        )
    return found


def _entries(
    checkpoint: Checkpoint,
    leaves: dict[str, NamedLeaf],
    dtype: torch.dtype | None,
    rename: Callable[[str], str | None] | None,
) -> list[TensorToWrite]:
    def read(saved: str, kind: torch.dtype, a: int, b: int) -> Tensor:
        flat = torch.empty(b - a, dtype=kind)
        checkpoint.read(saved, a, flat)
        return flat

    out: dict[str, TensorToWrite] = {}
    for name, leaf in leaves.items():
        new = name if rename is None else rename(name)
        if new is None:
            continue
        if new in out:
            raise ValueError(
                f"{WHAT}: rename returns {new!r} for two leaves. It must return a different name for each leaf."
            )
        kind = dtype if dtype is not None and leaf.dtype.is_floating_point else leaf.dtype
        out[new] = TensorToWrite(new, kind, leaf.shape, partial(read, leaf.name, kind))
    return list(out.values())


def _split(entries: list[TensorToWrite], limit: int | None) -> list[list[TensorToWrite]]:
    """Group entries, in order, into at most `limit` bytes; a larger entry is alone."""
    groups: list[list[TensorToWrite]] = [[]]
    size = 0
    for e in entries:
        if groups[-1] and limit is not None and size + e.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(e)
        size += e.nbytes
    return groups


def _write_folder(folder: Path, groups: list[list[TensorToWrite]]) -> list[Path]:
    """Readers find the old weights, the new ones or none, but never files of both: an index is the last to come."""
    single = len(groups) == 1
    names = [SINGLE] if single else [f"model-{k + 1:05d}-of-{len(groups):05d}.safetensors" for k in range(len(groups))]
    with _Fresh() as fresh:
        for name, group in zip(names, groups, strict=True):
            fresh.weights(folder / name, group)
        (folder / INDEX).unlink(missing_ok=True)
        if not single:
            (folder / SINGLE).unlink(missing_ok=True)  # readers would prefer it
            index = {
                "metadata": {"total_size": sum(e.nbytes for g in groups for e in g)},
                "weight_map": {e.name: n for n, g in zip(names, groups, strict=True) for e in g},
            }
            fresh.text(folder / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
        fresh.put_in_place()
    for sums in folder.glob(f"model*.safetensors{SUFFIX}"):  # which only files have that an export has made
        name = sums.name.removesuffix(SUFFIX)
        if name not in names and (name == SINGLE or _SHARD.fullmatch(name)):
            (folder / name).unlink(missing_ok=True)
            sums.unlink(missing_ok=True)
    return [folder / name for name in names]


class _Fresh:
    """Files that take their names together, once all of them are complete. Those that did not are removed: at once, or
    by the next export there if this one is killed. A lock, which the system takes away then, tells that it lives.
    """

    def __init__(self) -> None:
        self._files: list[tuple[Path, Path]] = []
        self._locks: list[int] = []

    def __enter__(self) -> _Fresh:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for lock in self._locks:
            os.close(lock)
        for fresh, target in self._files:
            fresh.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise CheckpointError(f"{WHAT}: {target} could not be written: {error.strerror}.") from error

    def weights(self, target: Path, entries: list[TensorToWrite]) -> None:
        """Write weights, and the checksums that lie beside them."""
        fresh = self._fresh(target)
        checksums = checksums_text(*write_file(fresh, entries, save=None))
        self.text(checksums_of(target), checksums)

    def text(self, target: Path, text: str) -> None:
        """Write a text."""
        with open(self._fresh(target), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def put_in_place(self) -> None:
        """Give the files their names, in the order in which they were written."""
        for _, target in self._files:
            if target.name.endswith(SUFFIX):
                target.unlink(missing_ok=True)  # of the file that is replaced first
        for fresh, target in self._files:
            os.replace(fresh, target)
        for folder in {target.parent for _, target in self._files}:
            flush(folder)

    def _fresh(self, target: Path) -> Path:
        fresh = target.with_name(f"{target.name}.zerofn-{secrets.token_hex(6)}")
        self._files.append((fresh, target))
        lock = _locked(fresh, os.O_CREAT)
        self._locks += [] if lock is None else [lock]
        return fresh


def _clear(folder: Path) -> None:
    """Remove what killed exports have left. Checksums whose file has its name take theirs: it is known as an export's
    by them.
    """
    left = {file: _FRESH.sub("", file.name) for file in folder.iterdir() if _FRESH.search(file.name)}
    for file, name in sorted(left.items(), key=lambda item: not item[1].endswith(SUFFIX)):
        if (lock := _locked(file)) is None:
            continue
        weights = name.removesuffix(SUFFIX)
        if weights not in (name, *left.values()) and (folder / weights).exists() and not (folder / name).exists():
            os.replace(file, folder / name)
        else:
            file.unlink(missing_ok=True)
        os.close(lock)


def _locked(file: Path, flags: int = 0) -> int | None:
    """Return a descriptor of a file that nobody has locked, locked now; None if it cannot be."""
    with contextlib.suppress(OSError):  # another export writes it, or the file system has no locks
        descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | flags, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor
    return None


def _bytes(size: int | str | None) -> int | None:
    """
    >>> _bytes("5GB"), _bytes("1.5 KiB"), _bytes(7)
    (5000000000, 1536, 7)
    """
    if isinstance(size, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        if found is None or found[2].upper() not in _UNITS:
            raise ValueError(
                f"{WHAT}: max_shard_size={size!r} is not a size. Write a number of bytes, or a string "
                "such as '5GB' or '500MiB'."
            )
        size = int(float(found[1]) * _UNITS[found[2].upper()])
    if size is not None and size <= 0:
        raise ValueError(f"{WHAT}: max_shard_size={size!r} must be positive.")
    return size
