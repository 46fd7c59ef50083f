"""`save`: every rank writes its own shards; the checkpoint appears once all of them are written."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from ..job.agreement import difference_in_full, exchange, fingerprint, rank_and_size, together, with_texts
from ..memory.turns import outside_steps
from ..ops.same import checksum
from ..sharding.sharded import Sharded, is_sharded
from ..util.arguments import checked
from ..util.errors import CheckpointError
from ..util.process import the
from ..util.version import __version__
from . import folder, loader_state, owner
from .background_saves import InFlight, Saving, Snapshot
from .locations import check_answers, located, make_folder, remove_folder
from .manifest import Manifest, SavedLeaf, SavedTree, read_manifest
from .named_leaves import StatePart, describe, leaves_of, storages_of, take_apart
from .save_plan import EveryTree, OwnTree, Told
from .tensor_file import FileIdentity, TensorToWrite, write_file

log = logging.getLogger("zerofn")

WHAT = "zerofn.save"


@checked()
def save(path: str | os.PathLike[str], state: Any, *, wait: bool = True) -> Saving:
    """Write a state to the folder `path`, where `load` finds it. Every rank must call it. Nothing is pickled.

    Each rank writes one safetensors file with its shards, with one MiB in memory at a time. Rank 0 also writes
    replicated values, and a JSON manifest of logical names. Nothing is written twice: at stage 0 each rank writes 1/N
    of the state, and a slice that several ranks hold is written by the first of them. All ranks must see `path`: on
    several machines a shared file system, or a URL such as "s3://bucket/a" (of any file system that fsspec knows; `pip
    install 'zerofn[remote]'`), or a `UPath` with its options. An older checkpoint at `path` stays until the new one is
    complete, so one of them remains if the process is killed. Other files in the folder stay.

    `wait=False` returns once this rank's part is copied to host memory, and a thread writes it while training
    continues; the next save uses the same memory for its copy. Returns a handle: `.done()`, `.wait(timeout=None)`,
    `.path`, and `.blocked_s`, the seconds that this call took. A save waits for the previous one. If a save fails in
    the background, `.wait()` or the next save raises its error; the end of the program waits for the last save.

    Raises, on every rank: `TypeError` for a leaf that cannot be stored, `ValueError` if two leaves have the same name
    or a replicated leaf differs between ranks, `CheckpointError` if the disk fails, if `path` exists and is not a
    checkpoint, or if another job saves there, and `RuntimeError` if not all ranks call it.

    >>> import tempfile, zerofn
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saving = zerofn.save(f"{folder}/step-1", {"w": torch.ones(2)})
    ...     saving.done()
    True
    """
    return save_along(path, state, wait, Along())


@dataclass(frozen=True)
class Along:
    """What is saved along with a state: `notes`, which rank 0 gives, and where each rank's loader stands. `after` is
    called on rank 0 when the checkpoint is complete; `before`, before anything is written.
    """

    notes: dict[str, Any] = field(default_factory=dict)
    loader: loader_state.HasState | None = None
    before: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None


@outside_steps(WHAT)
def save_along(path: str | os.PathLike[str], state: Any, wait: bool, along: Along) -> Saving:
    """Save a state, with what goes along with it. The rest is as in `save`."""
    start, target = time.perf_counter(), located(path)
    words = f"path {path}{'' if wait else ', behind the step'}"
    job = prepared(target, state, along, words, before=the(InFlight).finish)
    if wait:
        _run(job, lambda: job.entries)
        return Saving(path, time.perf_counter() - start)
    return the(InFlight).begin(path, partial(_run, job, the(Snapshot).of(job.entries)), start)


def prepared(
    path: Path, state: Any, along: Along, words: str, *, before: Callable[[], object] = lambda: None
) -> OneSave:
    """Return what all ranks agree on about a save to the folder `path`, which may be another on each machine.

    `words`: what must be the same on all ranks. Raises as `save` does.
    """
    lines, in_slices, parts, own = [words], list[str](), list[StatePart](), list[OwnTree]()
    loader = list[str]()

    def describe_it() -> tuple[None, str]:
        before()
        parts.extend(_plan(state))
        lines.extend(_lines(parts))
        in_slices.extend(f"{name} = {digest}" for name, digest in _replicas(parts, slices=True))
        own.extend(_own_trees(parts))
        loader.append(loader_state.text_of(along.loader))
        prints = [fingerprint("\n".join(x)) for x in (lines, in_slices)]
        return None, json.dumps([*prints, folder.new_save(), loader_state.digest(loader[0]), [x.told() for x in own]])

    texts = with_texts(WHAT, describe_it)[1]
    prints, of_slices, numbers, digests, told = zip(*map(json.loads, texts), strict=True)
    if len(set(prints)) > 1:
        raise _unequal(lines)
    trees = [EveryTree.of(WHAT, x, [Told.of(each[k]) for each in told]) for k, x in enumerate(own)]
    if trees:  # units of experts are in more slices than others
        _check_slices(max((tree.slices for tree in trees), key=lambda x: len(x[0])), of_slices, in_slices)
    return _prepare(path, parts, numbers[0], trees, along, (loader[0], digests))


def _run(job: OneSave, entries: Callable[[], list[TensorToWrite]]) -> None:
    with contextlib.ExitStack() as stack:
        job.on_rank_0(lambda: stack.enter_context(_at(job)))
        files = write_all(job, entries)
        job.on_rank_0(lambda: job.finish(files))
        job.on_rank_0(stack.close)
        job.on_rank_0(job.along.after)


def write_all(job: OneSave, entries: Callable[[], list[TensorToWrite]]) -> dict[str, FileIdentity]:
    """Write this rank's file. Returns what every rank has written, by file name."""

    def write() -> FileIdentity | None:
        mine = entries()
        check_answers(job.path / folder.MANIFEST)
        return write_file(job.file, mine, save=job.number)[0] if mine else None

    written = together(WHAT, write)
    job.check_ranks()
    told = json.dumps(None if written is None else [written.nbytes, written.header])
    found = map(json.loads, exchange(WHAT, told))
    names = [folder.file_of(r, job.size, job.number) for r in range(job.size)]
    return {name: FileIdentity(*w) for name, w in zip(names, found, strict=True) if w is not None}


