"""Gradients as flat tensors, one of each unit and of each plain leaf, and their sums over ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from .. import tree
from ..collectives.over_ranks import sum_over
from ..comm.mesh import Axis
from ..geometry.layout import Unit
from ..graph.nested import NO_PARTS, Parts
from ..sharding.gather_scatter import own_gradient, ravel
from ..sharding.rank_entries import of_ranks
from ..sharding.sharded import Sharded, is_sharded
from ..sharding.spec import Spec
from ..sharding.storage import Stored
from ..sharding.transfers import Drawn, fed_back, own_sum, stored_sum

When = Literal["step", "round", "microbatch"]
STEP, ROUND, MICROBATCH = WHEN = get_args(When)  # when gradients are added over ranks


@dataclass(frozen=True)
class GradientSums:
    """Sums over ranks of the gradients of `nodes`, which are `Sharded` or plain. `learns`: for each node, whether each
    of its leaves gets a gradient. `axis`: the ranks with different parts of the batch; None if there are no others.
    `apart`: gradients of units are not added over ranks; whoever takes them does that. `errors`: what codes have left
    out before, which is added to what is sent; None without feedback.
    """

    nodes: Sequence[Any]
    learns: Sequence[Sequence[bool]]
    axis: Axis | None
    apart: bool = False
    errors: Any = None

    @property
    def count(self) -> int:
        """How many gradients there are."""
        return len(list(self._units()))

    def when(self, how: str | None, n: int, stages: int) -> tuple[bool, Parts]:
        """Return whether gradients of several of `n` microbatches accumulate before they are added over ranks, and of
        how many if not of all. `how`: one of `WHEN`, or None for the default; `stages`: ranks along `pipe`.
        """
        late = self.apart or self.errors is not None or all(x.spec.partition.late for x in self.nodes if is_sharded(x))
        how = how or (STEP if late else MICROBATCH)
        if self.apart and how != STEP:
            raise ValueError(
                f"accumulate: reduce={how!r} sums gradients over ranks during the step, but this optimizer sums them "
                "itself, once a step. Write reduce='step', or leave reduce out."
            )
        if self.errors is not None and how != STEP:
            raise ValueError(
                f"accumulate: reduce={how!r} sends gradients several times in a step, but feedback=True adds the "
                "rounding error of the last step only once. Write reduce='step', or leave reduce out."
            )
        if how != ROUND or stages == 1:
            return how == STEP, NO_PARTS
        return True, Parts(self.count, stages) if stages < n else NO_PARTS

    @property
    def draw(self) -> bool:
        """Whether ranks draw the codes of gradients that they send."""
        return not self.apart and any(is_sharded(x) and x.spec.precision.draws for x in self.nodes)

    def check(self, rng: Tensor | None) -> None:
        """Raise `ValueError` if there is no key to draw with, or nothing that was left out before."""
        feeds_back = any(is_sharded(x) and x.spec.precision.feeds_back for x in self.nodes)
        if feeds_back and not self.apart and self.errors is None:
            raise ValueError(
                "value_and_grad: the parameters were sharded with feedback=True, which stores rounding errors in the "
                "TrainState. Write state.value_and_grad(loss_fn) and state.apply_gradients(grads) instead."
            )
        if self.draw and rng is None:
            raise ValueError(
                "value_and_grad: the parameters were sharded with rounding='stochastic', which needs a random key, but "
                "rng is None. Write state.value_and_grad(loss_fn), which uses the key of the step, or pass "
                "rng=zerofn.random.fold_in(zerofn.random.key(0), step)."
            )

    def own(self, flats: Iterable[Tensor], key: Tensor | None) -> list[Tensor]:
        """Add gradients over ranks. Return the part of each unit's sum that this rank adds, and of plain leaves, whose
        copies must stay equal on all ranks, the whole sum. With several microbatches, these are added up. `key`: for
        codes that are drawn.
        """
        out = []
        for k, (unit, x) in enumerate(zip(self._units(), flats, strict=True)):
            if unit and self.apart:
                out.append(x)
            elif unit:
                out.append(own_sum(*unit, x, Drawn(key, k) if key is not None else None))
            else:
                out.append(x if self.axis is None else sum_over(x, self.axis))
        return out

    def added(self, flats: Sequence[Tensor], key_of: Callable[[int], Tensor | None]) -> list[Tensor]:
        """Return the sums of what `own` returns for several gradients of each unit. `flats`: all those of the first
        part of a step, then all of the next one. `key_of`: the number of a part -> its key.
        """
        ends = range(0, len(flats), self.count or 1)
        each = [self.own(flats[k : k + self.count], key_of(part)) for part, k in enumerate(ends)]
        return [functools.reduce(torch.add, parts) for parts in zip(*each, strict=True)]

    def fed_back(self, flats: Sequence[Tensor], by: Tensor | None) -> tuple[list[Tensor], Any]:
        """Return what `own` does, of gradients with what was left out of the last ones; and a tree of what is left out
        of these. `by`: what sums are divided by later, None for 1.
        """
        nodes, treedef = tree.flatten(self.errors, is_leaf=is_sharded)
        before = iter([shard for x in nodes if is_sharded(x) for shard in x.shards])
        out, left = [], []
        for unit, x in zip(self._units(), flats, strict=True):
            if unit:
                part, error = fed_back(*unit, x, next(before), by=by)
                out.append(part)
                left.append(error)
            else:
                out.append(x if self.axis is None else sum_over(x, self.axis))
        fresh = iter(left)
        made = [Sharded(x.spec, [next(fresh) for _ in x.layout.units]) if is_sharded(x) else x for x in nodes]
        return out, tree.unflatten(treedef, made)

    def stored(self, parts: Iterable[Tensor]) -> list[Tensor]:
        """Return what this rank stores of each gradient, of what each rank has added."""
        pairs = zip(self._units(), parts, strict=True)
        return [stored_sum(*unit, x) if unit and not self.apart else x for unit, x in pairs]

    def tree_of(self, node: Any, sums: Iterator[Tensor]) -> Sharded:
        """Return what this rank stores of the gradients of a `Sharded`; of units that are frozen, zeros."""
        spec = of_ranks(node.spec) if self.apart else node.spec
        sizes = [stop - start for start, stop in map(spec.bounds, spec.layout.units)]
        units = zip(spec.layout.units, node.stored, sizes, strict=True)
        return Sharded(spec, [next(sums) if u.trainable else no_gradient(p, size) for u, p, size in units])

    def _units(self) -> Iterator[tuple[Spec, Unit] | None]:
        """Yield of which unit each gradient is; None for a plain leaf."""
        for x, learns in zip(self.nodes, self.learns, strict=True):
            if is_sharded(x):
                yield from ((x.spec, unit) for unit in x.layout.units if unit.trainable)
            elif learns[0]:
                yield None


def no_gradient(like: Tensor | Stored, size: int | None = None) -> Tensor:
    """Return zeros that share one element of memory, for frozen parameters and integers."""
    shape = (size,) if size is not None else cast(Tensor, like).shape
    return torch.zeros((), dtype=like.dtype, device=like.device).expand(shape)


def flat_gradients(
    nodes: list[Any], leaves: list[list[Tensor]], found: dict[int, Tensor | None], factor: Tensor | None
) -> list[Tensor]:
    """Return a flat gradient of each trainable unit, and one of each trained plain leaf. `leaves`: by node, what was
    differentiated. `found`: id of a leaf -> its gradient. `factor`: what all are multiplied by.
    """
    flats: list[Tensor] = []
    for x, ts in zip(nodes, leaves, strict=True):
        if is_sharded(x):
            for unit, shard in zip(x.layout.units, x.stored, strict=True):
                if unit.trainable:
                    mine = [own_gradient(found[id(ts[leaf.index])], leaf, x.spec.mesh) for leaf in unit.leaves]
                    dtype = x.spec.precision.reduces(shard.dtype)
                    flats.append(
                        ravel(mine, unit, dtype)
                        if any(g is not None for g in mine)
                        else torch.zeros(unit.size, dtype=dtype, device=ts[0].device)
                    )
        elif ts[0].requires_grad:
            g = found[id(ts[0])]
            flats.append(torch.zeros_like(x) if g is None else g)
    return flats if factor is None else [g * factor.to(g.dtype) for g in flats]
