"""A captured step of `diloco`, and the plan of its rounds."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from ..capture.checked_capture import dry_result
from ..comm.mesh import Axis, Mesh
from ..cost.links import Links
from ..cost.machine import Machine, machine_of
from ..cost.simulator import Timeline
from ..dry_run.script import current_dry_run
from ..memory.turns import is_inside_step
from ..runtime.hooks import before_step
from ..runtime.interrupts import whole_steps
from ..training.diloco import Diloco, DilocoState, Step
from ..training.outer_step import bytes_sent
from ..util.sizes import in_words, time_in_words
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
        if (dry_run := current_dry_run()) is not None:
            replicas = self._step.replicas(state.params.spec.mesh)
            dry_run.come_to(self._step, replicas.together(state.replicas), batch)
            return state, dry_result(self._step.inner_step, replicas.own(state.replicas), batch)[1]
        before_step()
        with whole_steps():  # what the inner step has spent is replaced where the outer ones have ended
            result = self._run(state, batch)
            self.state = result[0]
        return result

    def lower(self, state: DilocoState, batch: Any) -> RoundPlan:
        """Return the plan of a round on this state and batch. All ranks must call it; nothing runs."""
        step = self._step
        step.check(state)
        replicas = step.replicas(state.params.spec.mesh)
        together = None
        if step.trains_together(state):
            together = self.inner.lower(replicas.together(state.replicas), batch)
        inner = self.inner.lower(replicas.own(state.replicas), batch)
        between = bytes_sent(state.params, replicas.axis, step.wire)
        rounds = Rounds.of(step, replicas.axis, inner.sent_along, between)
        return RoundPlan(step, inner, rounds, replicas.whole, together)

    def _outer_step(self, meeting: Any, batch: None) -> Any:
        found = self.outer.going_on(meeting, batch)
        self.outer.state = None  # which would hold the means
        return found


class Rounds(NamedTuple):
    """The transfers of a rank in a round of `diloco`, of `every` inner steps.

    `inner`: bytes of each inner step, by axis. `between`: bytes to other replicas along `axis`, in `fragments` parts:
    half of them in sums of changes and half in means. `tau`: the number of inner steps in which both are sent.
    """

    every: int
    fragments: int
    tau: int
    axis: str
    replicas: int
    inner: dict[str, int]
    between: int

    @staticmethod
    def of(step: Diloco, axis: Axis, inner: dict[str, int], between: int) -> Rounds:
        """Return those of a step. `axis`: of replicas."""
        return Rounds(step.every, step.fragments, step.tau, axis.name, axis.size, inner, between)

    @property
    def sent(self) -> dict[str, int]:
        """Bytes of a whole round, by axis."""
        found = Counter({name: self.every * nbytes for name, nbytes in self.inner.items()})
        found[self.axis] += self.between
        return dict(found)

    @property
    def average(self) -> dict[str, int]:
        """Bytes of a step on average, by axis."""
        return {name: nbytes // self.every for name, nbytes in self.sent.items()}


class TimedRounds(NamedTuple):
    """Rounds on a machine. `inner`: seconds of an inner step, which `inner_bound` limits. `rate`: bytes per second that
    a rank sends to other replicas. `beside`: bytes on a rank's device in addition to the inner state.
    """

    of: Rounds
    inner: float
    rate: float
    inner_bound: str
    beside: int

    @property
    def waits(self) -> float:
        """Seconds of a round in which inner steps wait for transfers between replicas: for sums of changes in the first
        half of the `tau` steps, for means in the second. The arithmetic of outer steps is not counted.
        """
        rounds, half = self.of, -(-self.of.tau // 2)
        takes = rounds.between / 2 / rounds.fragments / self.rate
        hidden = (steps * self.inner for steps in (half, rounds.tau - half))
        return rounds.fragments * sum(max(0.0, takes - time) for time in hidden)

    @property
    def on_link(self) -> float:
        """Seconds of a round for which the link between replicas is busy."""
        return self.of.between / self.rate

    @property
    def seconds(self) -> float:
        """Seconds of a step on average."""
        return max(self.inner + self.waits / self.of.every, self.on_link / self.of.every)

    @property
    def bound(self) -> str:
        """The lane that limits a step on average."""
        return f"sent along {self.of.axis}" if self.seconds > 2 * self.inner else self.inner_bound

    @property
    def sent(self) -> dict[str, int]:
        """Bytes of a step on average, by axis."""
        return self.of.average

    @property
    def least_every(self) -> int:
        """The least number of inner steps in a round at which its transfers take no longer than its inner steps."""
        return max(1, math.ceil(self.on_link / self.inner))

    def __str__(self) -> str:
        rounds, means = self.of, f"{time_in_words(self.seconds)} on average"
        inner = " and ".join(f"{in_words(n)} along {name}" for name, n in rounds.inner.items() if n) or "nothing"
        return (
            f"replicas meet every {rounds.every} steps: an inner step takes {time_in_words(self.inner)} and sends "
            f"{inner}, replicas {in_words(rounds.between)} along {rounds.axis} in a round; a step takes {means}. With "
            f"every={self.least_every} or more, the link between replicas is not the bottleneck"
        )

    def json(self) -> dict[str, Any]:
        """As numbers and texts."""
        more = {"seconds": self.seconds, "least_every": self.least_every}
        return {**self.of._asdict(), **self._asdict(), "inner": self.of.inner, "inner_seconds": self.inner, **more}


class RoundPlan:
    """The plan of a round of `diloco`: `every` inner steps and their outer step.

    `inner` is the plan of an inner step. In a round, a rank also sends `between` bytes to other replicas. `together`:
    the plan of a step that all ranks take together; None if replicas already train apart.
    """

    def __init__(self, step: Diloco, inner: Plan, rounds: Rounds, mesh: Mesh, together: Plan | None) -> None:
        self.step, self.inner, self.together, self.rounds, self._mesh = step, inner, together, rounds, mesh
        self.every, self.between = rounds.every, rounds.between

    @property
    def sent_along(self) -> dict[str, int]:
        """Return the bytes that a rank sends in a round along each axis of the mesh."""
        return self.rounds.sent

    @property
    def average(self) -> dict[str, int]:
        """Return the bytes that a rank sends in a step along each axis of the mesh, on average over a round."""
        return self.rounds.average

    def least_every(
        self,
        machine: Machine | str | os.PathLike[str] | None = None,
        *,
        seconds: float | None = None,
        rate: float | None = None,
    ) -> int:
        """Return the least number of inner steps in a round at which the link between replicas is not the bottleneck:
        the transfers of a round take no longer than its inner steps.

        `machine`: for arguments that are left out, as `compile` takes it; if it was measured, it must be this machine,
        and all ranks must call. `seconds`: of an inner step. `rate`: bytes per second that a rank sends to other
        replicas.

        Raises `ValueError` for numbers that are not positive, and if a number and the machine are both missing.
        """
        if machine is None and (seconds is None or rate is None):
            raise ValueError(
                "least_every: pass a machine, or both seconds= (of an inner step) and rate= (bytes/s that a rank sends "
                "to other replicas)."
            )
        if machine is not None:
            where = machine_of(machine)
            where.check_ranks(self._mesh.num_ranks)
            seconds = self._seconds(where) if seconds is None else seconds
            links = Links(where, self._mesh.num_ranks, self._mesh)
            rate = links.along(self.rounds.axis).rate if rate is None else rate
        if not (seconds and rate and seconds > 0 and rate > 0):
            raise ValueError(
                f"least_every: seconds={seconds!r} of an inner step and rate={rate!r} bytes/s must be positive."
            )
        return TimedRounds(self.rounds, seconds, rate, "", 0).least_every

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
        if self.together is not None:
            lines += [f"the first {self.step.after} steps, of all ranks together:", self.together.text()]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return self.text()


def each_captured(step: Step, captured: Callable[[Step, bool], Any]) -> Any:
    """Return a captured step; for a step of `diloco`, its inner and its outer step. `captured(function, meant)`
    captures one function; `meant` is False for the outer step.
    """
    if isinstance(step, Diloco):
        return CompiledRounds(step, captured(step.inner_step, True), captured(step.outer_step, False))
    return captured(step, True)