@contextlib.contextmanager
def _at(job: OneSave) -> Iterator[None]:
    """On rank 0: a folder that this save alone writes to, without what killed saves have left."""
    path, number = job.path, job.number
    check_answers(path / folder.MANIFEST)
    job.along.before()
    folder.check_usable(path)
    new = not path.exists()
    make_folder(path)
    try:
        with owner.saving(path, number):
            before = _files_there(path)
            _remove(folder.left_behind(path, before))
            try:
                yield
            except BaseException:
                with contextlib.suppress(CheckpointError):  # a damaged manifest names nobody knows what
                    named = read_manifest(path).files if folder.is_complete(path) else ()
                    # A rank may be lost when the manifest is there and names this save's files: then it is complete.
                    _remove(file for file in folder.files_of(path, number) if file.name not in named)
                raise
            owner.note_save(path, number)
            after = read_manifest(path).files
            _remove(folder.left_behind(path, after))
            _remove([path / name for name in before or {} if name not in after])  # of formats without numbers
    finally:
        if new:
            remove_folder(path)  # if nothing has come into it


def _files_there(path: Path) -> Collection[str] | None:
    """The files of the checkpoint that is there; none of them is known if its manifest is damaged."""
    if not folder.is_complete(path):
        return ()
    try:
        found = read_manifest(path)
    except CheckpointError as error:
        log.warning("save: %s The new checkpoint replaces it.", error)
        return None
    owner.check_not_replaced(path, found.saved)
    return found.files


def _remove(files: Iterable[Path]) -> None:
    for file in files:
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            log.warning("save: %s could not be removed (%s).", file, error)


