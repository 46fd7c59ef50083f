"""The schedules of the field, by name, for any number of ranks and microbatches.

GPipe (arXiv 1811.06965); 1F1B and interleaved (2006.15704, 2104.04473); ZB-H1 and ZB-V (2401.10241). Idle time of a
rank, and the most microbatches that one holds, of p ranks with v equal stages each and m microbatches, if transfers are
free and a rank's layers take F, I and W seconds:

    gpipe            (p - 1)(F + I + W)            m
    1f1b             (p - 1)(F + I + W)            p
    zb-h1            (p - 1)(F + I - W)            p
    interleaved      (p - 1)(F + I + W) / v        p + (p - 1) / v
    interleaved-zb   (p - 1)(F + I - W) / v        p
    zbv              (p - 1)F / v, if F = I = W    p
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal, NamedTuple

from ..util.errors import nearest
from .actions import Action, Kind, Placement, Schedule, Style, whole_at_first

ScheduleName = Literal["gpipe", "1f1b", "zb-h1", "interleaved", "interleaved-zb", "zbv"]
# (rank, ranks, microbatches, chunks) -> the actions of that rank, stage 0's as those of any other stage
Order = Callable[[int, int, int, int], Iterator[Action]]


class Named(NamedTuple):
    """A row of `NAMES`. `chunks`: how many stages a rank has if nobody says. `any_chunks`: whether that may change."""

    style: Style
    order: Order
    chunks: int = 1
    any_chunks: bool = False

    def placement(self, ranks: int, chunks: int | None = None) -> Placement:
        """Where the stages of such a schedule lie."""
        return Placement(self.style, ranks, chunks or self.chunks)


def gpipe(rank: int, ranks: int, microbatches: int, chunks: int = 1) -> Iterator[Action]:
    """All forward passes, then all backward passes."""
    del ranks, chunks
    kinds: tuple[Kind, ...] = ("F", "B")
    for kind in kinds:
        yield from (Action(rank, kind, k) for k in range(microbatches))


def one_f_one_b(
    rank: int, ranks: int, microbatches: int, chunks: int, *, per_hop: int = 1, split: bool = False
) -> Iterator[Action]:
    """Some forward passes, then a forward and a backward pass in turn, then the backward passes that are left.

    With several chunks microbatches go in rounds of about `ranks`, each round through one chunk after another. A rank
    begins with a round for each chunk but the last, and `per_hop` forward passes for each rank behind it. `split`: W
    follows `rank` entries after its I, so that it fills the time in which a rank would wait for gradients at the end.
    """
    rounds = _rounds(ranks, microbatches) if chunks > 1 else [range(microbatches)]
    forward = [(c * ranks + rank, k) for these in rounds for c in range(chunks) for k in these]
    backward = [(c * ranks + rank, k) for these in rounds for c in reversed(range(chunks)) for k in these]
    warm_up = (chunks - 1) * len(rounds[0]) + per_hop * (ranks - 1 - rank)
    lag = rank if split else 0
    yield from (Action(s, "F", k) for s, k in forward[:warm_up])
    for i, (s, k) in enumerate(backward):
        if warm_up + i < len(forward):
            stage, microbatch = forward[warm_up + i]
            yield Action(stage, "F", microbatch)
        yield Action(s, "I" if split else "B", k)
        if split and i >= lag:
            stage, microbatch = backward[i - lag]
            yield Action(stage, "W", microbatch)
    if split:
        yield from (Action(s, "W", k) for s, k in backward[max(0, len(backward) - lag) :])


def zbv(rank: int, ranks: int, microbatches: int, chunks: int = 2) -> Iterator[Action]:
    """ZB-V: down the ranks and up again. No rank but for the start and the end waits if F, I and W take equal time.

    It is made for 2p - 1 microbatches at least; of fewer, those that are not there are left out.
    """
    del chunks
    return (x for x in _zbv(rank, ranks, max(2 * ranks - 1, microbatches)) if x.microbatch < microbatches)


def _zbv(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    down, up = rank, 2 * ranks - 1 - rank
    count: Counter[tuple[Kind, int]] = Counter()

    def do(stage: int, *kinds: Kind) -> Iterator[Action]:
        for kind in kinds:
            yield Action(stage, kind, count[kind, stage])
            count[kind, stage] += 1

    for _ in range(2 * (ranks - rank) - 1):
        yield from do(down, "F")
    for _ in range(rank):
        yield from do(up, "F")
        yield from do(down, "F")
    for _ in range(ranks - rank):
        yield from do(up, "F", "I", "W")
    while count["F", up] < microbatches:
        if count["F", down] < microbatches:
            yield from do(down, "F")
        yield from do(down, "I", "W")
        yield from do(up, "F", "I", "W")
    for _ in range(rank):
        yield from do(down, "I")
        yield from do(up, "I")
    for _ in range(ranks - rank):
        yield from do(down, "I", "W")
    for stage in (up, down):
        while count["W", stage] < microbatches:
            yield from do(stage, "W")


def _rounds(ranks: int, microbatches: int) -> list[range]:
    """Microbatches in rounds of `ranks` or more, as equal as can be: a shorter round leaves ranks idle."""
    n = max(1, microbatches // ranks)
    ends = [-(-microbatches * i // n) for i in range(n + 1)]
    return [range(*x) for x in zip(ends, ends[1:], strict=False)]


NAMES: dict[str, Named] = {
    "gpipe": Named("line", gpipe),
    "1f1b": Named("line", one_f_one_b),
    "zb-h1": Named("line", partial(one_f_one_b, split=True)),
    "interleaved": Named("loop", partial(one_f_one_b, per_hop=2), 2, any_chunks=True),
    "interleaved-zb": Named("loop", partial(one_f_one_b, split=True), 2, any_chunks=True),
    "zbv": Named("v", zbv, 2),
}


def make(name: ScheduleName, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """Return the schedule of a name in `NAMES`, with `chunks` stages on each rank.

    Raises `ValueError` for a name that is not known, fewer than one rank, microbatch or chunk, and another number of
    chunks than the schedule is made for.

    >>> schedule = make("zb-h1", ranks=2, microbatches=2)
    >>> [str(action) for action in schedule.orders[1]]
    ['1F0', '1I0', '1F1', '1I1', '1W0', '1W1']
    """
    if name not in NAMES:
        near = nearest(name, NAMES)
        meant = f"did you mean {near[0]!r}?" if near else f"these are known: {', '.join(NAMES)}."
        raise ValueError(f"schedule {name!r} is not known; {meant}")
    row = NAMES[name]
    chunks = row.chunks if chunks is None else chunks
    if min(ranks, microbatches, chunks) < 1:
        raise ValueError(
            f"schedule {name!r} needs at least 1 rank, microbatch and chunk, got {ranks}, {microbatches} and {chunks}."
        )
    if chunks != row.chunks and not row.any_chunks:
        raise ValueError(
            f"schedule {name!r} needs chunks={row.chunks}, got {chunks}. For another number, write 'interleaved'."
        )
    orders = (row.order(rank, ranks, microbatches, chunks) for rank in range(ranks))
    placement = row.placement(ranks, chunks)
    return Schedule(name, placement, microbatches, tuple(tuple(whole_at_first(x)) for x in orders))
