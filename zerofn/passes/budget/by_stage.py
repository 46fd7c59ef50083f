"""The search for a stage of a pipeline: what its microbatches recompute, and which of its units stay gathered.

Every rank searches for its own stages. What it chooses are names of the microbatch before that is cut: values of other
stages are of no account, and names mean the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch.fx import GraphModule

from ...graph.alias import positions
from ...graph.liveness import moments
from ...graph.pipelines import Loop, pipelines
from ...graph.program import Program
from ...graph.resident import resident
from ...graph.segments import Segments
from .._context import context_of
from .decision import Choice
from .drops import activations
from .hoists import of_bodies
from .search import OverBudget, attempted, graphs


def within_stages(program: Program, budget: int, schedule: Callable[[Program], None], room: float) -> list[Choice]:
    """Return decisions for each of a program's `graphs` that keep this rank's memory within `budget` bytes: with the
    share `room` of it left free if any schedule reaches that, else without.

    Activations are recomputed, those first that free the most bytes in the least time, until the rest fits; then as
    many units as fit stay gathered through all microbatches. Raises `OverBudget` if all of it together needs more.
    """
    search = _Search(program, schedule)
    for limit in (int(budget / (1 + room)), budget):
        dropped = search.fewest(limit)
        if dropped is not None:
            return search.choices(dropped, search.most_hoisted(dropped, limit))
    least = search.peak(search.num_drops, 0)
    raise OverBudget(
        least,
        f"{program.name} cannot be scheduled within {budget:,} bytes on this stage of the pipeline. It needs at least "
        f"{least:,} bytes. To need less, use more microbatches of fewer rows (zerofn.accumulate), ZeRO stage 3, a "
        "schedule with fewer microbatches in flight ('1f1b'), offloaded state, moments='8bit', or more ranks.",
    )


def recomputed_stages(program: Program, how: str, schedule: Callable[[Program], None]) -> list[Choice]:
    """Return decisions that recompute all activations ("full"), or the cheapest until memory is halfway to that."""
    search = _Search(program, schedule)
    if how == "full":
        return search.choices(search.num_drops, 0)
    whole, least = search.peak(0, 0), search.peak(search.num_drops, 0)
    fewest = search.fewest((whole + least) // 2)
    return search.choices(search.num_drops if fewest is None else fewest, 0)


def beside_stages(program: Program, schedule: Callable[[Program], None]) -> list[Choice]:
    """Return decisions that take no more memory than none: as many units as fit stay gathered."""
    search = _Search(program, schedule)
    return search.choices(0, search.most_hoisted(0, search.peak(0, 0)))


class _Search:
    """Schedules of one program in which some activations, the first in order, are recomputed, and some units, the
    smallest, stay gathered.
    """

    def __init__(self, program: Program, schedule: Callable[[Program], None]) -> None:
        self._program, self._schedule = program, schedule
        self._graphs = graphs(program.gm)
        self._peaks: dict[tuple[int, int], int] = {}  # by the numbers of drops and hoists
        loops = pipelines(program)
        bodies = [loop.call.body for loop in loops]
        drops = sorted((x for loop in loops for x in self._droppable(loop)), key=lambda x: x[2])
        self._drops = [(gm, name) for gm, name, _ in drops]
        found = of_bodies(program.gm)
        self._hoists = [(gm, start.name) for gm in bodies for start in found.get(gm, ())]

    def _droppable(self, loop: Loop) -> Iterator[tuple[GraphModule, str, float]]:
        """Yield what may be recomputed, with seconds for a byte. What a stage receives is there already."""
        gm, lanes = loop.call.body, context_of(self._program).lanes()
        for drop in activations(lanes, Segments(gm.graph), positions(gm.graph)):
            yield gm, drop.of, drop.seconds / drop.nbytes

    @property
    def num_drops(self) -> int:
        """How many activations may be recomputed."""
        return len(self._drops)

    def choices(self, dropped: int, hoisted: int) -> list[Choice]:
        """Return the decisions with the first `dropped` drops and `hoisted` hoists."""
        drops, hoists = self._drops[:dropped], self._hoists[:hoisted]
        return [
            Choice(
                dropped=frozenset(name for of, name in drops if of is gm),
                hoisted=frozenset(name for of, name in hoists if of is gm),
            )
            for gm in self._graphs
        ]

    def fewest(self, limit: int) -> int | None:
        """Return the least number of drops within a limit; None if all are not enough."""
        return _first(range(self.num_drops + 1), lambda n: self.peak(n, 0) <= limit)

    def most_hoisted(self, dropped: int, limit: int) -> int:
        """Return the largest number of units that may stay gathered within a limit."""
        counts = range(len(self._hoists), -1, -1)
        return _first(counts, lambda n: self.peak(dropped, n) <= limit) or 0

    def peak(self, dropped: int, hoisted: int) -> int:
        """Return the most bytes on the device at one time."""
        if (dropped, hoisted) not in self._peaks:
            tried = attempted(self._program, self.choices(dropped, hoisted))
            self._schedule(tried)
            over_time = moments(tried.gm, resident(tried).device)
            self._peaks[dropped, hoisted] = max(sum(live.values()) for _, live in over_time)
        return self._peaks[dropped, hoisted]


def _first(numbers: range, holds: Callable[[int], bool]) -> int | None:
    """Return the first number for which something holds, if it holds for all behind that; None if for none."""
    if not holds(numbers[-1]):
        return None
    low, high = 0, len(numbers) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(numbers[middle]) else (middle + 1, high)
    return numbers[low]
