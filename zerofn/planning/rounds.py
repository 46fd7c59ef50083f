"""A step of `diloco`, captured, and the plan of its rounds."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..comm.mesh import Axis
from ..cost.links import Links
from ..cost.machine import Machine, machine_of
from ..cost.simulator import Timeline
from ..memory.turns import is_inside_step
from ..runtime.hooks import before_step
from ..runtime.interrupts import whole_steps
from ..sharding.sharded import Sharded
from ..training.diloco import Diloco, DilocoState, Step, replicas_of
from ..training.outer_step import bytes_sent
from ..util.sizes import in_words
from .plan import Plan


class CompiledRounds:
    """A compiled step of `diloco`: `inner` and `outer` are its captured steps. `state`: see `CompiledStep`."""

    def __init__(self, step: Diloco, inner: Any, outer: Any) -> None:
        self._step, self.inner, self.outer = step, inner, outer
        self._run = replace(step, inner_step=inner.going_on, run_outer=self._outer_step)
        self.__wrapped__, self.__name__ = step, inner.__name__
        self.state: Any = None

    def __repr__(self) -> str:
        return f"<compiled {self._step!r} of {self.inner!r}>"

    @property
    def timings(self) -> dict[str, Any]:
        """Those of the inner step."""
        return self.inner.timings

    @property
    def flops(self) -> int:
        """Those of the inner step."""
        return self.inner.flops

    def __call__(self, state: DilocoState, batch: Any) -> Any:
        """Take an inner step, and the outer ones that are due. Inside another step it is the function itself."""
        if is_inside_step():
            return self._step(state, batch)
        before_step()
        with whole_steps():  # what the inner step has spent is replaced where the outer ones have ended
            result = self._run(state, batch)
            self.state = result[0]
        return result

    def lower(self, state: DilocoState, batch: Any) -> RoundPlan:
        """Return the plan of a round on this state and batch. All ranks must call it; nothing runs."""
        self._step.check(state)
        replicas = replicas_of(state.params.spec.mesh, self._step.axis)
        return RoundPlan(self._step, self.inner.lower(replicas.own(state.replicas), batch), state.params, replicas.axis)

    def _outer_step(self, meeting: Any, batch: None) -> Any:
        found = self.outer.going_on(meeting, batch)
        self.outer.state = None  # which would hold the means
        return found


class RoundPlan:
    """What a round of `diloco` needs and does: `every` inner steps, of which `inner` is the plan, and what replicas
    send one another meanwhile, `between` bytes by a rank.
    """

    def __init__(self, step: Diloco, inner: Plan, params: Sharded, axis: Axis) -> None:
        self.step, self.inner, self._axis, self._mesh = step, inner, axis, params.spec.mesh
        self.every = step.every
        self.between = bytes_sent(params, axis, step.wire)

    @property
    def sent_along(self) -> dict[str, int]:
        """Return the bytes that a rank sends in a round along each axis of the mesh."""
        found = Counter({name: self.every * nbytes for name, nbytes in self.inner.sent_along.items()})
        found[self._axis.name] += self.between
        return dict(found)

    def least_every(
        self,
        machine: Machine | str | os.PathLike[str] | None = None,
        *,
        seconds: float | None = None,
        rate: float | None = None,
    ) -> int:
        """Return from which number of inner steps on the link between replicas does not bound the run: what a round
        sends takes no longer than its inner steps.

        `machine`: for what is not given, as `compile` takes it; one that was measured must be this one, and all ranks
        must call. `seconds`: of an inner step. `rate`: bytes per second that a rank sends to other replicas.

        Raises `ValueError` for numbers that are not positive, and without a machine where one of them is missing.
        """
        if machine is None and (seconds is None or rate is None):
            raise ValueError(
                "least_every: give a machine, or both seconds=, of an inner step, and rate=, bytes/s that a rank sends "
                "to other replicas."
            )
        if machine is not None:
            where = machine_of(machine)
            where.check_ranks(self._mesh.num_ranks)
            seconds = self._seconds(where) if seconds is None else seconds
            rate = Links(where, self._mesh.num_ranks, self._mesh).along(self._axis.name).rate if rate is None else rate
        if not (seconds and rate and seconds > 0 and rate > 0):
            raise ValueError(
                f"least_every: seconds={seconds!r} of an inner step and rate={rate!r} bytes/s must be positive."
            )
        return max(1, math.ceil(self.between / rate / seconds))

    def _seconds(self, machine: Machine) -> float:
        """Return how long an inner step takes there."""
        if machine.is_here:
            return self.inner.timeline(machine).seconds
        return Timeline(self.inner.graph, machine, self.inner.world, None, self.inner.program.mesh).seconds

    def text(self) -> str:
        """Return the plan as text."""
        sent = ", ".join(f"{in_words(n)} along {name}" for name, n in self.sent_along.items())
        lines = [
            f"{self.step!r}: a round of {self.every} inner steps",
            f"  sent by a rank in a round: {sent}",
            f"  between replicas, spread over the round: {in_words(self.between // self.every)} a step",
            self.inner.text(),
        ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return self.text()


def each_captured(step: Step, captured: Callable[[Step, bool], Any]) -> Any:
    """Return a step, captured: of one of `diloco` the inner and the outer step. `captured(function, is the one that is
    meant)`: captures a step.
    """
    if isinstance(step, Diloco):
        return CompiledRounds(step, captured(step.inner_step, True), captured(step.outer_step, False))
    return captured(step, True)
