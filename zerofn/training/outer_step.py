"""What replicas that train apart send one another, and the step that follows: the outer one of DiLoCo."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..collectives.maps import begins_at, ops
from ..comm.mesh import Axis
from ..comm.transport import wait_
from ..comm.wire import row_bytes
from ..dry_run.fake_machine import fake_machine
from ..geometry.layout import restrict
from ..job.agreement import agree
from ..job.in_flight import pending
from ..job.step_order import meetings
from ..offload.policy import Offload
from ..optim.base import GradientTransformation, step
from ..sharding.sharded import Sharded
from ..sharding.spec import Spec
from ..sharding.storage import Stored
from ..sharding.wire import Wire
from ..util.by_identity import ByIdentity

Fragment = tuple[int, ...]  # the numbers of its units


def check_alike(text: str) -> None:
    """Raise `RuntimeError` on every rank unless all ranks say the same of how they train apart."""
    if fake_machine() is None:
        agree("diloco", text)


def fragments_of(params: Sharded, num: int) -> list[Fragment]:
    """Deal the units that are trained out to `num` fragments, in turn: neighbours are sent in different steps."""
    learns = [k for k, unit in enumerate(params.layout.units) if unit.trainable]
    return [tuple(learns[f::num]) for f in range(num)]


def anchor_of(params: Sharded) -> Sharded:
    """Return a copy of parameters: masters, stored plainly beside the model, and no gathered copy."""
    partition = replace(params.spec.partition.beside(), copy_over=(), late=False, tier=Offload())
    return Sharded(Spec(params.layout, partition), masters_of(params))


def masters_of(params: Sharded) -> list[Tensor]:
    """Return copies of the masters' shards, stored plainly beside the model."""
    if fake_machine() is not None:  # whose drives cannot be read
        return [torch.empty(x.size, dtype=x.dtype, device=x.device) for x in params.stored]
    return [x.loaded().decode().to(x.device, copy=True) for x in params.stored]


def part(x: Sharded, fragment: Fragment) -> Sharded:
    """Return the units of a fragment, in the same memory, without gathered copies."""
    for gathered in x.copies or ():  # what fills it is sent from these shards
        wait_(gathered)
    return Sharded(_part(ByIdentity(x.spec), fragment), [x.stored[k] for k in fragment])


@functools.lru_cache(maxsize=1024)
def _part(spec: ByIdentity, fragment: Fragment) -> Spec:
    units = [spec.value.layout.units[k] for k in fragment]
    kept = {leaf.index for unit in units for leaf in unit.leaves}
    return replace(spec.value, layout=restrict(spec.value.layout, lambda _, leaf: leaf.index in kept))


def with_part(spec: Spec, shards: Iterable[Stored], fragment: Fragment, fresh: Sharded) -> Sharded:
    """Return shards of all units, with those of a fragment replaced."""
    out = list(shards)
    for k, x in zip(fragment, fresh.stored, strict=True):
        out[k] = x
    return Sharded(spec, out)


class Differences(Sharded):
    """A fragment of what a replica's parameters lack of those that all began with. `under_way`: what is sent of it, a
    cache beside the tree: what is saved and loaded is sent again.
    """

    __slots__ = ("under_way",)

    def __init__(self, spec: Spec, shards: Iterable[Tensor | Stored], under_way: Mean | None = None) -> None:
        super().__init__(spec, shards)
        self.under_way = under_way

    def __deepcopy__(self, memo: dict[int, Any]) -> Differences:
        """Return a copy that uses the same transfer: a step may continue with either, or with both in turn."""
        if self.under_way is not None:
            self.under_way.shared = True
        return Differences(self.spec, copy.deepcopy(self.stored, memo), self.under_way)


tree.register_node(Differences, lambda x: (x.shards, x.spec), lambda spec, shards: Sharded(spec, shards))


