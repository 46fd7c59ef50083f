"""`Plan`: the memory that a step needs and the bytes that it moves, computed before it runs."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .._torch_compat import OpOverload
from ..cost.machine import Machine, machine_of
from ..cost.op_cost import SENT, Flops, Traffic, flops_of_step, moved, traffic
from ..cost.op_timer import measured
from ..cost.simulator import Timeline, limit_in_words
from ..dry_run.fake_machine import FakeMachine
from ..graph.liveness import Live, Moment, moments
from ..graph.nested import graphs_of
from ..graph.phase import phase_of
from ..graph.program import Program
from ..graph.resident import resident
from ..util.html import preformatted
from ..util.patterns import pattern_of
from ..util.peaks import peak_of
from ..util.sizes import counted, in_words
from .picture import File, draw, page
from .wire import BreakEven, break_even, wire_in_words


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    `peak`: by kind, at the moment when the device holds most; `where`: the operation at that moment. `there`, `host`
    and `disk`: bytes on the device, in host memory and on drives during the whole step. `static_buffers`: the part of
    `there` that is reserved for gathered units and gradients; `used`: the most of it in use at one time. `over_time`:
    bytes on the device while each operation runs, by kind.
    """

    peak: Live
    where: str
    host: int
    disk: int
    there: int
    static_buffers: int
    used: int
    over_time: list[Moment] = field(repr=False)

    def __repr__(self) -> str:
        kinds = ", ".join(f"{kind} {in_words(n)}" for kind, n in self.peak.items() if n)
        away = {"in host memory": self.host, "on drives": self.disk}
        rest = "".join(f"; {in_words(n)} {name}" for name, n in away.items() if n)
        return f"{in_words(self.total)} at the peak, in {self.where} ({kinds}){rest}"

    @property
    def total(self) -> int:
        """The device's peak."""
        return sum(self.peak.values())


