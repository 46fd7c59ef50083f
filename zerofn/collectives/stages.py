"""Leaves that lie on one stage of a pipeline: a broadcast before their use, and back.

Without a cut of the step into stages, every rank along `pipe` computes all of it, and a leaf comes from the rank that
holds it. So the step is right as it is written, and what a pipeline makes of it has something to be compared with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..comm.mesh import Axis
from ..comm.transport import broadcast_start
from ..ops.registry import Lane, Moves, OnShard, Traits, define

ops = torch.ops.zerofn


@dataclass(frozen=True)
class _LeafOnStages:
    """`holders`: the ranks along `axis` that hold a leaf. `dim`, `size`: the dim that is 0 elsewhere. `leaf`: its
    name.
    """

    axis: Axis
    holders: tuple[int, ...]
    dim: int
    size: int
    leaf: str


class OnStage(_LeafOnStages):
    """A leaf where it lies, and one without elements elsewhere -> the leaf, on all ranks of a pipeline: that of the
    first of `holders`. Transpose: `ToStage`. Ranks along `axis` compute the same of the same rows: nothing is summed.
    """

    @property
    def transpose(self) -> ToStage:
        """The gradient, for the ranks that hold the leaf."""
        return ToStage(**vars(self))

    def __call__(self, x: Tensor) -> tuple[Tensor]:
        """The broadcast."""
        shape = list(x.shape)
        shape[self.dim] = self.size  # counts from the last dim: before it may lie those of a batch
        place = (list(self.holders), self.axis.rank, self.axis.size, self.axis.group, self.leaf)
        return (ops.wait(ops.on_stage(x.contiguous(), shape, *place)),)


class ToStage(_LeafOnStages):
    """The transpose of `OnStage`: a leaf's gradient, the same on all ranks, for those that hold the leaf."""

    @property
    def transpose(self) -> OnStage:
        """The broadcast."""
        return OnStage(**vars(self))

    def __call__(self, x: Tensor) -> tuple[Tensor]:
        """A view of it, or nothing."""
        return (ops.to_stage(x, self.dim, self.axis.rank in self.holders, self.axis.name, self.leaf),)


def _on_stage(
    x: Tensor, shape: Sequence[int], holders: Sequence[int], rank: int, size: int, group: str, leaf: str
) -> Tensor:
    out = x.new_empty(list(shape))
    if rank in holders:
        out.copy_(x)
    others = [r for r in range(size) if r not in holders]
    return broadcast_start(out, holders[0], others, group, leaf)


def _nbytes(given: Mapping[str, Any], out: Tensor) -> int:
    others = given["size"] - len(given["holders"])
    return out.nbytes * others if given["rank"] == given["holders"][0] else 0


def _to_stage(x: Tensor, dim: int, here: bool, axis: str, leaf: str) -> Tensor:
    return x.view_as(x) if here else x.narrow(dim, 0, 0)


define(
    "on_stage(Tensor x, int[] shape, int[] holders, int rank, int size, str group, str leaf) -> Tensor",
    _on_stage,
    lambda x, shape, holders, rank, size, group, leaf: x.new_empty(list(shape)),
    traits=Traits(OnShard.LEAVES, Moves(Lane.LINK, _nbytes), "broadcast", replicated=True),
)
define(
    "to_stage(Tensor(a) x, int dim, bool here, str axis, str leaf) -> Tensor(a)",
    _to_stage,
    _to_stage,
    traits=Traits(OnShard.LEAVES),
)
