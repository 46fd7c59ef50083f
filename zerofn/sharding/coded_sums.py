"""Sums over ranks of one bit an element, with error feedback on both sides.

Each rank sends the signs of what it has, and a mean magnitude for each block; what these leave out it adds to what it
sends next. The owner of a shard adds what has come, and what its own signs have left out before; their signs are the
result, which any rank has whole by gathering them (Tang et al. 2021, arXiv:2102.02888, Algorithm 1; its server is the
owner of a shard here).

A result is plus or minus the scale of its block, and encodes to itself again. So ranks that keep shards of it gather it
as signs, too, and have the bits of those that keep it whole.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..collectives.maps import AllGather, ReduceScatter, ops
from ..comm.axes import AxisKind
from ..comm.block_wire import name_of
from ..geometry.layout import Unit
from ..ops import leaf_axes as _ops  # noqa: F401  (defines zerofn::take_shard)
from .spec import Spec
from .wire import block_in

BLOCK = 2048  # elements with one scale: a shard is a multiple


class CodedSum(NamedTuple):
    """What comes of a sum. `value`: the result, stored as a tree of parameters is. `worker` [unit size]: what this
    rank's codes have left out. `server` [shard]: what the codes of its shard have left out.
    """

    value: Tensor
    worker: Tensor
    server: Tensor


def check_ranks(spec: Spec, what: str) -> None:
    """Raise `NotImplementedError` for a mesh over which such sums are not known. `what`: who asks."""
    mesh = spec.mesh
    odd = [axis.name for axis in mesh.axes if axis.size > 1 and _is_odd(axis.kind)]
    if odd:
        raise NotImplementedError(
            f"{what}: sums of signs go over ranks along 'data' and 'context', and the mesh has {odd[0]!r}, too; write "
            "zerofn.Mesh.make(data=-1), or another optimizer."
        )


def _is_odd(kind: AxisKind) -> bool:
    return kind.replicas or kind.experts or kind.stages


def coded_sum(
    spec: Spec,
    unit: Unit,
    before: Tensor,
    worker: Tensor,
    server: Tensor,
    decay: float,
    mix: Callable[[Tensor], Tensor],
) -> CodedSum:
    """Return the next result of a unit: the sum over ranks of `mix(decay / ranks * before)` and of what was left out.

    `before`: the last result, as it is stored. `mix`: adds what this rank contributes to its part [unit size] of the
    decayed result. Numbers are float32.
    """
    axis, codec, own = spec.within(unit), signs_of(unit), spec.own_cut(unit)
    whole, lost = _whole(spec, unit, before, codec)
    sent = mix(whole * (decay / axis.size)) + worker
    arrived = ops.rounded(sent, codec)
    (total,) = ReduceScatter(axis, unit.name, codec=codec)(sent)
    total = total + (server + lost * decay)
    value = ops.rounded(total, codec, own[0])
    left = CodedSum(value, sent - arrived, total - value)
    if spec.num_shards(unit) > 1:
        return left
    return left._replace(value=ops.as_shard(AllGather(axis, unit.name, codec=codec)(value)[0]))


def _whole(spec: Spec, unit: Unit, before: Tensor, codec: str) -> tuple[Tensor, Tensor]:
    """Return (the last result on all ranks, what its signs lack of it [shard]): zeros, but behind the first steps, in
    which it was no sum of signs yet, and on other ranks than those that it was saved by.
    """
    axis, own = spec.within(unit), spec.own_cut(unit)
    if spec.num_shards(unit) > 1:
        return AllGather(axis, unit.name, codec=codec)(before)[0], before - ops.rounded(before, codec, own[0])
    exact = ops.as_whole(before)
    whole = ops.rounded(exact, codec)
    return whole, ops.take_shard([exact - whole], [0], *own, torch.float32)


@lru_cache(maxsize=4096)
def signs_of(unit: Unit) -> str:
    """Return the codec of a unit's signs; its padding counts in no scale."""
    stop = max((leaf.stop for leaf in unit.leaves), default=0)
    return name_of("sign", block_in(unit.size // unit.num_shards, BLOCK), unit.size, [], stop)