class Plan:
    """The memory that a captured and scheduled step needs on one of `world` ranks, and the bytes that it moves.

    `machine`: the machine for which the step was planned; None for a step of this process.
    """

    def __init__(self, program: Program, machine: Machine | None = None, fake: FakeMachine | None = None) -> None:
        self.program, self.machine, self._fake = program, machine, fake
        self.world = program.num_ranks
        self._timelines: dict[Machine, Timeline] = {}

    @property
    def graph(self) -> GraphModule:
        """The step as it will run."""
        return self.program.gm

    @cached_property
    def _memory(self) -> Memory:
        with self.there():
            there = resident(self.program)
            over_time = list(moments(self.program.gm, there.device))
        most = max(over_time, key=lambda x: x.nbytes)
        static_buffers = there.device["reserved"]
        used = static_buffers - min(x.live["reserved"] for x in over_time)
        return Memory(
            most.live,
            place(most.node),
            there.host,
            there.disk,
            sum(there.device.values()),
            static_buffers,
            used,
            over_time,
        )

    def memory(self) -> Memory:
        """Return a `Memory`. Its `peak` has the bytes by kind at the moment when the device holds most: `state`,
        `gathered` parameters, `gradients`, `activations` saved for the backward pass, `staging` buffers of offloading,
        `other`, and static buffers that are `reserved` but unused at that moment.

        Workspace that operations allocate while they run is not counted, except that of logits in tiles.
        """
        return self._memory

    def transfers(self) -> Counter[Traffic]:
        """Return what the step moves, and how often: bytes sent to other ranks along each axis of the mesh, read from
        and written to drives, copied to and from host memory.
        """
        return self._transfers.copy()

    @cached_property
    def _transfers(self) -> Counter[Traffic]:
        with self.there():
            return traffic(self.program.gm, self.program.mesh)

    def there(self) -> contextlib.AbstractContextManager[Any]:
        """Enter the fake machine for which the step was captured: only this machine knows which tensors are on the
        device and which on the host.
        """
        return self._fake() if self._fake is not None else contextlib.nullcontext()

    def timeline(self, machine: Machine | str | os.PathLike[str] | None = None) -> Timeline:
        """Return a simulated step: when each operation and transfer runs.

        `machine`: for a step of this process, the profile that `zerofn profile` has written on this machine. Every
        operation is then run once, on made-up values, to measure its time, and all ranks must call the method. For
        another machine, leave it out: the plan already names the machine.

        Raises `ValueError` for a machine that is neither the planned one nor this one.
        """
        if self.machine is not None and machine is not None:
            raise ValueError(
                f"this step was planned for {self.machine.name}; for another machine write zerofn.plan(..., "
                "machine=...)."
            )
        where = self.machine or (machine_of(machine) if machine is not None else None)
        if where is None:
            raise ValueError(
                "a timeline needs measurements of this machine: run `zerofn profile FILE`, and write "
                "plan.timeline(FILE); or measure now, with plan.timeline(zerofn.this_machine())."
            )
        if self.machine is None:
            where.check_here()
        with self.there():
            if where not in self._timelines:
                cost = measured([self.graph], where) if where.is_here else None
                self._timelines[where] = Timeline(self.graph, where, self.world, cost, self.program.mesh)
            return self._timelines[where]

    @cached_property
    def break_even(self) -> BreakEven | None:
        """The link speeds at which codecs save time (`shard(wire=...)`): the codecs of this step, or int8 if it has
        none.

        None if the step sends no unit, for a stage of a pipeline (stages are simulated together), and for a step of
        this process, whose links are not known.
        """
        mesh = self.program.mesh
        if self.machine is None or self.world == 1 or (mesh is not None and mesh.stages.size > 1):
            return None
        with self.there():
            return break_even(self.graph, self.machine, self.world, mesh)

    def collectives(self) -> dict[Traffic, int]:
        """Return transfers between ranks and how often they happen in a step, in order of first use. Bytes are those
        that a rank sends each time.
        """
        return {x: times for x, times in self.transfers().items() if x.how == SENT}

    @property
    def sent(self) -> int:
        """Return the bytes that a rank sends to other ranks in a step; it receives as many."""
        return sum(x.nbytes * times for x, times in self.collectives().items())

    @property
    def sent_along(self) -> dict[str, int]:
        """Return the bytes that a rank sends in a step along each axis of the mesh, by the axis's name.

        A sum over the ranks of several axes counts under the names of all of them: "replicate x data".
        """
        found: Counter[str] = Counter()
        for x, times in self.collectives().items():
            found[x.axis] += x.nbytes * times
        return dict(found)

    @property
    def flops(self) -> Flops:
        """Return the floating-point operations in a rank's matrix products in a step: `model`, and `again` for products
        that are recomputed to save memory.
        """
        with self.there():
            return flops_of_step(self.program)

    @property
    def mfu(self) -> float | None:
        """Return the rate of matrix products as a share of the bfloat16 rate in the planned machine's data sheet; None
        without a machine, or for one without a data sheet.
        """
        peak = None if self.machine is None else peak_of(self.machine.name)
        return None if peak is None else self.flops.model / self.timeline().seconds / peak

    @property
    def float8(self) -> dict[str, str] | None:
        """Map each matrix of the parameters to "" if its products are float8, or else to the reason why all or some of
        them are not; None without `precision="fp8"`.
        """
        return None if self.program.float8 is None else dict(self.program.float8)

    @property
    def num_batches(self) -> int:
        """Return the number of different parts of the batch over all ranks: along some axes ranks share a part."""
        return 1 if self.program.mesh is None else self.program.mesh.batch.size

    def text(self) -> str:
        """Return the whole plan as text."""
        m = self.memory()
        lines = [
            f"{self.program.name} on {counted(self.world, 'rank')}",
            f"  memory of a rank: {in_words(m.total)} at its peak, in {m.where}",
        ]
        lines += [f"    {kind:<12} {in_words(n)}" for kind, n in m.peak.items() if n]
        away = {"in host memory": m.host, "on drives": m.disk}
        lines += [f"    {name:<12} {in_words(n)}" for name, n in away.items() if n]
        if m.used:
            lines.append(
                f"  allocated once for gathered units and gradients: {in_words(m.static_buffers)}, of which "
                f"{in_words(m.used)} are used at a time ({m.static_buffers / m.used:.2f} reserved over allocated)"
            )
        per = Counter[str]()
        for x, times in self.transfers().items():
            per[x.how] += x.nbytes * times
        lines += [f"  {how} by a rank in a step: {in_words(n)}" for how, n in per.items() if n]
        if len(self.sent_along) > 1:
            lines += [f"    along {axis:<6} {in_words(n)}" for axis, n in self.sent_along.items()]
        lines += wire_in_words(self.program.gm)
        if self.flops.model:
            again = f", and {in_words(self.flops.again, 'FLOP')} again" if self.flops.again else ""
            lines.append(f"  computed by a rank in a step: {in_words(self.flops.model, 'FLOP')} in products{again}")
        lines += _products_in_words(self.float8 or {})
        lines += _tiles_in_words(self.program.gm)
        if self.machine is not None:
            time = self.timeline()
            busy = ", ".join(f"{lane} {time.busy[lane]:.3g}" for lane in sorted(time.busy, key=lambda x: -time.busy[x]))
            lines.append(
                f"  a step on {self.machine.name}: {time.seconds:.3g} s, {limit_in_words(time.bound)} (s: {busy})"
            )
            if (mfu := self.mfu) is not None:
                lines.append(f"    {self.flops.model / time.seconds / 1e12:.3g} TFLOP/s a rank, MFU {mfu:.1%}")
            if self.break_even is not None:
                lines.append(f"    {self.break_even}")
        return "\n".join(lines)

    def json(self) -> dict[str, Any]:
        """Return the whole plan as numbers (bytes) and texts, for other programs."""
        m = self.memory()
        return {
            "name": self.program.name,
            "ranks": self.world,
            "peak": m.peak,
            "total": m.total,
            "where": m.where,
            "host": m.host,
            "disk": m.disk,
            "static_buffers": m.static_buffers,
            "used": m.used,
            "flops": self.flops._asdict(),
            "float8": self.float8,
            "sent": self.sent_along,
            "transfers": [{**x._asdict(), "times": n} for x, n in self.transfers().items()],
        }

    def picture(self, path: str | os.PathLike[str], measured: Sequence[int] = ()) -> None:
        """Draw memory over the step, with the starts of transfers, to a file such as "plan.png" or "plan.svg".

        `measured`: bytes while each operation runs, see `Profile.picture`. Raises `ImportError` if matplotlib
        is missing.
        """
        self.draw(path, measured)

    def draw(self, file: File, measured: Sequence[int] = ()) -> None:
        """Draw the same to a path, or as SVG to a `BytesIO`."""
        over_time = self.memory().over_time
        sent = [k for k, x in enumerate(over_time) if (found := moved(x.node)) is not None and found.how == SENT]
        draw(over_time, sent, file, title=f"{self.program.name} on {counted(self.world, 'rank')}", measured=measured)

    def _repr_html_(self) -> str:
        return page(preformatted(self.text()), self.draw)

    def __repr__(self) -> str:
        return self.text()


