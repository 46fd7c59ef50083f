"""When each action of a schedule begins and ends, from what actions and transfers take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .actions import Action, Kind, Placement, Schedule
from .check import possible_order


@dataclass(frozen=True)
class Costs:
    """The seconds and bytes of one microbatch on each stage.

    `f`, `i`, `w`: seconds of each stage's F, I and W; a B takes i + w, as stage 0's whole backward pass does.
    `down[s]`: seconds of the transfer of activations from stage s to s + 1; `up[s]`: of gradients back. Between stages
    of one rank nothing is sent.

    `saved`: bytes that each stage stores from F until I or B. `kept`: bytes that it stores from I until W, including
    those that I adds. `fixed`: bytes that each rank has all the time; none if it is empty.

    >>> costs = Costs.even(4, f=1.0, i=1.0, w=0.5)
    >>> costs.seconds(1, "B")
    1.5
    """

    f: tuple[float, ...]
    i: tuple[float, ...]
    w: tuple[float, ...]
    down: tuple[float, ...]
    up: tuple[float, ...]
    saved: tuple[float, ...]
    kept: tuple[float, ...]
    fixed: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.f)
        for name in ("i", "w", "down", "up", "saved", "kept"):
            given, wanted = len(getattr(self, name)), n - 1 if name in ("down", "up") else n
            if given != wanted:
                raise ValueError(f"costs of {n} stages need {wanted} numbers in {name!r}, got {given}.")

    @classmethod
    def even(cls, stages: int, f: float = 1.0, i: float = 1.0, w: float = 1.0, send: float = 0.0) -> Costs:
        """Equal stages; each keeps one byte from F to W.

        >>> Costs.even(2, w=0.5).w
        (0.5, 0.5)
        """
        sends, one = (send,) * (stages - 1), (1.0,) * stages
        return cls((f,) * stages, (i,) * stages, (w,) * stages, sends, sends, one, one)

    def seconds(self, stage: int, kind: Kind) -> float:
        """The seconds that an action takes."""
        if kind == "B":
            return self.i[stage] + self.w[stage]
        return {"F": self.f, "I": self.i, "W": self.w}[kind][stage]

    def transfer(self, placement: Placement, source: int, target: int) -> float:
        """Seconds of the transfer between two neighbouring stages."""
        if placement.rank_of(source) == placement.rank_of(target):
            return 0.0
        return self.down[source] if source < target else self.up[target]

    def grows(self, stage: int, kind: Kind) -> float:
        """Bytes by which an action changes what its rank holds: F at its start, the others at their end."""
        saved, kept = self.saved[stage], self.kept[stage]
        return {"F": saved, "I": kept - saved, "W": -kept, "B": -saved}[kind]


class Span(NamedTuple):
    """An action from `start` to `stop`, in seconds."""

    action: Action
    start: float
    stop: float


@dataclass(frozen=True)
class Timeline:
    """A simulated run. By rank: `spans`, the part of `makespan` in which it computes nothing (`idle`), the most bytes
    (`peak_bytes`), and the most microbatches whose F has begun and whose last gradient has not been computed
    (`in_flight`; of a rank with v stages, one stage counts 1/v)."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    makespan: float
    idle: tuple[float, ...]
    peak_bytes: tuple[float, ...]
    in_flight: tuple[float, ...]

    def text(self, width: int = 100) -> str:
        """A line for each rank, `width` characters for the whole time: "F0" where the forward pass of microbatch 0
        begins, "-" while an action continues, "." where the rank waits. Actions of odd chunks have lower-case letters.

        >>> from zerofn import schedules
        >>> print(simulate(schedules.make("1f1b", ranks=2, microbatches=2), Costs.even(2)).text(36))
        rank 0 |F0--F1--........B0------....B1------|
        rank 1 |....F0--B0------F1--B1------........|
        """
        per_second = width / self.makespan if self.makespan else 0.0
        head = len(f"rank {self.schedule.ranks - 1}")
        return "\n".join(
            f"{f'rank {rank}':<{head}} |{self._row(spans, per_second, width)}|" for rank, spans in enumerate(self.spans)
        )

    def _row(self, spans: tuple[Span, ...], per_second: float, width: int) -> str:
        row = ["."] * width
        for (stage, kind, k), start, stop in spans:
            at, end = round(start * per_second), round(stop * per_second)
            odd = stage // self.schedule.ranks % 2
            label = f"{kind.lower() if odd else kind}{k}"
            if len(label) > end - at:
                label = label[0]
            row[at:end] = label.ljust(end - at, "-")[: end - at]
        return "".join(row)


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Run each rank's actions in order. An action begins when its rank is free and the values that it reads exist.

    Transfers begin when their value is made, and take no time of a rank. Raises `ValueError` if ranks would wait for
    each other forever (see `check`), or if the costs are for another number of stages.

    >>> from zerofn import schedules
    >>> simulate(schedules.make("gpipe", ranks=2, microbatches=4), Costs.even(2)).makespan  # (m + p - 1)(F + I + W)
    15.0
    """
    if len(costs.f) != schedule.num_stages:
        raise ValueError(
            f"{schedule.placement} has {schedule.num_stages} stages, but the costs are for {len(costs.f)}."
        )
    placement = schedule.placement
    made: dict[Action, float] = {}
    free = [0.0] * schedule.ranks
    spans: list[list[Span]] = [[] for _ in schedule.orders]
    for rank, action in possible_order(schedule):
        came = (made[x] + _transfer(costs, placement, x, action) for x in action.reads(schedule.num_stages))
        start = max(free[rank], *came, 0.0)
        free[rank] = made[action.makes] = start + costs.seconds(action.stage, action.kind)
        spans[rank].append(Span(action, start, free[rank]))
    for rank, order in enumerate(schedule.orders):
        if len(spans[rank]) < len(order):
            raise ValueError(
                f"schedule {schedule.name!r}: ranks would wait for each other forever. Call zerofn.schedules.check, "
                "which names the actions that wait."
            )
    makespan = max(free)
    busy = [sum(x.stop - x.start for x in rank_spans) for rank_spans in spans]
    fixed = costs.fixed or (0.0,) * schedule.ranks
    held = [_peaks(costs, order, schedule.chunks) for order in schedule.orders]
    return Timeline(
        schedule,
        tuple(map(tuple, spans)),
        makespan,
        tuple(1 - x / makespan if makespan else 0.0 for x in busy),
        tuple(x + peak for x, (peak, _) in zip(fixed, held, strict=True)),
        tuple(count for _, count in held),
    )


def _transfer(costs: Costs, placement: Placement, made: Action, reader: Action) -> float:
    return costs.transfer(placement, made.stage, reader.stage) if made.stage != reader.stage else 0.0


def _peaks(costs: Costs, order: Sequence[Action], chunks: int) -> tuple[float, float]:
    """The most bytes and microbatches of a rank. Nothing else of it runs meanwhile, so that times do not matter."""
    held = most = 0.0
    count = most_count = 0
    for stage, kind, _ in order:
        held += costs.grows(stage, kind)
        count += {"F": 1, "I": 0}.get(kind, -1)
        most, most_count = max(most, held), max(most_count, count)
    return most, most_count / chunks
