"""DiLoCo: replicas that train apart, and meet every `every` steps.

Each replica takes `every` steps of its own, the inner ones. Then the outer optimizer takes one step on the mean of what
replicas have changed, and all go on from its result: DiLoCo (Douillard et al. 2023, arXiv:2311.08105). Streaming
DiLoCo (Douillard et al. 2025, arXiv:2501.18512) sends the parameters in fragments, each at a step of its own, while the
next inner steps run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .. import optim, tree
from ..comm.axes import REPLICATE
from ..comm.mesh import Mesh
from ..optim.base import GradientTransformation
from ..random import fold_in
from ..sharding.replica_entries import Replicas
from ..sharding.shard_plan import moment_storage
from ..sharding.sharded import Sharded, is_sharded
from ..sharding.wire import Wire, WireWord, wire_of
from ..util.arguments import checked, told
from ..util.by_identity import ByIdentity
from ..util.sizes import counted
from .diloco_checks import check_arguments, check_form, check_outer
from .outer_step import (
    Differences,
    Fragment,
    Mean,
    Meeting,
    anchor_of,
    check_alike,
    fragments_of,
    masters_of,
    meeting_of,
    outer_step_of,
    part,
    with_part,
)
from .train_state import TrainState

Step = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class DilocoState:
    """The state of a step of `diloco`.

    `step`: inner steps so far, an int64 scalar on the host. `began`: the value of `step` when replicas began to train
    apart, an int64 scalar; -1 before. `params`: the outer optimizer's parameters, the same on all replicas: evaluate
    and export these. Until replicas train apart, they are a copy of the inner parameters.
    `opt_state`: the outer optimizer's state for each fragment. `replicas`: the inner state with an entry for each
    replica: a leaf [*shape] of it is [replicas, *shape] here, also for `unshard` and `save`. `sent`: for each
    fragment, the differences that replicas sent last; () with `tau=0`.
    """

    step: Tensor
    began: Tensor
    params: Sharded
    opt_state: tuple[Any, ...]
    replicas: Any
    sent: tuple[Sharded, ...]


tree.register_dataclass(DilocoState)


@checked("inner_step", "every", "after", "axis", "fragments", "tau")
def diloco(
    inner_step: Callable[[Any, Any], Any],
    outer: GradientTransformation | None = None,
    *,
    every: int,
    after: int = 0,
    axis: str = REPLICATE,
    fragments: int = 1,
    tau: int = 1,
    mix: float | None = None,
    wire: WireWord | Wire | None = None,
) -> Diloco:
    """Return a step in which the replicas of a mesh train alone, and combine their changes every `every` steps.

        step = zerofn.diloco(train_step, every=100)
        state = step.init(zerofn.shard(init_state, stage=3, mesh=zerofn.Mesh.make(replicate=2, data=-1)))
        step = zerofn.compile(step)
        state, metrics = step(state, batch)

    `inner_step`: `(state, batch) -> (state, metrics)`, as for `compile`. It runs on the ranks of one replica: loss,
    gradients and metrics are means over these ranks only, and nothing is sent along `axis`. `outer`: the outer
    optimizer. Its gradient is the mean over replicas of old minus new parameters, since the last outer step. None is
    `optim.sgd(0.7, momentum=0.9, nesterov=True)`. `every`: number of inner steps from one outer step to the next.
    `after`: the number of first steps that all replicas take together, bit for bit as without `diloco`. `axis`: the
    axis of replicas.

    `fragments`: the number of parts in which the parameters are sent. Units are assigned to fragments in turn. Fragment
    f of F is sent after each inner step s, counted from `after`, with s % every == (f + 1) * every // F % every. `tau`:
    its outer step follows this many inner steps later. The reduce-scatter of differences is hidden behind the first
    half of these steps, the all-gather of means behind the second half. With `tau=1`, half of the transfer is hidden;
    with a larger `tau`, all of it. `tau=0` is plain DiLoCo: replicas wait for the transfer. `mix`: after an outer step
    a replica continues with `mix` times its own parameters plus `1 - mix` times the outer optimizer's; None is 0.5, and
    0 with `tau=0`. `wire`: the codec of differences and of their means: "bf16", "int8", "fp8", or a `zerofn.Wire`,
    whose `reduce` is for differences and `gather` for means, rounded to nearest. All replicas decode the same means.

    The step's first argument is the result of its method `init`, see `DilocoState`. Every rank must call the step.
    Other replicas wait for a slow replica when they need its differences; a replica that fails ends the job. Any number
    of replicas can load the last checkpoint: if n replicas saved it, replica r continues with the saved replica r % n.

    Raises `ValueError` for numbers out of range and for an argument without effect, `TypeError` if `outer` is not a
    gradient transformation.

    >>> diloco(lambda state, batch: (state, None), every=100, tau=0)
    diloco(every=100, axis='replicate', fragments=1, tau=0)
    """
    check_arguments(outer, every, after, fragments, tau, mix)
    outer = optim.sgd(0.7, momentum=0.9, nesterov=True) if outer is None else outer
    share = float(mix) if mix is not None else 0.5 if tau else 0.0
    form = wire_of(wire)
    check_form(form)
    return Diloco(inner_step, outer, every, after, axis, fragments, tau, share, form)


@dataclass(frozen=True, repr=False)
class Diloco:
    """The step that `diloco` returns. `run_outer`: runs the outer step of a fragment; None for one that is not
    captured.
    """

    inner_step: Step
    outer: GradientTransformation
    every: int
    after: int
    axis: str
    fragments: int
    tau: int
    mix: float
    wire: Wire | None
    run_outer: Step | None = None

    def __repr__(self) -> str:
        shown = f"every={self.every}, axis={self.axis!r}, fragments={self.fragments}, tau={self.tau}"
        more = {"after": self.after, "mix": self.mix, "wire": self.wire}
        return f"diloco({shown}{''.join(f', {name}={x!r}' for name, x in more.items() if x)})"

    @property
    def __name__(self) -> str:
        return getattr(self.inner_step, "__name__", "step")

    @property
    def outer_step(self) -> Step:
        """The outer step of one fragment, a function to capture."""
        return outer_step_of(self.outer, self.mix)

    def replicas(self, mesh: Mesh) -> Replicas:
        """Return the replicas of a mesh, for one mesh always the same object. Raises `ValueError` if it has none."""
        names = [axis.name for axis in mesh.axes]
        if self.axis not in names or not mesh.axis(self.axis).kind.replicas:
            raise ValueError(
                f"diloco: axis={self.axis!r} must be the mesh axis along which the replicas lie, but the state's mesh "
                f"has the axes {names}. Write zerofn.shard(..., mesh=zerofn.Mesh.make(replicate=2, data=-1))."
            )
        return _replicas(ByIdentity(mesh), self.axis)

    def init(self, state: Any) -> DilocoState:
        """Return the state of a run that begins: each replica has `state`, whose memory it takes over. All ranks must
        call it, on steps that were made with the same arguments; otherwise all raise `RuntimeError`.

        `state`: from `zerofn.shard`, on a mesh with the axis of replicas. Raises `ValueError` for a mesh without
        that axis, for hpZ, and for fewer units than fragments; `TypeError` for a state whose `params` are not sharded.
        """
        params = self._checked(state)
        replicas = self.replicas(params.spec.mesh)
        check_alike(f"{self!r} with outer={self.outer!r}")
        with torch.no_grad():
            anchor = anchor_of(params)
            fragments = fragments_of(params, self.fragments)
            parts = [part(anchor, x) for x in fragments]
            outer = tuple(self.outer.init(x) for x in parts)
            sent = [replicas.entries(x) for x in parts if self.tau]
        if any(moment_storage(x) for x in outer):
            raise ValueError(
                f"diloco: the outer optimizer {self.outer!r} stores its moments in 8-bit blocks, which only an inner "
                "optimizer may do. Leave moments out."
            )
        zeros = tuple(Differences(x.spec, [torch.zeros_like(y) for y in x.shards]) for x in sent)
        step = torch.zeros((), dtype=torch.int64)
        return DilocoState(step, torch.full_like(step, -1), anchor, outer, replicas.entries(state), zeros)

    def __call__(self, state: DilocoState, batch: Any) -> tuple[DilocoState, Any]:
        """Take an inner step, and the outer ones that are due."""
        self.check(state)
        replicas = self.replicas(state.params.spec.mesh)
        together = self.trains_together(state)
        if not together and state.began < 0:
            state = self._apart(state, replicas)
        found = self.inner_step((replicas.together if together else replicas.own)(state.replicas), batch)
        if not isinstance(found, tuple) or len(found) != 2:
            raise TypeError(f"diloco: inner_step must return (state, metrics), got {told(found)}.")
        with torch.no_grad():
            end = _Meetings(self, replicas, state, found[0])
            return end.followed() if together else end.state(), found[1]

    def trains_together(self, state: DilocoState) -> bool:
        """Return whether all ranks train together in the next step."""
        return int(state.began) < 0 and int(state.step) < self.after

    def _apart(self, state: DilocoState, replicas: Replicas) -> DilocoState:
        """Return the state with which replicas begin to train apart: the key of a `TrainState`'s draws becomes each
        replica's own, and the outer optimizer begins from the parameters as they are.
        """
        own = replicas.own(state.replicas)
        if isinstance(own, TrainState):
            own = own.replace(rng=fold_in(own.rng, replicas.axis.rank))
        with torch.no_grad():
            parts = [part(state.params, x) for x in fragments_of(state.params, self.fragments)]
            outer = tuple(self.outer.init(x) for x in parts)
        return replace(state, began=state.step.clone(), opt_state=outer, replicas=replicas.entries(own))

    def check(self, state: Any) -> None:
        """Raise `TypeError` or `ValueError` unless `init`, with the same fragments, has made a state."""
        if not isinstance(state, DilocoState):
            raise TypeError(
                f"{self!r}: the state was not made by this step's init. Write state = step.init(state) first."
            )
        if len(state.opt_state) != self.fragments or bool(state.sent) != bool(self.tau):
            raise ValueError(
                f"{self!r}: the state was made with {counted(len(state.opt_state), 'fragment')} and "
                f"tau{'>0' if state.sent else '=0'}. Use the same arguments, or start a new run from its parameters."
            )
        check_outer(repr(self), self.outer, state.opt_state[0])

    def due(self, count: int) -> tuple[list[int], list[int], list[int]]:
        """Return the fragments whose differences are sent after inner step `count`, those whose means are sent then,
        and those whose outer step runs then. Steps are counted from 1.
        """
        ages = {}
        for f in range(self.fragments):
            first = (f + 1) * self.every // self.fragments
            if count >= first:
                ages[f] = (count - first) % self.every
        begin = [f for f, age in ages.items() if age == 0]
        half = -(-self.tau // 2)  # sums travel as long as means
        go_on = [f for f, age in ages.items() if age == half < self.tau]
        return begin, go_on if half else [], [f for f, age in ages.items() if age == self.tau]

    def _checked(self, state: Any) -> Sharded:
        """Return the parameters of a state. Raises `TypeError` or `ValueError` for one that replicas cannot train."""
        names, leaves = _named(state)
        params = leaves[names.index("params")] if "params" in names else None
        if params is None or not is_sharded(params):
            raise TypeError(
                f"diloco: init expects a state from zerofn.shard with an entry 'params', got {told(state)}."
            )
        self.replicas(params.spec.mesh)
        if params.spec.partition.again:
            raise ValueError(
                "diloco: shard(hpz=True) spreads one state over all replicas, but in diloco each replica has its own "
                "state. Leave hpz out."
            )
        if params.spec.precision.feeds_back:
            raise NotImplementedError(
                "diloco: the state has no place for the error feedback of gradients. Leave feedback=True out of "
                "shard(wire=...)."
            )
        if any(is_sharded(x) and x.spec.of_ranks for x in leaves):
            raise NotImplementedError(
                "diloco: the inner optimizer averages gradients over all ranks itself, so replicas would not train "
                "apart. Write tx=optim.adamw(...) as the inner optimizer, and diloco(wire='int8') to send fewer bytes "
                "between replicas."
            )
        num = sum(unit.trainable for unit in params.layout.units)
        if num < self.fragments:
            raise ValueError(
                f"diloco: fragments={self.fragments}, but the parameters have only {counted(num, 'unit')}. Write at "
                f"most {num}, or make smaller units: zerofn.shard(..., unit=...)."
            )
        return params


def _named(state: Any) -> tuple[list[str], list[Any]]:
    leaves, treedef = tree.flatten(state, is_sharded)
    return tree.field_names(treedef), leaves


@lru_cache(maxsize=64)
def _replicas(mesh: ByIdentity, axis: str) -> Replicas:
    return Replicas.of(mesh.value, axis)


class _Meetings:
    """What comes behind one inner step."""

    def __init__(self, step: Diloco, replicas: Replicas, state: DilocoState, inner: Any) -> None:
        self._step, self._replicas, self._before = step, replicas, state
        self._leaves, self._treedef = tree.flatten(inner, is_sharded)
        self._at = tree.field_names(self._treedef).index("params")
        self._params, self._outer, self._sent = state.params, list(state.opt_state), list(state.sent)
        self._run = step.run_outer or step.outer_step

    def followed(self) -> DilocoState:
        """Return the next state of replicas that train together."""
        spec, shards = self._params.spec, masters_of(self._leaves[self._at])
        return replace(
            self._before,
            step=self._before.step + 1,
            params=Sharded(spec, shards),
            replicas=self._replicas.entries(tree.unflatten(self._treedef, self._leaves)),
        )

    def state(self) -> DilocoState:
        """Return the next state."""
        step = self._before.step + 1
        begin, go_on, use = self._step.due(int(step - self._before.began))
        if begin or go_on or use:
            fragments = fragments_of(self._params, self._step.fragments)
            for f in go_on:
                if (mean := self._under_way(f)) is not None:
                    mean.go_on()
            if self._step.tau:  # a step may use one fragment and send another
                for f in use:
                    self._use(f, fragments[f], (self._under_way(f) or self._mean(self._sent[f])).finished())
            for f in begin:
                self._begin(f, fragments[f])
        inner = self._replicas.entries(tree.unflatten(self._treedef, self._leaves))
        return replace(
            self._before,
            step=step,
            params=self._params,
            opt_state=tuple(self._outer),
            replicas=inner,
            sent=tuple(self._sent),
        )

    def _begin(self, f: int, fragment: Fragment) -> None:
        anchor, own = part(self._params, fragment), part(self._leaves[self._at], fragment)
        mine = [x.load_and_decode() for x in own.stored]
        shards = [a - x.to(a.dtype) for a, x in zip(anchor.shards, mine, strict=True)]
        if not self._step.tau:
            self._use(f, fragment, self._mean(Sharded(anchor.spec, shards)).finished())
            return
        entries = self._replicas.entries(Sharded(anchor.spec, shards))
        self._sent[f] = Differences(entries.spec, shards, self._mean(entries))

    def _mean(self, differences: Sharded) -> Mean:
        return Mean(differences, self._replicas.axis, self._step.wire)

    def _under_way(self, f: int) -> Mean | None:
        """Return what is sent of a fragment; None if it was loaded, and nothing is."""
        mean = getattr(self._sent[f], "under_way", None)
        return None if mean is None or mean.lost else mean

    def _use(self, f: int, fragment: Fragment, means: list[Tensor]) -> None:
        params: Sharded = self._leaves[self._at]
        anchor, before = part(self._params, fragment), self._outer[f]
        kept, own = (self._params.stored, params.stored), part(params, fragment)
        meeting: Meeting = self._run(meeting_of(anchor, before, own, means, self._replicas.within), None)[0]
        self._outer[f] = tree.tree_map(
            lambda x, old: x.under(old.spec) if is_sharded(x) else x, meeting.opt_state, before, is_leaf=is_sharded
        )
        self._params = with_part(self._params.spec, kept[0], fragment, meeting.anchor)
        self._leaves[self._at] = with_part(params.spec, kept[1], fragment, meeting.own)
        if self._sent:
            self._sent[f] = Differences(self._sent[f].spec, self._sent[f].stored)  # nothing is under way any more