def _plan(state: Any) -> list[StatePart]:
    parts, _ = take_apart(state, WHAT)
    for part in parts:
        for tensor in part.value.parts if is_sharded(part.value) else [part.tensor]:
            if tensor.is_meta:
                raise ValueError(
                    f"{WHAT}: {part.name!r} is on the meta device and has no values to save. Pass the state that "
                    "zerofn.shard returned, not parameters of a skeleton."
                )
    return parts


def _trees(parts: list[StatePart]) -> list[StatePart]:
    """The sharded parts."""
    return [p for p in parts if is_sharded(p.value)]


def _replicated(parts: list[StatePart]) -> list[StatePart]:
    """The others."""
    return [p for p in parts if not is_sharded(p.value)]


def _lines(parts: list[StatePart]) -> list[str]:
    """What all ranks must have alike: the structure, and the values of replicated leaves."""
    return [*describe(parts), *(f"{name} = {digest}" for name, digest in _replicas(parts, slices=False))]


def _unequal(lines: list[str]) -> ValueError:
    rank, here, there = difference_in_full(WHAT, lines)
    name = here.partition(" = ")[0]
    if " = " in here and name == there.partition(" = ")[0]:
        return ValueError(
            f"{WHAT}: the replicated leaf {name!r} differs between rank {rank_and_size()[0]} and rank {rank}. Make it "
            "equal before you save (zerofn.collectives.all_reduce, or the same code and seed on all ranks), or store "
            "values that differ outside the state."
        )
    return ValueError(
        f"{WHAT}: ranks save different states, or save to different paths. Pass the same path and the same state on "
        "all ranks.\n"
        f"  rank {rank_and_size()[0]}: {here}\n"
        f"  rank {rank}: {there}"
    )


def _check_slices(slices: Sequence[tuple[int, ...]], prints: Sequence[str], lines: list[str]) -> None:
    """Raise `ValueError` if ranks with the same slices have other values of them. `slices[r]`: which rank r has."""
    other = next((r for r, x in enumerate(slices) if prints[r] != prints[slices.index(x)]), None)
    if other is None:
        return
    first = slices.index(slices[other])
    texts = [text.split("\n") for text in exchange(f"{WHAT}, in full", "\n".join(lines))]
    name = next(a for a, b in zip(texts[first], texts[other], strict=True) if a != b).partition(" = ")[0]
    raise ValueError(
        f"{WHAT}: rank {first} and rank {other} hold the same slice of {name!r}, but its values differ. Make them "
        "equal before you save (the same code and seed on all ranks), or store values that differ outside the state."
    )


def _replicas(parts: list[StatePart], *, slices: bool) -> Iterator[tuple[str, str]]:
    """(name, digest) of every leaf that each rank holds whole; with `slices`, of every slice that it holds whole."""
    if rank_and_size()[1] == 1:
        return
    for part in () if slices else _replicated(parts):
        yield part.name, checksum(part.tensor)
    for part in _trees(parts):
        sharded: Sharded = part.value
        spec = sharded.spec
        if spec.stage == 0 and (spec.mesh.shards.size > 1 or spec.mesh.slices):
            for unit, leaves in groupby(leaves_of(part), key=lambda leaf: leaf.unit):
                whole = sharded.stored[unit].loaded()
                for leaf in leaves:
                    if bool(leaf.region) == slices:
                        yield leaf.name, checksum(whole.read(leaf.offset, leaf.offset + leaf.numel))


def _own_trees(parts: list[StatePart]) -> Iterator[OwnTree]:
    used = {loader_state.IN_FILE, *(p.name for p in _replicated(parts))}
    for part in _trees(parts):
        yield from OwnTree.of(part, [_unique(f"{part.name}/{unit.name}", used) for unit in part.value.layout.units])


