"""`load`: read a checkpoint into a state that is laid out as another one."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from .. import tree
from ..comm.axes import APART, RANKS
from ..job.agreement import exchange, first_difference, rank_and_size, together
from ..memory.turns import outside_steps
from ..sharding.sharded import is_sharded
from ..util.arguments import checked
from ..util.errors import CheckpointError
from .file_sources import Checkpoint
from .fill_shards import Filling, settle_all
from .folder import MANIFEST
from .locations import check_answers, located
from .manifest import digest_now
from .named_leaves import StatePart, describe, leaves_of, missing_leaf, take_apart, with_entries
from .tensor_source import OtherRanks, OtherReplicas, Renamed, Source

log = logging.getLogger("zerofn")

WHAT = "zerofn.load"
T = TypeVar("T")
_TRIES, _PAUSE = 5, 0.2  # how often, and the first of the seconds between
_REPLACED = "was replaced while it was read"


@checked()
def load(
    path: str | os.PathLike[str],
    like: T,
    *,
    only: str | None = None,
    rename: Callable[[str], str | None] | None = None,
    donate: bool = False,
) -> T:
    """Return the state that was saved at `path`, with the layout of `like`.

    World size, mesh, stage, units, precision, and which trees are sharded may differ from those of the saved state.
    Values have the same bits, or are cast (with one log line) to the dtypes of `like`. Every rank must call it; each
    reads only the intervals that it needs. `like` is not changed and shares no memory with the result; it may be a
    donated state. If the checkpoint has no loss scale or no `feedback`, that of `like` is used; if `like` has none,
    that of the checkpoint is ignored.

    `only="params"`: a key path of `like`. Leaves below it are read, and all others keep the values of `like`. With
    `only`, `like` must not be a donated state. `rename`: name in the checkpoint -> name in `like`, None to leave a leaf
    out.

    `donate=True` reads into the memory of `like`, so that memory holds one state, not two. Using `like` afterwards
    raises `RuntimeError`, even if the checkpoint turns out to be damaged.

    Raises `CheckpointError` on every rank if `path` has no complete checkpoint, if a file is missing, truncated or
    damaged, if names or shapes of leaves differ from those of `like`, or if a dtype cannot be cast to that of `like`.
    Without `donate`, `like` is still usable then.

    >>> import tempfile, zerofn
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saving = zerofn.save(f"{folder}/step-1", {"w": torch.ones(2)})
    ...     load(f"{folder}/step-1", like={"w": torch.zeros(2)})
    {'w': tensor([1., 1.])}
    """
    words = f"{path}{'' if only is None else f', only {only}'}{', donated' if donate else ''}"
    return _load(together(WHAT, partial(located, path)), like, _Choice(only, rename, donate=donate), words)


def load_copy(path: Path, like: Any, words: str) -> Any:
    """Load into a donated state, from a folder that may be another one on each machine, those files that this rank
    needs.

    `words`: what it is, the same on all ranks. The rest is as in `load`.
    """
    return _load(path, like, _Choice(None, None, whole=False, donate=True), words)


@outside_steps(WHAT)
def _load(path: Path, like: Any, choice: _Choice, words: str) -> Any:
    parts, treedef = together(WHAT, lambda: take_apart(like, WHAT))
    same_everywhere(WHAT, words, parts)
    reading = _Reading(path, parts, choice)
    try:
        values = reading.read()
    except BaseException:
        reading.donate("and reading failed after it had begun to overwrite this state. Make the state again.")
        raise
    reading.donate(
        "and its values moved to the state that load returned. Write state = zerofn.load(path, like=state, ...)."
    )
    with torch.no_grad():
        settle_all(values)
    return tree.unflatten(treedef, values)


def same_everywhere(what: str, path: str | os.PathLike[str], parts: Sequence[StatePart]) -> None:
    """Raise `ValueError` on every rank unless all of them load the same path into the same layout."""
    found = first_difference(what, [f"path {str(path)}", *describe(parts)])
    if found is not None:
        rank, here, there = found
        raise ValueError(
            f"{what}: ranks load different paths, or load into different layouts. Pass the same path and the same "
            "`like` on all ranks.\n"
            f"  rank {rank_and_size()[0]}: {here}\n"
            f"  rank {rank}: {there}"
        )


@dataclass(frozen=True)
class _Choice:
    """Which leaves are read, what they are called, and whether into the memory of `like` (`donate`). `whole`: whether
    all files must be there.
    """

    only: str | None
    rename: Callable[[str], str | None] | None
    whole: bool = True
    donate: bool = False

    def takes(self, name: str) -> bool:
        """Whether a leaf of `like` is to be read."""
        return self.only is None or name == self.only or name.startswith(f"{self.only}.")

    def source(self, checkpoint: Checkpoint) -> Source:
        """The checkpoint with the names that `like` has."""
        return checkpoint if self.rename is None else Renamed(checkpoint, self.rename, WHAT)


class _Reading:
    """One checkpoint, read on all ranks."""

    def __init__(self, path: Path, parts: list[StatePart], choice: _Choice) -> None:
        self._path, self._parts, self._choice = path, parts, choice
        self._begun = False  # whether values may have been written

    def read(self) -> list[Any]:
        """Return the values of the parts; read again if a save has put another checkpoint in its place meanwhile."""
        for k in range(_TRIES):
            try:
                return self._once()
            except CheckpointError as error:
                if _REPLACED not in str(error) or k == _TRIES - 1:
                    raise
            time.sleep(_PAUSE * 2**k)
        raise AssertionError

    def _once(self) -> list[Any]:
        path, parts, choice = self._path, self._parts, self._choice
        found = together(WHAT, partial(_opened, path, choice.whole))
        _check_the_same(found)
        try:
            source, filling = together(WHAT, partial(_matched, found, parts, choice))
            self._begun = True
            with torch.no_grad():
                fill = partial(filling.fill, source)
                return together(WHAT, partial(_unless_replaced, path, found.manifest.digest, fill))
        finally:
            found.close()

    def donate(self, how: str) -> None:
        """Let the state that was read into raise, if it was donated and anything was written."""
        for part in self._parts if self._choice.donate and self._begun else []:
            if is_sharded(part.value) and part.value.lost is None:
                part.value.donate(f"{part.name!r} was donated to zerofn.load(..., donate=True) of {self._path}, {how}")


def _opened(path: Path, whole: bool) -> Checkpoint:
    """Return the checkpoint at a path. `whole`: whether all of its files must be there."""
    check_answers(path / MANIFEST)
    return _unless_replaced(path, digest_now(path), partial(Checkpoint, path, whole))


def _check_the_same(checkpoint: Checkpoint) -> None:
    """Raise `CheckpointError` unless all ranks see the same checkpoint."""
    manifest = checkpoint.manifest
    texts = exchange(WHAT, f"{manifest.digest}\nstep {manifest.step}, saved {manifest.saved.get('time')}")
    here = texts[rank_and_size()[0]]
    for rank, there in enumerate(texts):
        if there != here:
            raise CheckpointError(
                f"{WHAT}: ranks see different checkpoints at {checkpoint.folder} (it {_REPLACED}, or is not on a file "
                "system that all ranks share).\n"
                f"  rank {rank_and_size()[0]}: {here.partition(chr(10))[2]}\n"
                f"  rank {rank}: {there.partition(chr(10))[2]}"
            )


def _unless_replaced(folder: Path, digest: str, work: Callable[[], T]) -> T:
    """Return `work()`; an error says so if the checkpoint is not the one of this digest any more."""
    try:
        return work()
    except (CheckpointError, OSError) as error:
        if digest_now(folder) != digest:
            raise CheckpointError(f"{folder} {_REPLACED}. {error}") from error
        raise


def _matched(checkpoint: Checkpoint, parts: list[StatePart], choice: _Choice) -> tuple[Source, Filling]:
    """Return from what to fill what. Raises `CheckpointError` unless names, shapes and dtypes agree."""
    source, where = choice.source(checkpoint), str(checkpoint.folder)
    filling = Filling(parts, _kept(source, parts, choice, where), choice.donate)
    source = _for_entries(source, parts, where)
    filling.check(source, where)
    return source, filling


def _for_entries(source: Source, parts: list[StatePart], where: str) -> Source:
    """Return the source for as many replicas, and ranks, as `like` has."""
    sizes, num = _other_sizes(source, parts, APART)
    if sizes:
        size = next(iter(sizes.values()))
        log.info("%s was saved by %d replicas; of the %d here, replica r has entry r %% %d.", where, num, size, num)
        source = OtherReplicas(source, sizes)
    sizes, num = _other_sizes(source, parts, RANKS)
    if sizes:
        size = next(iter(sizes.values()))
        log.info("%s was saved by %d ranks; rank r of the %d here adds entries r, r + %d, ...", where, num, size, size)
        source = OtherRanks(source, sizes)
    return source


def _other_sizes(source: Source, parts: list[StatePart], axis: str) -> tuple[dict[str, int], int]:
    """Return (how many entries each leaf is to have that was saved with another number of them, that number)."""
    entries, here = with_entries(parts, axis), {leaf.name: leaf.shape for part in parts for leaf in leaves_of(part)}
    there = {name: leaf.shape for name, leaf in source.leaves.items() if name in entries and leaf.shape}
    sizes = {name: here[name][0] for name, x in there.items() if x[1:] == here[name][1:] and x[0] != here[name][0]}
    return sizes, there[next(iter(sizes))][0] if sizes else 0


def _kept(source: Source, parts: list[StatePart], choice: _Choice, where: str) -> frozenset[str]:
    """Return the leaves of `like` that keep their values: those not chosen, and those that were not saved of what a
    state may lack. Raises unless all other names agree.
    """
    every = {leaf.name: leaf for part in parts for leaf in leaves_of(part)}
    wanted = {name: leaf for name, leaf in every.items() if choice.takes(name)}
    if not wanted and every:
        nothing = missing_leaf(choice.only or "", "`like`", every, 1)
        raise ValueError(f"{WHAT}: only={choice.only!r} selects no leaf: {nothing}")
    _check_kept(parts, choice)
    saved = {name: leaf for name, leaf in source.leaves.items() if choice.takes(name)}
    fix = "Build `like` with the model, optimizer and extra of the saved state, or pass only= and rename=."
    missing = [name for name, leaf in wanted.items() if name not in saved and not leaf.optional]
    if missing:
        raise CheckpointError(f"{missing_leaf(missing[0], where, saved, len(missing))} {fix}")
    unexpected = [name for name, leaf in saved.items() if name not in wanted and not leaf.optional]
    if unexpected:
        raise CheckpointError(
            f"{where}: {missing_leaf(unexpected[0], '`like`', wanted, len(unexpected))} The checkpoint has this leaf. "
            f"{fix}"
        )
    absent = frozenset(wanted) - frozenset(saved)
    if absent:
        log.info("%s has no %s; the value in `like` stays.", where, ", ".join(sorted(absent)))
    return absent | (frozenset(every) - frozenset(wanted))


def _check_kept(parts: list[StatePart], choice: _Choice) -> None:
    """Raise `ValueError` if a value that is to be kept was donated."""
    for part in parts:
        kept = [leaf.name for leaf in leaves_of(part) if not choice.takes(leaf.name)]
        if kept and is_sharded(part.value) and part.value.lost is not None:
            raise ValueError(
                f"{WHAT}: with only={choice.only!r}, {kept[0]!r} keeps its values, but this state was donated to a "
                "step and has none. Pass the state that the step returned."
            )
