"""`load`: read a checkpoint into a state that is laid out as another one."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .. import tree
from ..comm.agreement import first_difference, rank_and_size, together
from ..util.errors import CheckpointError
from .contents import Part, describe, leaves_of, missing_leaf, take_apart
from .filling import Filling, settle_all
from .sources import Checkpoint

log = logging.getLogger("zerofn")

WHAT = "zerofn.load"


def load(path: str | os.PathLike[str], like: Any) -> Any:
    """Return the state that was saved at `path`, laid out as `like`.

    World size, stage, units, precision, and which trees are sharded may differ from the saved state. Values are the
    same bits, or are cast (with one log line) to the dtypes of `like`. Every rank must call it; each reads only the
    intervals that it needs. `like` is not changed and shares no memory with the result; a donated state will do. A
    loss scale that the checkpoint lacks is taken from `like`.

    Raises `CheckpointError`, on every rank and with `like` still usable, if there is no complete checkpoint, if a
    file is missing, truncated or damaged, or if names, shapes or types of leaves differ from those of `like`.
    """
    parts, treedef = together(WHAT, lambda: take_apart(like, WHAT))
    same_everywhere(WHAT, path, parts)
    values = together(WHAT, lambda: _read(Path(path).resolve(), parts))
    with torch.no_grad():
        settle_all(values)
    return tree.unflatten(treedef, values)


def same_everywhere(what: str, path: str | os.PathLike[str], parts: Sequence[Part]) -> None:
    """Raise `ValueError` on every rank unless all of them load the same path into the same layout."""
    found = first_difference(what, [f"path {os.fspath(path)}", *describe(parts)])
    if found is not None:
        rank, here, there = found
        raise ValueError(
            f"{what}: ranks must load the same path into the same layout.\n  rank "
            f"{rank_and_size()[0]}: {here}\n  rank {rank}: {there}"
        )


def _read(path: Path, parts: list[Part]) -> list[Any]:
    checkpoint = Checkpoint(path)
    try:
        absent = _match(checkpoint, parts)
        with torch.no_grad():
            return Filling(parts, absent).fill(checkpoint, str(checkpoint.folder))
    finally:
        checkpoint.close()


def _match(checkpoint: Checkpoint, parts: list[Part]) -> frozenset[str]:
    """Return the leaves of a loss scale in `like` that were not saved. Raises unless all other names agree."""
    wanted = {leaf.name: leaf for part in parts for leaf in leaves_of(part)}
    saved = checkpoint.leaves
    fix = "Build `like` with the model, optimizer and extras of the state that was saved."
    missing = [name for name, leaf in wanted.items() if name not in saved and not leaf.optional]
    if missing:
        raise CheckpointError(f"{missing_leaf(missing[0], str(checkpoint.folder), saved, len(missing))} {fix}")
    unexpected = [name for name, leaf in saved.items() if name not in wanted and not leaf.optional]
    if unexpected:
        raise CheckpointError(
            f"{checkpoint.folder}: "
            f"{missing_leaf(unexpected[0], '`like`', wanted, len(unexpected))} It was "
            f"saved with one. {fix}"
        )
    absent = frozenset(wanted) - frozenset(saved)
    if absent:
        log.info("%s holds no %s; it is `like`'s own.", checkpoint.folder, ", ".join(sorted(absent)))
    return absent
