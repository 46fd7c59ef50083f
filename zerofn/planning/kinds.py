"""Plans of steps of several kinds: 1-bit optimizers before and after their freeze step, and rounds of `diloco`.

A row of the table describes the kind that most steps have. The memory that it needs is the maximum over all kinds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..comm.mesh import Mesh
from ..cost.links import Links
from ..cost.machine import Machine
from ..runtime.kinds_of_steps import kinds_of, with_kind
from ..sharding.precision import made_for
from ..training.diloco import Diloco
from ..training.outer_step import bytes_sent
from .asked import Asked, Initial, Step, wide_axes
from .plan_row import Config, Needs, OtherKind, Row, lacking
from .plan_variants import RowPlanner, state_needs
from .rounds import Rounds, TimedRounds


class _OfKind(RowPlanner):
    """Plans steps of one kind."""

    def __init__(self, kind: str, *given: Any) -> None:
        super().__init__(*given)
        self._kind = kind

    def _turned(self, state: Any) -> Any:
        return with_kind(state, self._kind)


class KindsPlanner(RowPlanner):
    """Makes rows as `RowPlanner` does, also for a step whose optimizer has several kinds of steps."""

    def __init__(self, step: Step, mesh: Mesh, machine: Machine, machine_argument: str, initials: Initial) -> None:
        super().__init__(step, mesh, machine, machine_argument, initials)
        self._given = step, mesh, machine, machine_argument, initials

    def _turned(self, state: Any) -> Any:
        kinds = kinds_of(state)
        return state if kinds is None else with_kind(state, kinds.last)

    def row(self, config: Config) -> Row:
        """Plan one configuration."""
        others = self._others(config)
        return self._whole(config, super().row(config), [(how, planner.row(config)) for how, planner in others])

    def ways(self, config: Config) -> Iterator[Row]:
        """Plan one configuration, with more and more recomputation; see `RowPlanner`."""
        others = self._others(config)
        several = zip(super().ways(config), *(planner.ways(config) for _, planner in others), strict=False)
        for mine, *rows in several:
            yield self._whole(config, mine, [(how, row) for (how, _), row in zip(others, rows, strict=True)])

    def _others(self, config: Config) -> list[tuple[OtherKind, RowPlanner]]:
        """Return the other kinds of steps before they are planned, each with its planner."""
        with self._fake():
            kinds = kinds_of(self._initials.of(self._step.init_state, made_for(config.precision, config.wire)))
        if kinds is None:
            return []
        return [
            (OtherKind(name, number, kinds.until), _OfKind(name, *self._given))
            for name, number in kinds.before.items()
            if name != kinds.last
        ]

    def _whole(self, config: Config, row: Row, others: Sequence[tuple[OtherKind, Row]]) -> Row:
        """Return a row with the plans of the other kinds of steps."""
        if not others:
            return row
        needs = Needs(*map(max, zip(row.needs, *(x.needs for _, x in others), strict=True)))
        lacks = lacking(needs, self._machine, self.ranks_of_node)
        kinds = tuple(how._replace(row=x) for how, x in others)
        return replace(row, needs=needs, lacks=row.lacks or lacks, others=kinds)


class RoundsPlanner(KindsPlanner):
    """Makes the rows of a step of `diloco`: of its inner step, on the mesh of one replica, and of the transfers between
    replicas.
    """

    def __init__(self, step: Step, mesh: Mesh, machine: Machine, machine_argument: str, initials: Initial) -> None:
        self._diloco: Diloco = step.train_step  # type: ignore[assignment]
        inner = step._replace(train_step=self._diloco.inner_step)
        self._together = RowPlanner(inner, mesh, machine, machine_argument, initials)
        self._all = mesh
        self._replicas = self._diloco.replicas(mesh)
        if self._replicas.axis.size == 1:
            raise ValueError(
                f"plan: {self._diloco!r} needs several replicas, but the mesh has one along "
                f"{self._diloco.axis!r}; plan a mesh such as {self._diloco.axis}=2,data=8."
            )
        self._known: dict[Config, tuple[Needs, int]] = {}
        super().__init__(inner, self._replicas.mesh, machine, machine_argument, initials)

    @property
    def ranks_of_node(self) -> int:
        """The ranks that share a node's host memory and drives."""
        return self._together.ranks_of_node

    def configs(self, asked: Asked) -> Iterator[Config]:
        """Return every requested configuration."""
        axes = wide_axes(self._all)
        return (config._replace(mesh=axes, rounds=True) for config in super().configs(asked))

    def row(self, config: Config) -> Row:
        """Plan one configuration."""
        return super().row(self._with_less_memory(config))

    def ways(self, config: Config) -> Iterator[Row]:
        """Plan one configuration, with more and more recomputation; see `RowPlanner`."""
        return super().ways(self._with_less_memory(config))

    def _with_less_memory(self, config: Config) -> Config:
        """Return a configuration whose inner step leaves room for the outer optimizer."""
        return config._replace(memory=self._machine.memory - self._outer(config)[0].device)

    def _outer(self, config: Config) -> tuple[Needs, int]:
        """Return the bytes that a rank holds in addition to the inner state, and those that it sends to other replicas
        in a round.
        """
        key = config._replace(remat=None, memory=0.0)
        if key not in self._known:
            state = self._together.laid(config)
            with self._fake():
                state = self._diloco.init(state)
                needs = state_needs((state.params, state.opt_state, state.sent))
                self._known[key] = needs, bytes_sent(state.params, self._replicas.axis, self._diloco.wire)
        return self._known[key]

    def _others(self, config: Config) -> list[tuple[OtherKind, RowPlanner]]:
        after = self._diloco.after
        return [(OtherKind("together", after, after), self._together)] if after else []

    def _whole(self, config: Config, row: Row, others: Sequence[tuple[OtherKind, Row]]) -> Row:
        row, (beside, between) = super()._whole(config, row, others), self._outer(config)
        needs = Needs(*(x + more for x, more in zip(row.needs, beside, strict=True)))
        if row.plan is None:
            return replace(row, needs=needs)
        lacks = lacking(needs, self._machine, self.ranks_of_node)
        rate = Links(self._machine, self._all.num_ranks, self._all).along(self._replicas.axis.name).rate
        rounds = Rounds.of(self._diloco, self._replicas.axis, row.sent, between)
        timed = TimedRounds(rounds, row.seconds, rate, row.bound, beside.device)
        return replace(row, needs=needs, lacks=row.lacks or lacks, rounds=timed)


def planner_of(step: Step, mesh: Mesh, machine: Machine, machine_argument: str, initials: Initial) -> RowPlanner:
    """Return the object that makes the rows of a step; see `RowPlanner`."""
    kind = RoundsPlanner if isinstance(step.train_step, Diloco) else KindsPlanner
    return kind(step, mesh, machine, machine_argument, initials)