@dataclass(frozen=True)
class OneSave:
    """One save, with all that it needs of the state. `rank` of `size`: of the whole job."""

    path: Path
    number: str
    rank: int
    size: int
    entries: list[TensorToWrite]  # that this rank writes
    trees: tuple[SavedTree, ...]
    leaves: tuple[SavedLeaf, ...]
    stored: dict[str, str]  # how each tree is stored, for people
    step: int | None
    along: Along
    notes: dict[str, Any]

    @property
    def file(self) -> Path:
        """Where this rank writes."""
        return self.path / folder.file_of(self.rank, self.size, self.number)

    def check_ranks(self) -> None:
        """Raise `CheckpointError` if the ranks are not those of before."""
        if rank_and_size() != (self.rank, self.size):
            raise CheckpointError(f"{WHAT}: the process group was destroyed before {self.path} was complete.")

    def on_rank_0(self, work: Callable[[], object]) -> None:
        """Run `work` on rank 0, as `together` does."""
        self.check_ranks()
        together(WHAT, work if self.rank == 0 else lambda: None)

    def finish(self, files: dict[str, FileIdentity]) -> None:
        """On rank 0: see that every file has arrived, and let the manifest name them."""
        for name, written in files.items():
            file = self.path / name
            if not file.exists() or file.stat().st_size != written.nbytes:
                raise CheckpointError(
                    f"{WHAT}: rank 0 cannot see all of {file}. {self.path} must be on a file system that all ranks "
                    "share."
                )
        text = self.manifest(files)
        folder.flush(self.path)
        owner.check_still(self.path, self.number)
        folder.replace_text(self.path / folder.MANIFEST, text, self.number)

    def manifest(self, files: dict[str, FileIdentity]) -> str:
        """Return the text of the manifest."""
        saved = {
            "save": self.number,
            **the(owner.ThisProcess).described(),
            "time": datetime.now(timezone.utc).isoformat(),
        }
        saved |= {"program": " ".join(sys.argv), "stored": self.stored}
        return Manifest(self.size, self.trees, self.leaves, files, self.step, _versions(), saved, self.notes).text()


def _prepare(
    path: Path,
    parts: list[StatePart],
    number: str,
    trees: Sequence[EveryTree],
    along: Along,
    loader: tuple[str, Sequence[str]],
) -> OneSave:
    """Return the save of these parts. `trees`: what ranks write of each `Sharded`; `loader`: where this rank's stands,
    and the digests of all ranks'.
    """
    rank, size = rank_and_size()
    file_of = partial(folder.file_of, num_ranks=size, save=number)
    saved = [x for tree in trees for x in tree.saved(file_of)]
    entries = [entry for tree in trees if tree.writes(rank) for entry in tree.own.entries()]
    if rank == 0:
        entries += [TensorToWrite.of(p.name, p.tensor) for p in _replicated(parts)]
    tensor = _unique(loader_state.IN_FILE, {p.name for p in _replicated(parts)})
    entries += loader_state.entries(loader[0], tensor, rank, loader[1])
    notes = along.notes | loader_state.noted(tensor, loader[1], file_of)
    leaves = tuple(SavedLeaf(leaves_of(p)[0], file_of(0), p.name) for p in _replicated(parts))
    step = next((p.tensor for p in _replicated(parts) if p.name == "step"), None)
    count = int(step) if step is not None and step.numel() == 1 else None
    stored = {p.name: _stored(p) for p in _trees(parts)}
    return OneSave(path, number, rank, size, entries, tuple(saved), leaves, stored, count, along, notes)


def _stored(part: StatePart) -> str:
    """How the shards of a tree are stored, where that is not plainly beside the model."""
    specs = [s for s in storages_of(part.value) if s.placement is not None or s.codec.note]
    return ", ".join(dict.fromkeys(s.described for s in specs))


def _versions() -> dict[str, str]:
    return {"zerofn": __version__, "torch": str(torch.__version__)}


def _unique(name: str, used: set[str]) -> str:
    while name in used:
        name += "'"
    used.add(name)
    return name
