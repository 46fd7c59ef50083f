"""Values that must be equal on all ranks: a digest to compare, and the comparison, which raises where they differ."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from . import cpu
from .registry import OnShard, Traits, define

WORDS = 2  # of a digest: the checksum of the bits, and the number of elements
_CHUNK = 1 << 20  # words at a time, so that a checksum takes little memory
_STEP = -7046029254386353132  # even, near 2**64 over the golden ratio: the factors 1 + k * _STEP are odd and differ


class RanksDiffer(RuntimeError):
    """A value that must be equal on all ranks differs. Every rank raises this, before the first write."""


def digest(x: Tensor) -> Tensor:
    """Return [2] int64: a checksum of the bits of `x`, and its number of elements.

    Of one element the checksum is its bits. Otherwise it is a sum of 64-bit words, each times an odd number that
    depends on its place, so that exchanged elements are seen.
    """
    flat = x.detach().reshape(-1).contiguous().as_strided((x.numel(),), (1,))  # one element may have any stride
    octets = flat.view(torch.uint8)
    words = torch.nn.functional.pad(octets, (0, -len(octets) % 8)).view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for k, part in enumerate(words.split(_CHUNK)):
        place = torch.arange(k * _CHUNK, k * _CHUNK + len(part), dtype=torch.int64, device=x.device)
        total += part.mul(place * _STEP + 1).sum()
    return torch.stack([total, torch.full_like(total, x.numel())])


def checksum(x: Tensor) -> str:
    """Return 16 hexadecimal digits that depend on every bit of `x` and where it stands, at the speed of memory.

    The same on every machine, for values on devices of one type.
    """
    flat = x.detach().resolve_conj().resolve_neg().contiguous()
    found = cpu.checksum(flat) if flat.device.type == "cpu" else int(digest(flat)[0])
    return f"{found % 2**64:016x}"


def check_same(x: Tensor, rows: Tensor, what: str, axis: str) -> Tensor:
    """Return `x`, whose digests on all ranks of `axis` are `rows` [ranks * 2].

    Raises `RanksDiffer` unless all are equal.
    """
    each = rows.view(-1, WORDS).tolist()
    other = next((r for r, row in enumerate(each) if row != each[0]), None)
    if other is not None:
        shown = [next(_told(row, x.dtype)) for row in (each[0], each[other])]
        raise RanksDiffer(
            f"{what} must be the same on all ranks, but differs: rank 0 has {shown[0]}, rank {other} has "
            f"{shown[1]}. Give every rank the same value; or reduce it first: zerofn.collectives.all_reduce(x) is the "
            "sum over ranks. The state is as it was."
        )
    return x.view_as(x)


def _told(row: list[int], dtype: torch.dtype) -> Iterator[str]:
    """Yield a digest in words: the value, if it is one number."""
    bits, numel = row
    if numel == 1 and dtype.itemsize <= 8:
        yield str(torch.tensor([bits]).view(torch.uint8)[: dtype.itemsize].view(dtype).item())
    yield f"{numel} elements with the checksum {bits % 2**64:016x}"


define(
    "digest(Tensor x) -> Tensor",
    digest,
    lambda x: x.new_empty(WORDS, dtype=torch.int64),
    traits=Traits(OnShard.REFUSED),
)
define(
    "check_same(Tensor(a) x, Tensor rows, str what, str axis) -> Tensor(a)",
    check_same,
    lambda x, rows, what, axis: x.view_as(x),
    traits=Traits(OnShard.KEEPS, replicated=True, checks=True),
)
# A check whose result nobody reads stays in a graph.
torch.fx.node.has_side_effect(torch.ops.zerofn.check_same.default)