def _products_in_words(float8: dict[str, str]) -> list[str]:
    """Return lines of what `Plan.float8` says: weights of equal layers once."""
    found: dict[str, Counter[str]] = {}
    for name, why in float8.items():
        found.setdefault(why, Counter())[pattern_of(name)] += 1
    lines = []
    for why, names in sorted(found.items()):
        told = ", ".join(name if n == 1 else f"{name} ({n})" for name, n in names.items())
        lines.append(f"    in bfloat16, {why}: {told}" if why else f"    in float8: {told}")
    return lines


def _tiles_in_words(gm: GraphModule) -> list[str]:
    """Return a line for each head whose logits come in tiles: the sizes of tiles for tokens, and for its gradient."""
    ops, lines = torch.ops.zerofn, []
    for each in graphs_of(gm):
        for node in each.graph.find_nodes(op="call_function", target=ops.head_loss_backward.default):
            numbers = [part for part in node.users if part.args[1] == 1]  # of which the head's gradient is computed
            columns = {x.args[-1] for part in numbers for x in part.users if isinstance(x.target, OpOverload)}
            for_head = "".join(f"; {n:,} columns, for the head's gradient" for n in columns)
            lines.append(f"  logits in tiles: {node.args[-1]:,} tokens{for_head}")
    return lines


def place(node: Node) -> str:
    """Describe a node."""
    what = str(node.target).removesuffix(".default")
    return " ".join(filter(None, (what, phase_of(node) and f"in the {phase_of(node)} pass")))