class Mean:
    """The mean over replicas of a fragment's differences, under way: a reduce-scatter and an all-gather along `axis`,
    in the form that `wire` says. Sums are in rank order. All ranks of the axis must go on at the same step. `shared`:
    whether several states use it.
    """

    def __init__(self, differences: Sharded, axis: Axis, wire: Wire | None) -> None:
        self._spec, self._axis, self._wire = differences.spec, axis, wire
        self._generation = pending().generation
        self._parts = self._started("reduce", differences.shards)
        self._gathered, self._means, self.shared = False, list[Tensor](), False

    @property
    def lost(self) -> bool:
        """Whether a step that failed has dropped the transfers."""
        return self._generation != pending().generation

    def go_on(self) -> None:
        """Wait for the sums, and start to gather their means."""
        if not self._gathered:
            self._parts = self._started("gather", [x.div(self._axis.size) for x in self._waited()])
            self._gathered = True

    def finished(self) -> list[Tensor]:
        """Wait for the means: the shards of each unit, which the caller may write to."""
        if not self._means:
            self.go_on()
            self._means = self._waited()
        return [x.clone() for x in self._means] if self.shared else self._means

    def _waited(self) -> list[Tensor]:
        meetings().take_up(self._meetings)
        return [ops.wait(x) for x in self._parts]

    def _started(self, what: str, shards: Iterable[Tensor]) -> list[Tensor]:
        # A replica that is late is waited for where its values are used, and not by what is sent meanwhile.
        with meetings().put_off() as self._meetings:
            return [self._start(what, k, x) for k, x in enumerate(shards)]

    def _start(self, what: str, k: int, x: Tensor) -> Tensor:
        axis, unit = self._axis, self._spec.layout.units[k]
        if axis.size == 1:
            return x.clone()
        codec, start = codec_of(self._wire, self._spec, k, x.dtype, what, axis), self._spec.bounds(unit)[0]
        send = ops.reduce_scatter if what == "reduce" else ops.all_gather
        return send(x, axis.size, axis.group, unit.name, codec, **begins_at(codec, start))


def codec_of(wire: Wire | None, spec: Spec, k: int, dtype: torch.dtype, what: str, axis: Axis) -> str:
    """Return the codec by which the k-th unit's differences are sent; "" for none. `what`: "reduce" or "gather"."""
    if wire is None:
        return ""
    unit = spec.layout.units[k]
    start, stop = spec.bounds(unit)
    return wire.codec(unit, dtype, what, (stop - start) // axis.size)


def bytes_sent(params: Sharded, axis: Axis, wire: Wire | None) -> int:
    """Return the bytes that a rank sends to other replicas in a round, in which it sends each unit once."""
    total, spec = 0, params.spec
    for k, (unit, x) in enumerate(zip(spec.layout.units, params.storages, strict=True)):
        start, stop = spec.bounds(unit)
        for what in ("reduce", "gather") if unit.trainable else ():
            codec, elements = codec_of(wire, spec, k, x.dtype, what, axis), (stop - start) // axis.size
            total += row_bytes(elements, x.dtype.itemsize, codec, axis.size, start) * (axis.size - 1)
    return total


class Meeting(NamedTuple):
    """What an outer step takes and returns of a fragment, all of it on the ranks of one replica. `anchor`: parameters
    that all replicas have; `own`: this one's. `mean`: over replicas, of anchor - own, as it was sent.
    """

    anchor: Sharded
    opt_state: Any
    own: Sharded
    mean: Sharded


def outer_step_of(outer: GradientTransformation, mix: float) -> Callable[[Meeting, None], tuple[Meeting, None]]:
    """Return the outer step: the anchor takes a step, with the mean as its gradient. A replica continues from `mix` of
    its own parameters and 1 - mix of the anchor.
    """

    def outer_step(state: Meeting, batch: None) -> tuple[Meeting, None]:
        anchor, opt_state = step(outer, state.mean, state.opt_state, state.anchor)
        own = tree.tree_map(
            lambda mine, x: mine * mix + x.to(mine.dtype) * (1.0 - mix) if mix else x.to(mine.dtype, copy=True),
            state.own,
            anchor,
        )
        return Meeting(anchor, opt_state, own, state.mean), None

    return outer_step


def meeting_of(
    anchor: Sharded, opt_state: Any, own: Sharded, means: Sequence[Tensor], within: Callable[[Sharded], Sharded]
) -> Meeting:
    """Return what an outer step takes. `within`: makes a `Sharded` of the whole mesh one of this replica."""
    here = tree.tree_map(
        lambda x: within(x) if isinstance(x, Sharded) else x, opt_state, is_leaf=lambda x: isinstance(x, Sharded)
    )
    mine = within(anchor)
    return Meeting(mine, here, own, Sharded(mine.spec, means))
