"""A row of a table of plans: one way to train, its memory and time, and the code to write for it."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..comm.axes import USUAL, kind_of
from ..cost.machine import Machine
from ..cost.simulator import limit_in_words
from ..graph.liveness import Live
from ..util.sizes import in_words, time_in_words
from .plan import Plan
from .rounds import TimedRounds


class Config(NamedTuple):
    """The arguments of `shard` and `compile` for one row of a table ("budget" for a memory budget), and the rows of a
    rank's batch.

    `mesh`: the axes with several ranks, as (name, size). `cuts`: the argument `cuts=` as code, empty if no leaf is cut.
    `again`: whether each shard is cut once more, over the replicas (hpZ). `wire`: in addition to that of the precision.
    `rounds`: whether the step is one of `zerofn.diloco`. `own`: the dtypes that parameters have without a precision.
    """

    stage: int
    offload: Any
    precision: Any
    remat: str | None
    rows: int
    memory: float = 0.0  # of a device
    machine: str = "machine"  # as written in an argument
    mesh: tuple[tuple[str, int], ...] = ()
    cuts: str = ""
    again: bool = False
    wire: Any = None
    rounds: bool = False
    own: str = ""

    @property
    def sizes(self) -> dict[str, int]:
        """Return the mesh as the arguments of `Mesh.make`."""
        return dict(self.mesh) or {USUAL: 1}

    @property
    def on_axes(self) -> bool:
        """Return whether the mesh has other axes than the usual one."""
        return self.sizes.keys() != {USUAL}

    @property
    def grid(self) -> str:
        """Return the mesh as `zerofn plan --mesh` takes it."""
        return ",".join(f"{name}={size}" for name, size in self.sizes.items())

    @property
    def options(self) -> dict[str, Any]:
        """Return the arguments for `shard`."""
        given = {"stage": self.stage, "precision": self.precision, "offload": self.offload, "wire": self.wire}
        given["hpz"] = self.again or None
        return {name: value for name, value in given.items() if value is not None}

    def label(self, with_rows: bool = True) -> str:
        """Describe it in a few words."""
        offload = self.offload and f"offload {in_short(self.offload)}"
        remat = self.remat and f"remat {self.remat}"
        rows = f"{self.rows} row{'s' * (self.rows != 1)}" if with_rows else ""
        parts = (
            self.on_axes and self.grid,
            f"stage {self.stage}",
            self.again and "hpz",
            offload,
            self.precision and in_short(self.precision),
            self.wire and f"wire {self.wire}",
            remat,
            rows,
        )
        return ", ".join(str(x) for x in parts if x)

    def call(self) -> str:
        """Return the code to write."""
        given, first = [f"{name}={as_code(value)}" for name, value in self.options.items()], ""
        if self.on_axes:
            mesh = f"zerofn.Mesh.make({', '.join(f'{name}={size}' for name, size in self.sizes.items())})"
            prepare = "".join(kind_of(name).prepare for name in self.sizes)
            named = self.cuts or prepare
            given.append(f"mesh={'mesh' if named else mesh}" + (f", cuts={self.cuts}" if self.cuts else ""))
            first = f"mesh = {mesh}; {prepare}" if named else ""
        options = ", ".join(given)
        remat = f", remat={self.remat!r}" if self.remat else ""
        remat = f", memory={int(self.memory)}" if self.remat == "budget" else remat
        state, step = f"zerofn.shard(init_state, {options})", "train_step"
        if self.rounds:
            state, step = f"step.init({state})", "step"
        return f"{first}state = {state}; step = zerofn.compile({step}{remat}, machine={self.machine})"


def as_code(value: Any) -> str:
    """Return an argument as code; for a dataclass, only the fields that differ from the defaults."""
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


class Estimate(NamedTuple):
    """The bytes and seconds of a step, estimated from plans with `few` and with `more` of its layers.

    `sent`: bytes of a rank by axis. `bound`: as `Timeline.bound`. `num_batches`: as `Plan.num_batches`.
    """

    few: int
    more: int
    seconds: float
    sent: dict[str, int]
    bound: str
    num_batches: int


class OtherKind(NamedTuple):
    """Steps of a kind that the row does not describe: `number` of the first `until` steps. `name`: the kind's name;
    `row`: its own row.
    """

    name: str
    number: int
    until: int
    row: Row | None = None

    def __str__(self) -> str:
        row, number = self.row, f"{self.number:,} of " if self.number < self.until else ""
        head = f"{self.name}, {number}the first {self.until:,} steps"
        if row is None or not row.bound:
            return f"{head}: {'not planned' if row is None else row.lacks}"
        took = f"{time_in_words(row.seconds)} a step, {limit_in_words(row.bound)}"
        told = f"{took}, {in_words(row.needs.device)} at the peak"
        return f"{head}: {told}; sent: {along(row.sent) or 'nothing'}"


class OfStages(NamedTuple):
    """A rank of a pipeline: its stages; the elements of the parameters with which it computes; bytes by kind at its
    peak; the shares of a step in which it waits for other stages, and for transfers within its own; the bytes that it
    sends to others.
    """

    stages: tuple[int, ...]
    elements: int
    peak: Live
    idle: float
    exposed: float
    sent: int

    @property
    def device(self) -> int:
        """Bytes at the peak."""
        return sum(self.peak.values())


class Sums(NamedTuple):
    """Bytes of a rank's gradients that are reduced over other ranks: as whole gradients, as the rank's shards, and as
    sent by one reduction of all of them.
    """

    whole: int
    shards: int
    sent: int


class Pipelined(NamedTuple):
    """A step as a pipeline: the schedule and the number of microbatches; seconds, and the lane that limits them; each
    rank along `pipe`; the gradients of the rank that has the most; and the longest transfer to a next stage, as a share
    of a stage's forward pass.
    """

    schedule: str
    microbatches: int
    seconds: float
    bound: str
    ranks: tuple[OfStages, ...]
    sums: Sums = Sums(0, 0, 0)
    crossing: float = 0.0

    @property
    def reduces(self) -> dict[str, tuple[int, int]]:
        """For each `reduce` of `zerofn.accumulate` the bytes that a rank sends in a step to add gradients over others,
        and those of gradients that it keeps from one microbatch to the next.
        """
        whole, shards, sent = self.sums
        rounds = -(-self.microbatches // len(self.ranks))
        return {
            "step": (sent, whole),
            "round": (rounds * sent, whole + shards * (rounds > 1)),
            "microbatch": (self.microbatches * sent, shards),
        }

    @property
    def idle(self) -> float:
        """The bubble: the share of a step in which ranks wait for other stages, on average."""
        return sum(rank.idle for rank in self.ranks) / len(self.ranks)

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return sum(len(rank.stages) for rank in self.ranks)

    def __str__(self) -> str:
        number = f"{self.microbatches} microbatch{'es' * (self.microbatches != 1)}"
        return f"{self.schedule}, {self.num_stages} stages, {number}, {self.idle:.0%} idle"

    def details(self) -> list[str]:
        """Return a line for each rank, and one for when gradients may be reduced."""
        costs = (f"{how} sends {in_words(n)} a step and keeps {in_words(k)}" for how, (n, k) in self.reduces.items())
        sums = [f"gradients of accumulate(reduce=), of a rank: {'; '.join(costs)}"] if self.sums.sent else []
        return [
            f"rank {k} along pipe: {_numbered(x.stages)}, {x.elements:,} parameters, {in_words(x.device)} "
            f"at its peak ({', '.join(f'{kind} {in_words(n)}' for kind, n in x.peak.items() if n)}), "
            f"{x.idle:.0%} idle, {x.exposed:.0%} waiting for transfers within, sends {in_words(x.sent)} along pipe"
            for k, x in enumerate(self.ranks)
        ] + sums


def _numbered(stages: tuple[int, ...]) -> str:
    return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"


@dataclass(frozen=True)
class Row:
    """One way to train.

    `pipelined`: the plan of its stages, if the mesh has several. `microbatches`: the number over which a step
    accumulates. `others`: other kinds of steps, if the step has several. `rounds`: what replicas that train apart send
    one another; seconds, speed and bytes are then averages over a round. `plan`: of the rank that needs the most. None
    if the state alone is too large, and nothing else was tried; and for an `estimate`. `lacks`: what the machine has
    too little of, empty if the row fits.
    """

    config: Config
    needs: Needs
    lacks: str
    plan: Plan | None = field(repr=False)
    tokens: int = 0  # of a rank's batch, or its rows where it has no tokens
    unit: str = "rows"
    estimate: Estimate | None = None
    pipelined: Pipelined | None = None
    microbatches: int = 1
    others: tuple[OtherKind, ...] = ()
    rounds: TimedRounds | None = None

    @property
    def fits(self) -> bool:
        """Whether the machine has enough of everything."""
        return not self.lacks

    @property
    def seconds(self) -> float:
        """Seconds of a step; infinity without a plan and an estimate."""
        if self.rounds is not None:
            return self.rounds.seconds
        if self.pipelined is not None:
            return self.pipelined.seconds
        if self.plan is not None:
            return self.plan.timeline().seconds
        return self.estimate.seconds if self.estimate is not None else math.inf

    @property
    def sent(self) -> dict[str, int]:
        """Bytes that a rank sends in a step, by the axis of the mesh."""
        if self.rounds is not None:
            return self.rounds.sent
        if self.plan is not None:
            return self.plan.sent_along
        return self.estimate.sent if self.estimate is not None else {}

    @property
    def bound(self) -> str:
        """The lane that limits the step; empty without a plan and an estimate."""
        if self.rounds is not None:
            return self.rounds.bound
        if self.pipelined is not None:
            return self.pipelined.bound
        if self.plan is not None:
            return self.plan.timeline().bound
        return self.estimate.bound if self.estimate is not None else ""

    @property
    def speed(self) -> float:
        """Tokens, or rows, per second, over all ranks."""
        found = self.plan if self.plan is not None else self.estimate
        replicas = 1 if self.rounds is None else self.rounds.of.replicas
        return self.tokens * replicas * found.num_batches / self.seconds if found is not None else 0.0

    @property
    def peak(self) -> Live:
        """Bytes of the device at the step's peak, by kind; empty without a plan."""
        found = Counter({} if self.plan is None else self.plan.memory().peak)
        if self.rounds is not None:
            found["state"] += self.rounds.beside
        return dict(found)

    def details(self) -> list[str]:
        """Return lines for facts without a column in the table: ranks of a pipeline, rounds, other kinds of steps."""
        of_ranks = [] if self.pipelined is None else self.pipelined.details()
        return [*of_ranks, *([] if self.rounds is None else [str(self.rounds)]), *map(str, self.others)]

    @property
    def rate(self) -> str:
        """`speed` in words."""
        return f"{self.speed:,.0f} {self.unit}/s"

    def json(self) -> dict[str, Any]:
        """As numbers and texts."""
        told = {"seconds": self.seconds, "speed": self.speed, "bound": self.bound}
        known: dict[str, Any] = {} if self.plan is None else {"plan": self.plan.json(), **told}
        if self.estimate is not None:
            known = {"estimate": {**self.estimate._asdict(), **told}}
        if self.pipelined is not None:
            ranks = [x._asdict() for x in self.pipelined.ranks]
            more = {"ranks": ranks, "sums": self.pipelined.sums._asdict(), "reduces": self.pipelined.reduces}
            known["pipeline"] = {**self.pipelined._asdict(), "idle": self.pipelined.idle, **more}
        if self.rounds is not None:
            known["rounds"] = self.rounds.json()
        if self.others:
            known["others"] = [{**x._asdict(), "row": None if x.row is None else x.row.json()} for x in self.others]
        written = {
            k: None if x is None else str(x)
            for k, x in self.config._asdict().items()
            if k in ("offload", "precision", "wire")
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
        if not self.bound:
            return f"{c.label()}: more than {self.needs}; {self.lacks}"
        about = "about " if self.plan is None else ""
        took = f"{time_in_words(self.seconds)} a step, {limit_in_words(self.bound)}, {self.rate}"
        return f"{c.label()}: {about}{self.needs}; {took}; {self.lacks or 'fits'}"


def along(sent: dict[str, int]) -> str:
    """Return bytes by axis as a table shows them, the largest first; without the axis if there is only one."""
    several, most_first = len(sent) > 1, sorted(sent.items(), key=lambda x: -x[1])
    return ", ".join(f"{axis} {in_words(n)}" if several else in_words(n) for axis, n in most_first if n)


def in_short(value: Any) -> str:
    """Return an argument as a table shows it."""
    if value is None or isinstance(value, str):
        return value or "-"
    return as_code(value).partition("(")[2].rstrip(")").replace("'", "").replace("torch.", "")


def lacking(needs: Needs, machine: Machine, num_ranks: int) -> str:
    """Return in words what a machine with this number of ranks on a node has too little of; empty if it has enough."""
    pairs = [
        ("memory" if machine.device == "cpu" else "device memory", needs.device, machine.memory),
        ("host memory", needs.host * num_ranks, machine.host_memory),
        ("room on drives", needs.disk * num_ranks, machine.disk),
    ]
    return ", ".join(
        f"{in_words(needed - there)} of {what} too little" for what, needed, there in pairs if needed > there
    )
