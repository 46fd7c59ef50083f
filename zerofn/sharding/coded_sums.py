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

from torch import Tensor

from ..collectives.maps import ops
from ..comm.axes import AxisKind
from ..geometry.layout import Unit
from ..ops import sign_sums as _sign_sums  # noqa: F401  (defines zerofn::sign_send and its like)
from .spec import Spec
from .wire import block_in

T = TypeVar("T")
BLOCK = 2048  # elements with one scale: a shard is a multiple


class CodedSum(NamedTuple):
    """What comes of a sum. `rows`: the result as rows of signs, of `row` elements each, stored as a tree of parameters
    is; `block`, `gaps`: see `ops.sign_rows.Signs`. `worker` [unit size]: what this rank's codes have left out. `server`
    [shard]: what the codes of its shard have left out.
    """

    rows: Tensor
    worker: Tensor
    server: Tensor
    row: int
    block: int
    gaps: tuple[int, ...]

    def values(self, num: int) -> Tensor:
        """Return the result, float32 [num]."""
        return ops.sign_values(self.rows, num // self.row, self.row, self.block, self.gaps)


def check_ranks(spec: Spec, what: str) -> None:
    """Raise `NotImplementedError` for a mesh over which such sums are not known. `what`: how the sentence begins."""
    mesh = spec.mesh
    odd = [axis.name for axis in mesh.axes if axis.size > 1 and _is_odd(axis.kind)]
    if odd:
        raise NotImplementedError(
            f"{what} sums work only along the axes 'data' and 'context', but the mesh also has {odd[0]!r}. Write "
            "mesh=zerofn.Mesh.make(data=-1), or tx=optim.adamw(...)."
        )


def _is_odd(kind: AxisKind) -> bool:
    return kind.replicas or kind.experts or kind.stages


def coded_sum(
    spec: Spec,
    unit: Unit,
    before: Tensor,
    *,
    worker: Tensor,
    server: Tensor,
    decay: float,
    added: Tensor,
    by: float,
    finite: Tensor | None,
) -> Generator[None, None, CodedSum]:
    """Return the next result of a unit: the sum over ranks of `decay / ranks * before + by * added` and of what was
    left out.

    `before`: the last result, as it is stored. `added` [unit size]: what this rank contributes. The other numbers are
    float32. `finite`: None or the finite check, a bool scalar; where it is False, what was left out stays, and there is
    no result. It pauses where a transfer is on its way; see `staggered`.
    """
    axis, own, cut = spec.within(unit), spec.own_cut(unit), spec.num_shards(unit) > 1
    to, block, gaps = (axis.size, axis.group, unit.name), block_of(unit), gaps_of(unit, 0, unit.size)
    row, own_gaps = own[1] - own[0], gaps_of(unit, *own)
    if cut:
        under_way = ops.all_gather(ops.sign_codes(before, block, own_gaps), *to)
        yield
        last = ops.wait(under_way)
    else:
        last = ops.as_whole(before)
    worker, sent = ops.sign_send(worker, added, last, finite, by, decay / axis.size, axis.size, block, gaps)
    under_way = ops.exchange(sent, axis.size, axis.group)
    yield
    came = ops.as_shard(ops.wait(under_way), axis.name)
    # What signs lack of the last result is zero, but behind the first step, and on other ranks than have saved it.
    server, rows = ops.sign_sum(server, came, before, finite, decay, 0 if cut else own[0], block, own_gaps)
    if cut:
        return CodedSum(rows, worker, server, row, block, own_gaps)
    under_way = ops.all_gather(rows, *to)
    yield
    return CodedSum(ops.as_shard(ops.wait(under_way)), worker, server, row, block, gaps)


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


def block_of(unit: Unit) -> int:
    """Return how many elements of a unit have one scale."""
    return block_in(unit.size // unit.num_shards, BLOCK)


@lru_cache(maxsize=4096)
def gaps_of(unit: Unit, start: int, stop: int) -> tuple[int, ...]:
    """Return the ends of what is padding among elements [start, stop) of a unit, counted from `start`. It counts in no
    scale: no checkpoint has it.
    """
    ends = [0, *(x for leaf in unit.leaves for x in (leaf.offset, leaf.stop)), unit.size]
    pairs = ((max(a, start), min(b, stop)) for a, b in zip(ends[::2], ends[1::2], strict=True))
    return tuple(x - start for a, b in pairs if a < b for x in (a, b))
