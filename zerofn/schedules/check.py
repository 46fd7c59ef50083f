"""Whether a schedule can run: every action once, on its rank, in an order that never gets stuck."""

from __future__ import annotations

from collections.abc import Iterator

from .actions import Action, Schedule


def check(schedule: Schedule) -> None:
    """Raise `ValueError` if a schedule is incomplete or cannot run, with the rank, the entry and what was expected.

    - Each rank has the actions of its own stages. Of each microbatch a stage has one F, and either one B or one I and
      one W; stage 0 has B.
    - F of a stage go through microbatches in ascending order, since buffers may be written in F; so do gradients of
      weights (B or W), because sums in another order round differently.
    - No rank waits forever: every value that an action reads is made earlier, whatever the costs.

    >>> from zerofn import schedules
    >>> check(schedules.Schedule.from_csv("0F0,0B0,0F1,0B1"))
    >>> check(schedules.Schedule.from_csv("0F0,0F1,0B0"))
    Traceback (most recent call last):
    ValueError: schedule 'csv': stage 0 has no B of microbatch 1; add 0B1 to rank 0.
    """
    for problem in _problems(schedule):  # of which the first is told
        raise ValueError(f"schedule {schedule.name!r}: {problem}")


def possible_order(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Each action with its rank, ranks in their own order, and none before what it reads is made. It ends early where
    all ranks wait."""
    waiting: dict[Action, list[int]] = {}
    made: set[Action] = set()
    at = [0] * len(schedule.orders)
    ready = list(reversed(range(len(schedule.orders))))
    while ready:
        rank = ready.pop()
        order = schedule.orders[rank]
        while at[rank] < len(order):
            action = order[at[rank]]
            missing = next((x for x in action.reads(schedule.num_stages) if x not in made), None)
            if missing:
                waiting.setdefault(missing, []).append(rank)
                break
            yield rank, action
            at[rank] += 1
            made.add(action.makes)
            ready += waiting.pop(action.makes, ())


def _problems(schedule: Schedule) -> Iterator[str]:
    if len(schedule.orders) != schedule.ranks:
        yield f"{schedule.placement} has {schedule.ranks} lists of actions, got {len(schedule.orders)}."
        return
    for rank, order in enumerate(schedule.orders):
        yield from _wrong_entries(schedule, rank, order)
    yield from _missing(schedule)
    for rank, order in enumerate(schedule.orders):
        yield from _out_of_order(rank, order)
    yield from _stuck(schedule)


def _wrong_entries(schedule: Schedule, rank: int, order: tuple[Action, ...]) -> Iterator[str]:
    """Actions that have no place in this list, or come twice."""
    placement, seen = schedule.placement, dict[Action, int]()
    for i, action in enumerate(order):
        where = f"rank {rank}, entry {i} ({action})"
        stage, kind, k = action
        if kind not in ("F", "B", "I", "W"):
            yield f"{where}: expected one of F, B, I and W, got {kind!r}."
        if not 0 <= stage < placement.num_stages:
            yield f"{where}: {placement} has stages 0 to {placement.num_stages - 1}."
        if not 0 <= k < schedule.microbatches:
            yield f"{where}: microbatches are 0 to {schedule.microbatches - 1}."
        if placement.rank_of(stage) != rank:
            yield f"{where}: in {placement}, stage {stage} is on rank {placement.rank_of(stage)}; move {action} there."
        if stage == 0 and kind in ("I", "W"):
            yield f"{where}: stage 0 has no input that needs a gradient; write 0B{k} for its backward pass."
        first = next((seen[x] for x in _same_work(action) if x in seen), None)
        if first is not None:
            yield f"{where}: entry {first} ({order[first]}) has already done this work. Remove one of the two entries."
        seen[action] = i


def _same_work(action: Action) -> tuple[Action, ...]:
    """Actions that do a part of what this one does."""
    stage, kind, k = action
    halves = {"F": "F", "B": "BIW", "I": "BI", "W": "BW"}[kind]
    return tuple(Action(stage, x, k) for x in ("F", "B", "I", "W") if x in halves)


def _missing(schedule: Schedule) -> Iterator[str]:
    there = {action for order in schedule.orders for action in order}
    for stage in range(schedule.num_stages):
        rank = schedule.placement.rank_of(stage)
        for k in range(schedule.microbatches):
            forward, whole = Action(stage, "F", k), Action(stage, "B", k)
            halves = [Action(stage, "I", k), Action(stage, "W", k)]
            if forward not in there:
                yield f"stage {stage} has no F of microbatch {k}; add {forward} to rank {rank}."
            absent = [x for x in halves if x not in there]
            if whole in there or not absent:
                continue
            if len(absent) == 1:
                other = next(x for x in halves if x in there)
                yield (
                    f"stage {stage} has {other} but no {absent[0]}; add {absent[0]} to rank {rank}, or write {whole} "
                    "for both."
                )
            else:
                both = f", or {halves[0]} and {halves[1]}," if stage else ""
                yield f"stage {stage} has no B of microbatch {k}; add {whole}{both} to rank {rank}."


def _out_of_order(rank: int, order: tuple[Action, ...]) -> Iterator[str]:
    last: dict[tuple[int, bool], Action] = {}
    for i, action in enumerate(order):
        if action.kind == "I":
            continue
        before = last.get(key := (action.stage, action.kind == "F"))
        if before and before.microbatch > action.microbatch:
            what = "forward passes" if action.kind == "F" else "gradients of weights"
            yield (
                f"rank {rank}, entry {i} ({action}) comes after {before}, but {what} of a stage must take microbatches "
                f"in ascending order."
            )
        last[key] = action


def _stuck(schedule: Schedule) -> Iterator[str]:
    made: set[Action] = set()
    at = [0] * schedule.ranks
    for rank, action in possible_order(schedule):
        made.add(action.makes)
        at[rank] += 1
    waits = []
    for rank, order in enumerate(schedule.orders):
        if at[rank] < len(order):
            action = order[at[rank]]
            missing = next(x for x in action.reads(schedule.num_stages) if x not in made)
            where = f"of rank {schedule.placement.rank_of(missing.stage)}"
            waits.append(f"rank {rank} at entry {at[rank]} ({action}) for {missing} {where}")
    if waits:
        yield f"no rank can continue; these wait: {'; '.join(waits)}."
