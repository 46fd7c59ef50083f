"""Tables of plans: what fits on a machine, how fast it is, and what to write for it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from ..comm.mesh import DATA, EXPERT, TENSOR
from ..cost.machine import Machine
from ..graph.liveness import KINDS
from ..util.html import preformatted, table
from ..util.sizes import in_words, time_in_words
from .picture import File, draw_rows, page
from .plan import Plan

_CUTS = {TENSOR: "zerofn.parallel.tensor(model, mesh)", EXPERT: "zerofn.moe.experts(model, mesh)"}
_HEAD = (
    "mesh",
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


class Config(NamedTuple):
    """The arguments of `shard` and `compile` for one row of a table ("budget" for a memory budget), and the rows of a
    rank's batch. `mesh`: the axes of several ranks, (name, size) each; `cut`: whether leaves are cut over one.
    """

    stage: int
    offload: Any
    precision: Any
    remat: str | None
    rows: int
    memory: float = 0.0  # of a device
    machine: str = "machine"  # as written in an argument
    mesh: tuple[tuple[str, int], ...] = ()
    cut: bool = False
    hpz: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        """Return the mesh as the arguments of `Mesh.make`."""
        return dict(self.mesh) or {DATA: 1}

    @property
    def on_axes(self) -> bool:
        """Return whether the mesh has other axes than "data"."""
        return self.sizes.keys() != {DATA}

    @property
    def grid(self) -> str:
        """Return the mesh as `zerofn plan --mesh` takes it."""
        return ",".join(f"{name}={size}" for name, size in self.sizes.items())

    @property
    def options(self) -> dict[str, Any]:
        """Return the arguments for `shard`."""
        given = {"stage": self.stage, "precision": self.precision, "offload": self.offload, "hpz": self.hpz or None}
        return {name: value for name, value in given.items() if value is not None}

    def label(self, with_rows: bool = True) -> str:
        """Describe it in a few words."""
        offload = self.offload and f"offload {_short(self.offload)}"
        remat = self.remat and f"remat {self.remat}"
        rows = f"{self.rows} rows" if with_rows else ""
        parts = (
            self.on_axes and self.grid,
            f"stage {self.stage}",
            self.hpz and "hpz",
            offload,
            self.precision and _short(self.precision),
            remat,
            rows,
        )
        return ", ".join(str(x) for x in parts if x)

    def call(self) -> str:
        """Return the code to write."""
        given, first = [f"{name}={_written(value)}" for name, value in self.options.items()], ""
        if self.on_axes:
            mesh = f"zerofn.Mesh.make({', '.join(f'{name}={size}' for name, size in self.sizes.items())})"
            cuts = " | ".join(call for name, call in _CUTS.items() if self.sizes.get(name, 1) > 1)
            given.append(f"mesh=mesh, cuts={cuts}" if self.cut else f"mesh={mesh}")
            first = f"mesh = {mesh}; " if self.cut else ""
        options = ", ".join(given)
        remat = f", remat={self.remat!r}" if self.remat else ""
        remat = f", memory={int(self.memory)}" if self.remat == "budget" else remat
        return (
            f"{first}state = zerofn.shard(init_state, {options}); "
            f"step = zerofn.compile(train_step{remat}, machine={self.machine})"
        )


def _written(value: Any) -> str:
    """Return an argument as code; of a dataclass, what differs from the defaults."""
    if not dataclasses.is_dataclass(value):
        return repr(value)
    given = ((x.name, getattr(value, x.name)) for x in dataclasses.fields(value) if getattr(value, x.name) != x.default)
    return f"zerofn.{type(value).__name__}({', '.join(f'{name}={x!r}' for name, x in given)})"


class Needs(NamedTuple):
    """Bytes of a rank: on the device at the step's peak, in host memory and on drives."""

    device: int
    host: int
    disk: int

    def __repr__(self) -> str:
        away = {"in host memory": self.host, "on drives": self.disk}
        kept = {"on the device": self.device, **{where: n for where, n in away.items() if n}}
        return ", ".join(f"{in_words(n)} {where}" for where, n in kept.items())


