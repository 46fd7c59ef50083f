"""Tables of plans: what fits on a machine, how fast it is, and the code to write for it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from ..cost.machine import Machine
from ..util.html import paragraph, preformatted, table
from ..util.sizes import counted, in_words
from .narrow_table import code_of, details_of, filled, narrow_columns, narrow_lines, remat_in_words, shared
from .picture import File, draw_rows, page
from .plan import Plan
from .plan_row import Row
from .verdict import fits, nothing_fits
from .wide_table import wide_lines
from .wire import BreakEven


class Table:
    """Plans for `world` ranks of `machine`, one per row; `best` is the recommended row. Methods that a `Plan` has, too,
    return the values of this row.

    `left_out`: a sentence for each mesh that was not planned, with the reason.
    """

    def __init__(
        self, rows: Sequence[Row], machine: Machine, world: int, name: str, left_out: Sequence[str] = ()
    ) -> None:
        self.rows, self.machine, self.world, self.name = list(rows), machine, world, name
        self.left_out = list(left_out)

    @property
    def best(self) -> Row:
        """The fastest row that fits; of rows about equally fast, the one with the least memory. Never an estimate.

        Raises `MemoryError`, which names the row that nearly fits, if none fits.
        """
        found = self._best
        if found is None:
            near = self.nearest
            raise MemoryError(
                f"{self.name}: nothing fits on {counted(self.world, 'rank')} of {self.machine.name}. The nearest "
                f"is {near.config.call()} with {counted(near.config.rows, 'row')} a rank: {near.lacks}. Use more "
                "ranks, a machine with more memory, fewer rows, or optim.adamw(..., moments='8bit')."
            )
        return found

    @cached_property
    def _best(self) -> Row | None:
        fitting = [row for row in self.rows if row.fits and row.plan is not None]
        fastest = max((row.speed for row in fitting), default=0.0)
        about = [row for row in fitting if row.speed >= 0.98 * fastest]
        return min(about, key=lambda row: sum(row.needs), default=None)

    @property
    def nearest(self) -> Row:
        """The row that lacks the least device memory: among planned rows if there are any, otherwise among estimated
        ones.
        """
        planned = [row for row in self.rows if row.plan is not None]
        looked_at = planned or [row for row in self.rows if row.estimate is not None] or self.rows
        return min(looked_at, key=lambda row: (row.needs.device, row.needs.host))

    @property
    def plan(self) -> Plan:
        """The plan of the best row, or of the nearest one if none fits."""
        plan = (self._best or self.nearest).plan
        if plan is None:
            raise MemoryError(f"{self.name}: no plan has room even for the state alone; print the table for details.")
        return plan

    def options(self) -> dict[str, Any]:
        """Return the arguments that `shard(..., stage="auto", plan=table)` uses. Raises `MemoryError` if nothing
        fits.
        """
        return self.best.config.options

    def memory(self) -> Any:
        """See `Plan.memory`."""
        return self.plan.memory()

    def collectives(self) -> Any:
        """See `Plan.collectives`."""
        return self.plan.collectives()

    def transfers(self) -> Any:
        """See `Plan.transfers`."""
        return self.plan.transfers()

    @property
    def graph(self) -> Any:
        """See `Plan.graph`."""
        return self.plan.graph

    def text(self, wide: bool = False, price: float | None = None) -> str:
        """Return a verdict, all rows, and the code for the best one, in 80 columns.

        `wide`: with all columns: the bytes of each kind, what is sent, what limits the step. `price`: of a GPU-hour;
        the verdict then has the cost of a billion tokens. `print(table)` shows the text without arguments.
        """
        best, rows = self._best, self.rows
        notes = [*self._details(), *(f"left out: {x}" for x in self.left_out)]
        if wide:
            lines = wide_lines(rows, best)
            return "\n".join(
                [self.verdict(price), "", self._title(), *lines, *(f"  {x}" for x in notes), *self._code()]
            )
        title = f"{self._title()}{shared(rows)}"
        shown = [] if self._shown is None else details_of(self._shown)
        below = [filled(x, "  ") for x in (*shown, *remat_in_words(rows), *notes)]
        told = [filled(self.verdict(price)), "", filled(title), *narrow_lines(rows, best), ""]
        return "\n".join([*told, *below, *self._code(wrap=True)])

    def verdict(self, price: float | None = None) -> str:
        """Return in a sentence whether something fits, what it costs, and which row is faster but needs more.

        `price`: of a GPU-hour; the sentence then has the cost of a billion tokens, too.
        """
        if not self.rows:
            return f"{self.name}: nothing was planned."
        if self._best is None:
            return nothing_fits(self.nearest)
        return fits(self._best, self.rows, self.machine, self.world, price=price)

    def _title(self) -> str:
        ranks = f"{self.world} rank{'s' * (self.world != 1)}"
        return f"{self.name} on {ranks} of {self.machine.name}, {in_words(self.machine.memory)} each"

    def _details(self) -> list[str]:
        """Return the `Row.details` of the best row, or of the nearest one, and the gain of codes."""
        wire = [] if self._break_even is None else [str(self._break_even)]
        return [*([] if self._shown is None else self._shown.details()), *wire]

    @property
    def _shown(self) -> Row | None:
        return (self._best or self.nearest) if self.rows else None

    @cached_property
    def _break_even(self) -> BreakEven | None:
        plan = None if self._shown is None else self._shown.plan
        return None if plan is None else plan.break_even

    def _code(self, wrap: bool = False) -> list[str]:
        """Return the code for the best row, or for the nearest one."""
        row = self._shown
        if row is None:
            return []
        head = "" if self._best is None else "* "
        return ["", code_of(row.config)] if wrap else [f"{head}{row.config.call()}"]

    def json(self) -> dict[str, Any]:
        """Return the whole table as numbers (bytes, seconds) and texts."""
        best = None if self._best is None else self.rows.index(self._best)
        return {
            "name": self.name,
            "ranks": self.world,
            "machine": self.machine.name,
            "verdict": self.verdict(),
            "best": best,
            "rows": [row.json() for row in self.rows],
            "left_out": self.left_out,
            "wire": None if self._break_even is None else self._break_even._asdict(),
        }

    def picture(self, path: str | os.PathLike[str]) -> None:
        """Draw the device memory of each row, by kind, and its speed, to a file such as "plan.png".

        Raises `ImportError` if matplotlib is missing.
        """
        self._draw(path)

    def _draw(self, file: File) -> None:
        several = len({row.config.rows for row in self.rows}) > 1
        draw_rows(
            [row.config.label(several) for row in self.rows],
            [row.peak or {"state": row.needs.device} for row in self.rows],
            [row.rate if row.fits else row.lacks.split(" too")[0] for row in self.rows],
            self.machine.memory,
            file,
            title=self._title(),
        )

    def _repr_html_(self) -> str:
        head, *rows = map(list, zip(*narrow_columns(self.rows), strict=True))
        marked = None if self._best is None else self.rows.index(self._best)
        body = paragraph(self.verdict()) + table(
            f"{self._title()}{shared(self.rows)}", head, rows, left=[len(head) - 1], marked=marked
        )
        shown = [] if self._shown is None else details_of(self._shown)
        told = [*shown, *self._details(), *(f"left out: {x}" for x in self.left_out), *self._code(wrap=True)]
        return page(body + preformatted("\n".join(told)), self._draw)

    def __repr__(self) -> str:
        return self.text()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)
