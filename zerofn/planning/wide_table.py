"""A table of plans with all columns, for wide screens and notebooks."""

from __future__ import annotations

from collections.abc import Sequence

from ..graph.liveness import KINDS
from ..util.sizes import in_words, time_in_words
from .plan_row import Row, along, in_short

_HEAD = (
    "mesh",
    "pipeline",
    "stage",
    "offload",
    "precision",
    "remat",
    "batch",
    "device",
    *KINDS,
    "host",
    "drives",
    "sent",
    "step",
    "bound by",
    "speed",
    "",
)


def wide_lines(rows: Sequence[Row], best: Row | None) -> list[str]:
    """Return the head and a line for each row, the best one with a star."""
    cells = _columns(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    marks = [" ", *("*" if row is best else " " for row in rows)]
    lines = ["  ".join([*map(str.rjust, told[:-1], widths), told[-1]]) for told in cells]
    return [f"{mark} {line}".rstrip() for mark, line in zip(marks, lines, strict=True)]


def _columns(rows: Sequence[Row]) -> list[list[str]]:
    """Return the head and the cells of all rows, without columns that are empty."""
    cells = [list(_HEAD), *map(wide_cells, rows)]
    several = any(row.config.on_axes for row in rows)
    full = [k for k, name in enumerate(_HEAD) if any(row[k].strip("-") for row in cells[1:]) or not name]
    shown = [k for k in full if several or _HEAD[k] != "mesh"]
    return [[told[k] for k in shown] for told in cells]


def wide_cells(row: Row) -> list[str]:
    """Return a row's cells, one for each column of the head."""
    c, peak = row.config, row.peak
    about = "~ " if row.estimate is not None else ""
    stage = f"{c.stage} hpz" if c.again else str(c.stage)
    out = [c.grid, str(row.pipelined or ""), stage, in_short(c.offload), precision_of(row), c.remat or "-", str(c.rows)]
    out.append(f"{about if row.bound else '> '}{in_words(row.needs.device)}")
    out += [in_words(peak[kind]) if peak.get(kind) else "" for kind in KINDS]
    out += [in_words(n) if n else "" for n in row.needs[1:]]
    if not row.bound:
        return [*out, "", "", "", "", row.lacks]
    took, rate = f"{about}{time_in_words(row.seconds)}", f"{about}{row.rate}"
    return [*out, along(row.sent), took, row.bound, rate, row.lacks or "fits"]


def precision_of(row: Row) -> str:
    """Return the precision as a table shows it: without one, the dtype that parameters have."""
    c = row.config
    return (c.own or "-" if c.precision is None else in_short(c.precision)) + (f", wire {c.wire}" if c.wire else "")
