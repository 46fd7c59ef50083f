"""`load_safetensors`: read plain safetensors files straight into shards."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from .. import tree
from ..job.agreement import first_difference, rank_and_size, together
from ..memory.turns import outside_steps
from ..sharding.sharded import is_sharded
from ..util.arguments import checked
from ..util.errors import CheckpointError, printable
from .file_sources import Weights
from .fill_shards import Filling, settle_all
from .loading import same_everywhere
from .locations import is_remote, located
from .named_leaves import StatePart, leaves_of, missing_leaf, take_apart
from .tensor_source import Source

log = logging.getLogger("zerofn")

WHAT = "zerofn.load_safetensors"

T = TypeVar("T")


@checked()
@outside_steps(WHAT)
def load_safetensors(
    path: str | os.PathLike[str], like: T, *, strict: bool = True, rename: Callable[[str], str | None] | None = None
) -> T:
    """Return pretrained weights, with the layout and dtypes of the parameters `like` (`Sharded` or a plain tree).

    `path`: a .safetensors file, or a folder with `model.safetensors` or `model.safetensors.index.json`. Every rank
    must call it; each reads only the intervals that it needs, so no rank ever holds all weights. `rename`: name in
    the file -> name of the leaf, None to leave a tensor out (a tied weight stored twice, for example). With
    `strict=False`, leaves that the files lack keep the values of `like`, and tensors without a leaf are ignored;
    one log line names both. `like` is not changed.

    Raises `CheckpointError` on every rank for files that are missing, damaged or pickled, shapes that differ, and files
    whose values differ between ranks; with `strict`, for a leaf without a tensor or a tensor without a leaf; without
    it, for files that have none of the leaves.

    >>> import tempfile, torch
    >>> from safetensors.torch import save_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file({"bert.w": torch.ones(2)}, f"{folder}/model.safetensors")
    ...     load_safetensors(folder, like={"w": torch.zeros(2)}, rename=lambda name: name.removeprefix("bert."))
    {'w': tensor([1., 1.])}
    """
    return fill(WHAT, lambda: Weights(_place(path), rename), str(path), like, strict)


def fill(what: str, opened: Callable[[], Source], words: str, like: Any, strict: bool, donate: bool = False) -> Any:
    """Return the leaves of a source, laid out as `like`, with `donate` in its memory. All ranks must call it.

    `words`: what it is, the same on all ranks; its first line names it in errors, which begin with `what`.
    """
    parts, treedef = together(what, lambda: take_apart(like, what))
    same_everywhere(what, words, parts)
    path = words.partition("\n")[0]
    values, samples = together(what, lambda: _read(opened, path, parts, strict, donate))
    if (found := first_difference(what, samples)) is not None:
        rank, here, there = found
        raise CheckpointError(
            f"{what}: {path}: ranks have read different values, so their shards would not fit together.\n"
            f"  rank {rank_and_size()[0]}: {here}\n"
            f"  rank {rank}: {there}\n"
            "Pass the same values on all ranks: copies of one file, or a model initialised with one seed."
        )
    with torch.no_grad():
        settle_all(values)
    for part in parts if donate else ():
        if is_sharded(part.value):
            part.value.donate(f"it was donated to {what}(..., donate=True). Use the value that {what} returned.")
    return tree.unflatten(treedef, values)


def _place(path: str | os.PathLike[str]) -> Path:
    """The path, with links as they are: what they point to may have another name."""
    place = located(path)
    return place if is_remote(place) else Path(path).expanduser()


def _read(
    opened: Callable[[], Source], path: str, parts: list[StatePart], strict: bool, donate: bool
) -> tuple[list[Any], list[str]]:
    """Return the values, and samples of what they were read from, unless there is but one such place."""
    weights = opened()
    try:
        absent = _match(weights, parts, path, strict)
        with torch.no_grad():
            filling = Filling(parts, absent, donate)
            filling.check(weights, path)
            same = rank_and_size()[1] == 1 or is_remote(located(path))
            return filling.fill(weights), [] if same else weights.samples()
    finally:
        weights.close()


def _match(weights: Source, parts: list[StatePart], path: str, strict: bool) -> frozenset[str]:
    """Return the leaves that keep their values. Raises if names do not agree and `strict` forbids it."""
    wanted = {leaf.name: None for part in parts for leaf in leaves_of(part)}
    missing = [n for n in wanted if n not in weights.leaves]
    unexpected = [n for n in weights.leaves if n not in wanted]
    if len(missing) == len(wanted) or (strict and (missing or unexpected)):
        raise CheckpointError(_mismatch(wanted, weights.leaves, missing, unexpected, path))
    if missing or unexpected:
        kept, unused = (printable(", ".join(names[:3])) for names in (missing, unexpected))
        told = [f"{len(missing)} of {len(wanted)} leaves keep their values ({kept})"] if missing else []
        told += [f"{len(unexpected)} tensors are not used ({unused})"] if unexpected else []
        log.info("%s: %s.", path, ", ".join(told))
    return frozenset(missing)


def _mismatch(
    wanted: Mapping[str, Any], found: Mapping[str, Any], missing: list[str], unexpected: list[str], path: str
) -> str:
    hint = _hint(list(wanted), list(found))
    if missing:
        fix = hint or (
            "Build `like` with the configuration of these weights, give rename=, or pass "
            "strict=False to keep its values."
        )
        return f"{missing_leaf(missing[0], path, found, len(missing))} {fix}"
    fix = hint or (
        "Leave it out with rename=lambda name: None if name == ... else name (a tied weight "
        "that is stored twice, say), or pass strict=False."
    )
    return f"{path}: {missing_leaf(unexpected[0], '`like`', wanted, len(unexpected))} {fix}"


def _hint(wanted: list[str], found: list[str]) -> str:
    """Say what to write if names differ only by a prefix."""
    for prefix in _prefixes(found, wanted):
        bare = {n.removeprefix(prefix) for n in found}
        if bare >= set(wanted):
            return (
                f"All names match after removing the prefix {prefix!r}; write rename=lambda name: "
                f"name.removeprefix({prefix!r}){_rest(bare - set(wanted))}."
            )
    for prefix in _prefixes(wanted, found):
        longer = {prefix + n for n in found}
        if prefix == "params." and longer <= set(wanted):
            return "`like` is a whole state; pass like=state.params."
        if longer <= set(wanted) or longer >= set(wanted):
            return (
                f"Names match after adding the prefix {prefix!r}; write rename=lambda name: "
                f"{prefix!r} + name{_rest(longer ^ set(wanted))}."
            )
    return ""


def _rest(left: set[str]) -> str:
    return f", and strict=False for the rest ({min(left)!r}, ...)" if left else ""


def _prefixes(longer: list[str], shorter: list[str]) -> list[str]:
    """Return what names in `longer` have before a name in `shorter` that they end with."""
    for name in shorter:
        ends = sorted({n[: -len(name)] for n in longer if n.endswith("." + name)}, key=len)
        if ends:
            return ends
    return []