@dataclass(frozen=True)
class Row:
    """One way to train.

    `plan`: None if the state alone is too large, and nothing else was tried. `lacks`: what the machine has too
    little of, empty if it fits.
    """

    config: Config
    needs: Needs
    lacks: str
    plan: Plan | None = field(repr=False)
    tokens: int = 0  # of a rank's batch, or its rows where it has no tokens
    unit: str = "rows"

    @property
    def fits(self) -> bool:
        """Whether the machine has enough of everything."""
        return not self.lacks

    @property
    def seconds(self) -> float:
        """Seconds of a step; infinity without a plan."""
        return self.plan.timeline().seconds if self.plan is not None else float("inf")

    @property
    def speed(self) -> float:
        """Tokens, or rows, per second of all ranks."""
        return self.tokens * self.plan.num_batches / self.seconds if self.plan is not None else 0.0

    @property
    def rate(self) -> str:
        """`speed` in words."""
        return f"{self.speed:,.0f} {self.unit}/s"

    def json(self) -> dict[str, Any]:
        """As numbers and texts."""
        known = (
            {}
            if self.plan is None
            else {
                "plan": self.plan.json(),
                "seconds": self.seconds,
                "speed": self.speed,
                "bound": self.plan.timeline().bound,
            }
        )
        written = {
            k: None if x is None else str(x) for k, x in self.config._asdict().items() if k in ("offload", "precision")
        }
        return {
            **self.config._asdict(),
            **written,
            "mesh": self.config.sizes,
            **self.needs._asdict(),
            "fits": self.fits,
            "lacks": self.lacks,
            "call": self.config.call(),
            **known,
        }

    def __repr__(self) -> str:
        c = self.config
        if self.plan is None:
            return f"{c.label()}: more than {self.needs}; {self.lacks}"
        time = self.plan.timeline()
        took = f"{time_in_words(time.seconds)} a step, bound by {time.bound}, {self.rate}"
        return f"{c.label()}: {self.needs}; {took}; {self.lacks or 'fits'}"

    def cells(self) -> list[str]:
        """Return its cells of the table."""
        c, plan = self.config, self.plan
        out = [c.grid, str(c.stage), _short(c.offload), _short(c.precision), c.remat or "-", str(c.rows)]
        out.append(f"{'' if plan else '> '}{in_words(self.needs.device)}")
        peak = plan.memory().peak if plan else {}
        out += [in_words(peak[kind]) if peak.get(kind) else "" for kind in KINDS]
        out += [in_words(n) if n else "" for n in self.needs[1:]]
        if plan is None:
            return [*out, "", "", "", "", self.lacks]
        time = plan.timeline()
        return [*out, _along(plan.sent_along), time_in_words(time.seconds), time.bound, self.rate, self.lacks or "fits"]


def _along(sent: dict[str, int]) -> str:
    """Return bytes by axis as a table shows them, the most first; without the axis, where there is one."""
    several, most_first = len(sent) > 1, sorted(sent.items(), key=lambda x: -x[1])
    return ", ".join(f"{axis} {in_words(n)}" if several else in_words(n) for axis, n in most_first if n)


def _short(value: Any) -> str:
    """Return an argument as a table shows it."""
    if value is None or isinstance(value, str):
        return value or "-"
    return _written(value).partition("(")[2].rstrip(")").replace("'", "").replace("torch.", "")


def lacking(needs: Needs, machine: Machine, num_ranks: int) -> str:
    """Say what a machine with that many ranks on a node has too little of; empty if it has enough."""
    pairs = [
        ("memory" if machine.device == "cpu" else "device memory", needs.device, machine.memory),
        ("host memory", needs.host * num_ranks, machine.host_memory),
        ("room on drives", needs.disk * num_ranks, machine.disk),
    ]
    return ", ".join(
        f"{in_words(needed - there)} of {what} too little" for what, needed, there in pairs if needed > there
    )


