"""`zerofn::ravel`: leaves -> one flat buffer, cast and copied in one pass; and two marks.

`as_whole` and `as_shard` return their argument. Where a unit is stored whole, nothing is gathered or reduced; in the
captured graph they mark where a shard becomes a unit and where a unit becomes a shard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .registry import OnShard, Traits, define

ops = torch.ops.zerofn  # import it from here to have the operations below defined


def ravel(
    leaves: Sequence[Tensor | None], offsets: Sequence[int], size: int, dtype: torch.dtype, num_batch_dims: int = 0
) -> Tensor:
    """Leaves [*batch, *shape] -> [*batch, size]; None and whatever lies between leaves become zeros.

    Raises `ValueError` where all leaves are None.
    """
    given = _given(leaves)
    batch = given.shape[:num_batch_dims]
    flat = torch.empty((*batch, size), dtype=dtype, device=given.device)
    end = 0
    for leaf, offset in zip(leaves, offsets, strict=True):
        if leaf is None:
            continue
        numel = leaf.numel() // max(1, batch.numel())
        flat[..., end:offset].zero_()
        flat.narrow(-1, offset, numel).view(leaf.shape).copy_(leaf)
        end = offset + numel
    flat[..., end:].zero_()
    return flat


def _given(leaves: Sequence[Tensor | None]) -> Tensor:
    """A leaf that is there: it knows the device and the batch dims."""
    for leaf in leaves:
        if leaf is not None:
            return leaf
    raise ValueError("zerofn::ravel: all leaves are None, and nothing says on which device; make the zeros there.")


def _fake(leaves, offsets, size, dtype, num_batch_dims=0):
    given = _given(leaves)
    return given.new_empty((*given.shape[:num_batch_dims], size), dtype=dtype)


define(
    "ravel(Tensor?[] leaves, int[] offsets, int size, ScalarType dtype, int num_batch_dims=0) -> Tensor",
    ravel,
    _fake,
    traits=Traits(OnShard.REFUSED, bucket=True),
)

# The same memory, marked. Stage 0 has the first two instead of a gather and a cut; one rank has the third instead of a
# transfer that makes a value equal on all ranks. The fourth says that ranks have other slices, and the fifth that what
# they have differs by right, as a part of one whole. `axis`: over which axes of ranks the value is a shard, equal, a
# slice, or a part, now. `of`: which leaf or module the slice is of.
_MARKS = {
    "as_whole": Traits(OnShard.LEAVES),
    "as_shard": Traits(OnShard.MAKES),
    "as_equal": Traits(OnShard.LEAVES, replicated=True),
    "as_slice": Traits(OnShard.LEAVES, rank_dependent=True),
    "as_part": Traits(OnShard.LEAVES, replicated=True),
}
for _mark, _of_mark in _MARKS.items():
    define(
        f"{_mark}(Tensor(a) x, str axis='', str of='') -> Tensor(a)",
        lambda x, axis="", of="": x.view_as(x),
        lambda x, axis="", of="": x.view_as(x),
        traits=_of_mark,
    )
# What must hold of a value: `graph.between_ranks` and `graph.unsummed` have a sentence for each `what`.
define(
    "expect(Tensor(a) x, str axis, str what) -> Tensor(a)",
    lambda x, axis, what: x.view_as(x),
    lambda x, axis, what: x.view_as(x),
    traits=Traits(OnShard.LEAVES),
)
MARKS = (*(getattr(ops, _mark).default for _mark in _MARKS), ops.expect.default)


def fill_(
    flat: Tensor, leaves: Sequence[Tensor | None], offsets: Sequence[int], numels: Sequence[int], there: Sequence[bool]
) -> None:
    """Complete a bucket [size], some of whose leaves were written in place (`there`): copy the others, None as zeros,
    and zero the gaps between leaves.
    """
    end = 0
    for leaf, offset, numel, done in zip(leaves, offsets, numels, there, strict=True):
        if leaf is None and not done:
            continue
        flat[end:offset].zero_()
        if leaf is not None:
            flat.narrow(0, offset, numel).view(leaf.shape).copy_(leaf)
        end = offset + numel
    flat[end:].zero_()


define(
    "flat(int size, *, ScalarType dtype, Device device) -> Tensor",
    lambda size, *, dtype, device: torch.empty(size, dtype=dtype, device=device),
    lambda size, *, dtype, device: torch.empty(size, dtype=dtype, device=device),
    traits=Traits(OnShard.REFUSED, bucket=True),
)
define(
    "part(Tensor(a) flat, int offset, int[] shape) -> Tensor(a)",
    lambda flat, offset, shape: flat.narrow(0, offset, math.prod(shape)).view(shape),
    lambda flat, offset, shape: flat.narrow(0, offset, math.prod(shape)).view(shape),
    traits=Traits(OnShard.REFUSED, passes_on=True),
)
define(
    "fill_(Tensor(a!) flat, Tensor?[] leaves, int[] offsets, int[] numels, bool[] there) -> ()",
    fill_,
    lambda *args: None,
    traits=Traits(OnShard.REFUSED, fills_bucket=True),
)
