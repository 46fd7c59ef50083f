"""What several ranks hold of a state, so that it must have one value on all of them: replicated leaves, and shards and
slices that several ranks have.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .. import tree
from ..comm.mesh import Mesh
from ..geometry.layout import Leaf, Unit
from ..geometry.overlaps import region_of
from ..job.agreement import exchange, fingerprint, rank_and_size
from ..ops.same import checksum
from .sharded import Sharded, is_sharded
from .state_tree import as_tensor


class Held(NamedTuple):
    """Part of a leaf as one rank holds it. `place`: which part; two ranks with the same one hold the same. `value`:
    the number that it is, or its checksum.
    """

    name: str
    place: str
    value: str


class Unequal(NamedTuple):
    """Two ranks, and (name, value on the one, value on the other) of what they should hold alike."""

    one: int
    other: int
    leaves: list[tuple[str, str, str]]


def held_alike(names: Sequence[str], leaves: Sequence[Any]) -> list[Held]:
    """Return what another rank holds, too: all of a tensor or number, and parts of a `Sharded`'s leaves. What is on a
    drive is left out.
    """
    found: list[Held] = []
    for name, x in zip(names, leaves, strict=True):
        if is_sharded(x):
            found += _of_shards(name, x)
        elif not (value := as_tensor(x) if isinstance(x, bool | int | float) else x).is_meta:
            found.append(Held(name, "", _told(value)))
    return found


def digests(held: Sequence[Held], mesh: Mesh | None) -> dict[str, str]:
    """Map each set of places that a rank may share with others of the mesh to a digest of the values there."""
    first = mesh.ranks[0] if mesh is not None and mesh.ranks else 0
    groups: dict[str, list[Held]] = {}
    for x in held:
        groups.setdefault(x.place.partition("|")[0], []).append(x)
    found = {}
    for group in groups.values():
        places = "\n".join([str(first), *(f"{x.name} {x.place}" for x in group)])
        found[fingerprint(places)] = fingerprint("\n".join(x.value for x in group))
    return found


def first_unequal(what: str, held: Sequence[Held], told: Sequence[Mapping[str, str]]) -> Unequal | None:
    """Return the first two ranks, and what they hold alike with other values; None if there are none.

    `told`: the digests of every rank, by rank. The same on all ranks of the job, which must call it.
    """
    first: dict[str, int] = {}
    for rank, digests_there in enumerate(told):
        for key, value in digests_there.items():
            before = first.setdefault(key, rank)
            if told[before][key] != value:
                mine = json.dumps(held) if rank_and_size()[0] in (before, rank) else ""
                texts = exchange(f"{what}, in full", mine)
                one, two = ({(n, place): value for n, place, value in json.loads(texts[r])} for r in (before, rank))
                found = [
                    (name, one[name, place], x) for (name, place), x in two.items() if one.get((name, place), x) != x
                ]
                return Unequal(before, rank, found)
    return None


def _of_shards(name: str, x: Sharded) -> Iterator[Held]:
    spec, fields = x.spec, tree.field_names(x.layout.treedef)
    for unit, stored in zip(x.layout.units, x.stored, strict=True):
        leaves = [leaf for leaf in unit.leaves if _num_holders(x, unit, leaf) > 1]
        if not leaves or stored.on_drives or any(part.is_meta for part in stored.tensors):
            continue
        values = stored.loaded()
        start, stop = spec.bounds(unit)
        shard = "whole" if spec.num_shards(unit) == 1 else f"{spec.axis_of(unit).name} {spec.axis_of(unit).rank}"
        for leaf, a, b in unit.intervals(start, stop):
            if leaf in leaves:
                where = f"{shard} {region_of(leaf.cuts, spec.mesh)}|{start + a - leaf.offset}:{start + b - leaf.offset}"
                field = fields[leaf.index]
                yield Held(f"{name}.{field}" if name and field else name or field, where, _told(values.read(a, b)))


def _num_holders(x: Sharded, unit: Unit, leaf: Leaf) -> int:
    """Return how many ranks hold the same elements of a leaf: at least that many if ranks share a slice."""
    mesh, spec = x.spec.mesh, x.spec
    shards = 1 if spec.num_shards(unit) == 1 else spec.axis_of(unit).size
    return mesh.num_ranks // (shards * math.prod(len(set(cut.slices)) for cut in leaf.cuts))


def _told(x: Tensor) -> str:
    return str(x.item()) if x.numel() == 1 else f"checksum {checksum(x)}"