class Table:
    """Plans for `world` ranks of `machine`, one a row; `best` is recommended. Methods of `Plan` speak of that row.

    `left_out`: what was not planned, and why, a sentence each.
    """

    def __init__(
        self, rows: Sequence[Row], machine: Machine, world: int, name: str, left_out: Sequence[str] = ()
    ) -> None:
        self.rows, self.machine, self.world, self.name = list(rows), machine, world, name
        self.left_out = list(left_out)

    @property
    def best(self) -> Row:
        """The fastest row that fits; of about equally fast ones, the one with the least memory.

        Raises `MemoryError`, which names the nearest miss, if none fits.
        """
        found = self._best
        if found is None:
            near = self.nearest
            raise MemoryError(
                f"{self.name}: nothing fits on {self.world} rank(s) of {self.machine.name}. The nearest "
                f"is {near.config.call()} with {near.config.rows} row(s) a rank: {near.lacks}. Give it "
                "more ranks, a machine with more, fewer rows, or optim.adamw(..., moments='8bit')."
            )
        return found

    @cached_property
    def _best(self) -> Row | None:
        fitting = [row for row in self.rows if row.fits]
        fastest = max((row.speed for row in fitting), default=0.0)
        about = [row for row in fitting if row.speed >= 0.98 * fastest]
        return min(about, key=lambda row: sum(row.needs), default=None)

    @property
    def nearest(self) -> Row:
        """The row that lacks the least device memory, among planned rows if there are any."""
        looked_at = [row for row in self.rows if row.plan is not None] or self.rows
        return min(looked_at, key=lambda row: (row.needs.device, row.needs.host))

    @property
    def plan(self) -> Plan:
        """The plan of the best row, or of the nearest one if none fits."""
        plan = (self._best or self.nearest).plan
        if plan is None:
            raise MemoryError(f"{self.name}: the state alone does not fit in any row; see the table.")
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

    def text(self) -> str:
        """Return all rows, and the code for the best one."""
        cells, lines, best = self._cells(), [self._title()], self._best
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        for row, told in zip((None, *self.rows), cells, strict=True):
            mark = "*" if row is not None and row is best else " "
            lines.append(f"{mark} " + "  ".join(x.rjust(w) for x, w in zip(told, widths, strict=True)).rstrip())
        lines += [f"  left out: {x}" for x in self.left_out]
        lines.append(f"* {self._advice()}" if best is not None else self._advice())
        return "\n".join(lines)

    def _title(self) -> str:
        return (
            f"{self.name} on {self.world} rank(s) of {self.machine.name}, {in_words(self.machine.memory)} each; "
            "bytes of a rank at its peak, by kind"
        )

    def _cells(self) -> list[list[str]]:
        """Return the head and all rows, without columns that are empty."""
        cells = [list(_HEAD), *(row.cells() for row in self.rows)]
        several = any(row.config.on_axes for row in self.rows)
        full = [k for k, name in enumerate(_HEAD) if any(row[k].strip("-") for row in cells[1:]) or not name]
        shown = [k for k in full if several or _HEAD[k] != "mesh"]
        return [[told[k] for k in shown] for told in cells]

    def _advice(self) -> str:
        """Return the code for the best row."""
        near = self.nearest
        nothing = f"Nothing fits. The nearest: {near.config.call()}, {near.lacks}."
        return nothing if self._best is None else self._best.config.call()

    def json(self) -> dict[str, Any]:
        """Return the whole table as numbers (bytes, seconds) and texts."""
        best = None if self._best is None else self.rows.index(self._best)
        return {
            "name": self.name,
            "ranks": self.world,
            "machine": self.machine.name,
            "best": best,
            "rows": [row.json() for row in self.rows],
            "left_out": self.left_out,
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
            [row.plan.memory().peak if row.plan else {"state": row.needs.device} for row in self.rows],
            [row.rate if row.fits else row.lacks.split(" too")[0] for row in self.rows],
            self.machine.memory,
            file,
            title=f"{self.name} on {self.world} rank(s) of {self.machine.name}",
        )

    def _repr_html_(self) -> str:
        head, *rows = self._cells()
        marked = None if self._best is None else self.rows.index(self._best)
        body = table(self._title(), head, rows, left=[len(head) - 1], marked=marked)
        told = [*(f"left out: {x}" for x in self.left_out), self._advice()]
        return page(body + preformatted("\n".join(told)), self._draw)

    def __repr__(self) -> str:
        return self.text()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)
