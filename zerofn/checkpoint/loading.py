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
from ..comm.agreement import exchange, first_difference, rank_and_size, together
from ..sharding.sharded import is_sharded
from ..util.errors import CheckpointError
from .contents import Part, describe, leaves_of, missing_leaf, take_apart
from .filling import Filling, settle_all
from .manifest import digest_now
from .places import located
from .sources import Checkpoint, Renamed, Source

log = logging.getLogger("zerofn")

WHAT = "zerofn.load"
T = TypeVar("T")
_TRIES, _PAUSE = 5, 0.2  # how often, and the first of the seconds between
_REPLACED = "was replaced while it was read"


def load(
    path: str | os.PathLike[str],
    like: Any,
    *,
    only: str | None = None,
    rename: Callable[[str], str | None] | None = None,
) -> Any:
    """Return the state that was saved at `path`, laid out as `like`.

    World size, stage, units, precision, and which trees are sharded may differ from the saved state. Values are the
    same bits, or are cast (with one log line) to the dtypes of `like`. Every rank must call it; each reads only the
    intervals that it needs. `like` is not changed and shares no memory with the result; a donated state will do. A
    loss scale that the checkpoint lacks is taken from `like`.

    `only="params"`: a key path of `like`; what is below it is read, and all else keeps the values of `like`, which must
    not be donated then. `rename`: name in the checkpoint -> name in `like`, None to leave a leaf out.

    Raises `CheckpointError`, on every rank and with `like` still usable, if there is no complete checkpoint, if a
    file is missing, truncated or damaged, or if names, shapes or types of leaves differ from those of `like`.
    """
    words = f"{str(path)}{'' if only is None else f', only {only}'}"
    return _load(located(path), like, _Choice(only, rename), words)


def load_copy(path: Path, like: Any, words: str) -> Any:
    """Load from a folder that may be another one on each machine, with those files that this rank needs.

    `words`: what it is, the same on all ranks. The rest is as in `load`.
    """
    return _load(path, like, _Choice(None, None, whole=False), words)


def _load(path: Path, like: Any, choice: _Choice, words: str) -> Any:
    parts, treedef = together(WHAT, lambda: take_apart(like, WHAT))
    same_everywhere(WHAT, words, parts)
    values = _read(path, parts, choice)
    with torch.no_grad():
        settle_all(values)
    return tree.unflatten(treedef, values)


def same_everywhere(what: str, path: str | os.PathLike[str], parts: Sequence[Part]) -> None:
    """Raise `ValueError` on every rank unless all of them load the same path into the same layout."""
    found = first_difference(what, [f"path {str(path)}", *describe(parts)])
    if found is not None:
        rank, here, there = found
        raise ValueError(
            f"{what}: ranks must load the same path into the same layout.\n  rank "
            f"{rank_and_size()[0]}: {here}\n  rank {rank}: {there}"
        )


@dataclass(frozen=True)
class _Choice:
    """Which leaves are read, and what they are called. `whole`: whether all files must be there."""

    only: str | None
    rename: Callable[[str], str | None] | None
    whole: bool = True

    def takes(self, name: str) -> bool:
        """Whether a leaf of `like` is to be read."""
        return self.only is None or name == self.only or name.startswith(f"{self.only}.")

    def source(self, checkpoint: Checkpoint) -> Source:
        """The checkpoint with the names that `like` has."""
        return checkpoint if self.rename is None else Renamed(checkpoint, self.rename, WHAT)


def _read(path: Path, parts: list[Part], choice: _Choice) -> list[Any]:
    """Read one checkpoint on all ranks; again, if a save has put another one in its place meanwhile."""
    for k in range(_TRIES):
        try:
            now = digest_now(path)
            found = together(WHAT, partial(_unless_replaced, path, now, partial(Checkpoint, path, choice.whole)))
            _check_the_same(found)
            fill = partial(_fill, found, parts, choice)
            return together(WHAT, partial(_unless_replaced, path, found.manifest.digest, fill))
        except CheckpointError as error:
            if _REPLACED not in str(error) or k == _TRIES - 1:
                raise
        time.sleep(_PAUSE * 2**k)
    raise AssertionError


def _check_the_same(checkpoint: Checkpoint) -> None:
    """Raise `CheckpointError` unless all ranks see the same checkpoint."""
    manifest = checkpoint.manifest
    texts = exchange(WHAT, f"{manifest.digest}\nstep {manifest.step}, saved {manifest.saved.get('time')}")
    here = texts[rank_and_size()[0]]
    for rank, there in enumerate(texts):
        if there != here:
            raise CheckpointError(
                f"{WHAT}: ranks see different checkpoints at {checkpoint.folder} ({_REPLACED}, or is no file system "
                f"that all ranks share).\n  rank {rank_and_size()[0]}: {here.partition(chr(10))[2]}\n  rank {rank}: "
                f"{there.partition(chr(10))[2]}"
            )


def _fill(checkpoint: Checkpoint, parts: list[Part], choice: _Choice) -> list[Any]:
    try:
        source = choice.source(checkpoint)
        absent = _match(source, parts, choice, str(checkpoint.folder))
        with torch.no_grad():
            return Filling(parts, absent).fill(source, str(checkpoint.folder))
    finally:
        checkpoint.close()


def _unless_replaced(folder: Path, digest: str, work: Callable[[], T]) -> T:
    """Return `work()`; an error says so if the checkpoint is not the one of this digest any more."""
    try:
        return work()
    except (CheckpointError, OSError) as error:
        if digest_now(folder) != digest:
            raise CheckpointError(f"{folder} {_REPLACED}. {error}") from error
        raise


def _match(source: Source, parts: list[Part], choice: _Choice, where: str) -> frozenset[str]:
    """Return the leaves of `like` that keep their values: those not chosen, and those of a loss scale that was not
    saved. Raises unless all other names agree.
    """
    every = {leaf.name: leaf for part in parts for leaf in leaves_of(part)}
    wanted = {name: leaf for name, leaf in every.items() if choice.takes(name)}
    if not wanted and every:
        nothing = missing_leaf(choice.only or "", "`like`", every, 1)
        raise ValueError(f"{WHAT}: only={choice.only!r} chooses nothing: {nothing}")
    _check_kept(parts, choice)
    saved = {name: leaf for name, leaf in source.leaves.items() if choice.takes(name)}
    fix = "Build `like` with the model, optimizer and extras of the state that was saved, or pass only= and rename=."
    missing = [name for name, leaf in wanted.items() if name not in saved and not leaf.optional]
    if missing:
        raise CheckpointError(f"{missing_leaf(missing[0], where, saved, len(missing))} {fix}")
    unexpected = [name for name, leaf in saved.items() if name not in wanted and not leaf.optional]
    if unexpected:
        raise CheckpointError(
            f"{where}: {missing_leaf(unexpected[0], '`like`', wanted, len(unexpected))} It was saved with one. {fix}"
        )
    absent = frozenset(wanted) - frozenset(saved)
    if absent:
        log.info("%s holds no %s; it is `like`'s own.", where, ", ".join(sorted(absent)))
    return absent | (frozenset(every) - frozenset(wanted))


def _check_kept(parts: list[Part], choice: _Choice) -> None:
    """Raise `ValueError` if a value that is to be kept was donated."""
    for part in parts:
        kept = [leaf.name for leaf in leaves_of(part) if not choice.takes(leaf.name)]
        if kept and is_sharded(part.value) and part.value.lost is not None:
            raise ValueError(
                f"{WHAT}: with only={choice.only!r}, {kept[0]!r} keeps its values, but this state was used up by a "
                "step; pass the state that the step has returned."
            )
