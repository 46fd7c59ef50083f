"""The first sentence of a table of plans: whether something fits, what it costs, and what would be better."""

from __future__ import annotations

from collections.abc import Sequence

from ..cost.machine import Machine
from ..util.sizes import in_words
from .plan_row import Row

_BILLION = {"tokens": (1e9, "billion tokens"), "rows": (1e6, "million rows")}
_SLIGHTLY = 1.1  # times as fast: below, a gain is shown in percent


def fits(best: Row, rows: Sequence[Row], machine: Machine, world: int, *, price: float | None = None) -> str:
    """Return the verdict on a table whose row `best` is recommended. `price`: of a GPU-hour."""
    spare = machine.memory - best.needs.device
    return f"Fits with {in_words(spare)} to spare; {_cost(best, machine, world, price)}; {_better(best, rows)}."


def nothing_fits(nearest: Row) -> str:
    """Return the verdict on a table without a row that fits."""
    return f"Nothing fits. The nearest: {nearest.config.label()}, {nearest.lacks}."


def hours(row: Row, world: int) -> float:
    """Return the device-hours of `world` devices that a billion tokens take, or a million rows without tokens."""
    return world * _BILLION[row.unit][0] / row.speed / 3600


def _cost(best: Row, machine: Machine, world: int, price: float | None) -> str:
    """Return the device-hours of a billion tokens, and their price."""
    took = hours(best, world)
    device = "rank" if machine.device == "cpu" else "GPU"
    at = "" if price is None else f" ({_digits(took * price)} at {price:g} each)"
    return f"{_digits(took)} {device}-hours{at} per {_BILLION[best.unit][1]}"


def _better(best: Row, rows: Sequence[Row]) -> str:
    """Return the faster row that asks for the least: one that needs more of the memory, or lacks a little of it."""
    faster = [row for row in rows if row.bound and row.speed > best.speed]
    if not faster:
        return "nothing planned here is faster"
    row = min(faster, key=lambda row: (row.needs.device, row.needs.host, row.needs.disk))
    times = row.speed / best.speed
    gain = f"{times - 1:.1%} faster" if times < _SLIGHTLY else f"{times:.2f} times as fast"
    if row.estimate is not None:
        gain = f"about {gain}"
    more = row.needs.device - best.needs.device
    asks = f"needs {in_words(more)} more" if row.fits and more > 0 else f"but {row.lacks}" if row.lacks else ""
    return f"the next alternative: {_unlike(row, best)}, {gain}{asks and ', '}{asks}"


def _unlike(row: Row, best: Row) -> str:
    """Name a row by what it does otherwise than the best one."""
    mine, others = (x.config.label().split(", ") for x in (row, best))
    found = [x for x in mine if x not in others]
    kinds = {x.split()[0] for x in mine}
    found += [f"no {x}" for x in others if x not in mine and x.split()[0] not in kinds]
    return ", ".join(found) or row.config.label()


def _digits(number: float) -> str:
    """Three digits, or all before the point.

    >>> _digits(44.23), _digits(12345.6), _digits(0.01234)
    ('44.2', '12,346', '0.0123')
    """
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
