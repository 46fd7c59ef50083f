"""Sums over ranks of one bit an element, with error feedback on both sides.

Each rank sends the signs of what it has, and a mean magnitude for each block; what these leave out it adds to what it
sends next. The owner of a shard adds what has come, and what its own signs have left out before; their signs are the
result, which any rank has whole by gathering them (Tang et al. 2021, arXiv:2102.02888, Algorithm 1; its server is the
owner of a shard here).

A result is plus or minus the scale of its block, and encodes to itself again. So ranks that keep shards of it gather it
as signs, too, and have the bits of those that keep it whole.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ..collectives.maps import ops
from ..comm import sign_mix as _sign_mix  # noqa: F401  (defines zerofn::sign_mix)
from ..comm.axes import AxisKind
from ..comm.block_wire import name_of
from ..geometry.layout import Unit
from ..ops import leaf_axes as _ops  # noqa: F401  (defines zerofn::take_shard)
from .spec import Spec
from .wire import block_in

T = TypeVar("T")
BLOCK = 2048  # elements with one scale: a shard is a multiple


class CodedSum(NamedTuple):
    """What comes of a sum. `value`: the result, stored as a tree of parameters is. `worker` [unit size]: what this
    rank's codes have left out. `server` [shard]: what the codes of its shard have left out.
    """

    value: Tensor
    worker: Tensor
    server: Tensor


def check_ranks(spec: Spec, what: str) -> None:
    """Raise `NotImplementedError` for a mesh over which such sums are not known. `what`: how the sentence begins."""
    mesh = spec.mesh
    odd = [axis.name for axis in mesh.axes if axis.size > 1 and _is_odd(axis.kind)]
    if odd:
        raise NotImplementedError(
            f"{what} sums go over ranks along 'data' and 'context' alone, and the mesh has {odd[0]!r}, too; write "
            "mesh=zerofn.Mesh.make(data=-1), or tx=optim.adamw(...)."
        )


def _is_odd(kind: AxisKind) -> bool:
    return kind.replicas or kind.experts or kind.stages


def coded_sum(
    spec: Spec, unit: Unit, before: Tensor, *, worker: Tensor, server: Tensor, decay: float, added: Tensor, by: float
) -> Generator[None, None, CodedSum]:
    """Return the next result of a unit: the sum over ranks of `decay / ranks * before + by * added` and of what was
    left out.

    `before`: the last result, as it is stored. `added` [unit size]: what this rank contributes. The other numbers are
    float32. It pauses where a transfer is on its way; see `staggered`.
    """
    axis, codec, own, cut = spec.within(unit), signs_of(unit), spec.own_cut(unit), spec.num_shards(unit) > 1
    to = (axis.size, axis.group, unit.name, codec)
    if cut:
        under_way, mine = ops.all_gather(before, *to), before
        yield
        whole = ops.wait(under_way)
    else:
        whole = ops.as_whole(before)
        mine = ops.take_shard([whole], [0], *own, torch.float32)
    sent, worker = ops.sign_mix(added, whole, worker, by, decay / axis.size, 0.0, codec)
    under_way = ops.reduce_scatter(sent, *to)
    yield
    # What signs lack of the last result is zero, but behind the first step, and on other ranks than have saved it.
    value, server = ops.sign_mix(ops.wait(under_way), mine, server, 1.0, 0.0, decay, codec, own[0])
    if not cut:
        under_way = ops.all_gather(value, *to)
        yield
        value = ops.as_shard(ops.wait(under_way))
    return CodedSum(value, worker, server)


def staggered(units: Sequence[Generator[None, None, T]]) -> list[T]:
    """Return what generators return, one for each unit. While one waits, the next ones go on: each is a pause behind
    the one before.
    """
    found: dict[int, T] = {}
    under_way: list[tuple[int, Generator[None, None, T]]] = []
    todo = iter(enumerate(units))
    while len(found) < len(units):
        under_way = [*([first] if (first := next(todo, None)) is not None else []), *under_way]
        going: list[tuple[int, Generator[None, None, T]]] = []
        for k, unit in under_way:
            try:
                next(unit)
                going.append((k, unit))
            except StopIteration as end:
                found[k] = end.value
        under_way = going
    return [found[k] for k in range(len(units))]


@lru_cache(maxsize=4096)
def signs_of(unit: Unit) -> str:
    """Return the codec of a unit's signs. Its padding counts in no scale: no checkpoint has it."""
    ends = [0, *(x for leaf in unit.leaves for x in (leaf.offset, leaf.stop)), unit.size]
    gaps = tuple((a, b) for a, b in zip(ends[::2], ends[1::2], strict=True) if a < b)
    return name_of("sign", block_in(unit.size // unit.num_shards, BLOCK), unit.size, [], gaps)
