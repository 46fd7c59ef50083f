"""Schedules as arguments: a name, or a schedule of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from ..util.errors import nearest
from .actions import Schedule
from .check import check
from .named import NAMES, ScheduleName

AUTO: Literal["auto"] = "auto"  # the fastest that is found
# A name, a schedule, or a list of actions for each rank; not the text of a schedule, which `as_given` takes besides.
AsSchedule = ScheduleName | Literal["auto"] | Schedule | Sequence[list[Any] | tuple[Any, ...]]


def as_given(schedule: str | Schedule | Sequence[Sequence[Any]], where: str) -> str | Schedule:
    """Return the name of a schedule, or a schedule of one's own, checked. It is given as a `Schedule`, as the text that
    `to_csv` and torch write, or as a list of actions for each rank, such as [["0F0", "0B0"], ["1F0", "1B0"]].

    `where`: the function that was called. Raises `ValueError` for an unknown name and for a schedule that cannot run,
    and `TypeError` for something else.
    """
    if not isinstance(schedule, Schedule | Sequence):
        raise TypeError(
            f"{where}: schedule must be a name, a zerofn.schedules.Schedule, the text of one, or a list of actions for "
            f"each rank, got a {type(schedule).__name__}."
        )
    try:
        if isinstance(schedule, str) and "," not in schedule and "\n" not in schedule:
            known = (*NAMES, AUTO)
            if schedule not in known:
                near = nearest(schedule.lower(), known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; write one of {', '.join(known)}."
                raise ValueError(f"schedule={schedule!r} is not known{hint}")
            return schedule
        if not isinstance(schedule, Schedule):
            rows = schedule if isinstance(schedule, str) else "\n".join(",".join(map(str, row)) for row in schedule)
            schedule = Schedule.from_csv(rows, "own")
        check(schedule)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return schedule
