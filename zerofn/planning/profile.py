"""`Profile`: the measured time and memory of a step, together with the predicted ones."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.profiler import ProfilerActivity
from torch.profiler import profile as follow

from .._torch_compat import OpOverload
from ..cost.machine import Machine
from ..cost.op_cost import moved
from ..cost.op_timer import forget
from ..cost.simulator import Timeline
from ..graph.alias import is_view
from ..graph.liveness import tensors_of
from ..graph.nested import call_of, is_region
from ..graph.node_kinds import casts, traits
from ..graph.phase import phase_of
from ..graph.program import Program, tensor_of
from ..runtime.backend import eager_of
from ..runtime.captured_step import CapturedStep
from ..util.html import preformatted, table
from ..util.sizes import in_words
from .picture import page
from .plan import Plan

ops = torch.ops.zerofn
WAITING, SENDING, REST = "waiting", "starting transfers", "update and rest"


class Took(NamedTuple):
    """Seconds of a step, measured and predicted. Predicted is None without a machine's profile."""

    measured: float
    predicted: float | None

    def __repr__(self) -> str:
        expected = "" if self.predicted is None else f", predicted {_ms(self.predicted)}"
        return f"{_ms(self.measured)} measured{expected}"


class Clock:
    """Records when each operation of a step begins; an executor ticks it."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self.ticks: list[tuple[Any, int]] = []  # nanoseconds; None is the end
        self.allocated: list[int] = []

    def __call__(self, node: Node | None) -> None:
        if self._cuda is not None:  # synchronise, so that operations do not overlap
            torch.cuda.synchronize(self._cuda)
            self.allocated.append(torch.cuda.memory_allocated(self._cuda))
        self.ticks.append((node, time.time_ns()))

    @property
    def reserved(self) -> int | None:
        """Return the bytes of a GPU that torch's allocator holds; None on the host."""
        return None if self._cuda is None else torch.cuda.max_memory_reserved(self._cuda)


class Profile:
    """A measured step.

    `seconds`: the time of the step whose operations were measured. On a GPU it is longer than usual: one operation
    starts when the one before it has ended. `nodes`: (operation, start, seconds), from the start of the step, which is
    at `began` seconds since the epoch. `memory`: the most bytes allocated while each operation ran, not counting those
    held during the whole step. `reserved`: bytes that the allocator of a GPU held, None on the host.
    """

    def __init__(self, plan: Plan, seconds: float, clock: Clock, memory: list[int], predicted: Timeline | None) -> None:
        self.plan, self.seconds, self.memory, self.predicted = plan, seconds, memory, predicted
        self.reserved = clock.reserved
        begin = clock.ticks[0][1]
        self.began = begin / 1e9
        ends = [at for _, at in clock.ticks[1:]]
        self.nodes = [
            (node, (at - begin) / 1e9, (end - at) / 1e9) for (node, at), end in zip(clock.ticks, ends, strict=False)
        ]

    def by_kind(self) -> dict[str, Took]:
        """Return time by kind: the forward and backward passes, waiting for transfers, starting them, and the rest."""
        return self._sums(kind_of)

    def by_unit(self) -> dict[str, Took]:
        """Return time by the unit whose parameters an operation uses, or the operation before it used."""
        units = units_of(self.plan.program)
        return self._sums(lambda node: units.get(node, ""))

    def by_operation(self, most: int = 10) -> dict[str, Took]:
        """Return the time of the `most` operations that take longest. Equal operations on results of one shape are
        summed. A compiled region counts as one operation.
        """
        sums = self._sums(operation_of)
        return dict(sorted(sums.items(), key=lambda x: -x[1].measured)[:most])

    def _sums(self, key: Callable[[Node], str]) -> dict[str, Took]:
        measured: dict[str, float] = defaultdict(float)
        for node, _, seconds in self.nodes:
            measured[key(node)] += seconds
        if self.predicted is None:
            return {name: Took(seconds, None) for name, seconds in measured.items()}
        expected: dict[str, float] = defaultdict(float)
        own = {node for node, *_ in self.nodes}
        starts = [(node, start) for node, start in self.predicted.starts if node in own]  # a loop as a whole
        ends = [*(start for _, start in starts[1:]), self.predicted.seconds]
        for (node, start), end in zip(starts, ends, strict=True):
            expected[key(node)] += max(0.0, end - start)
        return {name: Took(seconds, expected[name]) for name, seconds in measured.items()}

    @property
    def peak(self) -> int:
        """The most bytes allocated, including those held during the whole step."""
        return max(self.memory, default=0) + self.plan.memory().there

    @property
    def workspace(self) -> int:
        """The most bytes that one operation allocated beyond its results."""
        own, values, most = {node for node, *_ in self.nodes}, 0, 0
        held = {node: n + self.plan.memory().there for (node, *_), n in zip(self.nodes, self.memory, strict=True)}
        for moment in self.plan.memory().over_time:
            values = max(values, moment.nbytes)
            if moment.node in own:  # after the body, if it is a loop
                most, values = max(most, held[moment.node] - values), 0
        return most

    def text(self) -> str:
        """Return the whole profile as text."""
        lines = [self._summary()]
        for title, sums in self._sums_by():
            width = max(map(len, sums), default=0)
            lines.append(f"  {title:<{width + 2}}  measured" + ("  predicted" if self.predicted else ""))
            for name, took in sums.items():
                told = f"  {_ms(took.predicted):>9}" if took.predicted is not None else ""
                lines.append(f"    {name or '-':<{width}}  {_ms(took.measured):>8}{told}")
        return "\n".join(lines)

    def _summary(self) -> str:
        expected = f", predicted {_ms(self.predicted.seconds)}" if self.predicted else ""
        lines = [
            f"{self.plan.program.name}: {_ms(self.seconds)} a step{expected}; peak {in_words(self.peak)}, "
            f"predicted {in_words(self.plan.memory().total)}; operations' own: {in_words(self.workspace)}"
        ]
        if self.reserved is not None:
            lines.append(
                f"  reserved over allocated: {in_words(self.reserved)} / {in_words(self.peak)}, "
                f"{self.reserved / self.peak:.2f}"
            )
        return "\n".join(lines)

    def _sums_by(self) -> tuple[tuple[str, dict[str, Took]], ...]:
        return ("by kind", self.by_kind()), ("by unit", self.by_unit()), ("slowest", self.by_operation())

    def json(self) -> dict[str, Any]:
        """Return the whole profile as numbers: seconds and bytes."""
        return {
            "name": self.plan.program.name,
            "seconds": self.seconds,
            "peak": self.peak,
            "workspace": self.workspace,
            "reserved": self.reserved,
            "predicted": {"seconds": self.predicted and self.predicted.seconds, "peak": self.plan.memory().total},
            "by_kind": {k: v._asdict() for k, v in self.by_kind().items()},
            "by_unit": {k: v._asdict() for k, v in self.by_unit().items()},
            "by_operation": {k: v._asdict() for k, v in self.by_operation().items()},
        }

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write a trace for ui.perfetto.dev and chrome://tracing, measured and predicted: rows for computing,
        waiting and sending, and the allocated bytes.
        """
        with open(path, "w") as file:
            json.dump({"traceEvents": list(self._events()), "displayTimeUnit": "ms"}, file)

    def _events(self) -> Iterator[dict[str, Any]]:
        there = self.plan.memory().there
        yield from _rows(0, "measured", [(kind_of(node), node, start, seconds) for node, start, seconds in self.nodes])
        for (_, start, _), x in zip(self.nodes, self.memory, strict=True):
            yield {"ph": "C", "pid": 0, "name": "bytes", "ts": start * 1e6, "args": {"allocated": x + there}}
        if self.predicted is None:
            return
        yield from _rows(1, "predicted", [(x.lane, x.node, x.start, x.stop - x.start) for x in self.predicted.spans])
        where = dict(self.predicted.starts)
        for moment in self.plan.memory().over_time:
            if moment.node in where:
                yield {"ph": "C", "pid": 1, "name": "bytes", "ts": where[moment.node] * 1e6, "args": moment.live}

    def picture(self, path: str | os.PathLike[str]) -> None:
        """Draw memory over the step, predicted and measured. Raises `ImportError` if matplotlib is missing."""
        self.plan.picture(path, measured=self._over_time())

    def _over_time(self) -> list[int]:
        """Return the bytes allocated while each operation of the plan ran."""
        there = self.plan.memory().there
        held = {node: x + there for (node, *_), x in zip(self.nodes, self.memory, strict=True)}
        measured, last = [], there
        for moment in self.plan.memory().over_time:
            last = held.get(moment.node, last)  # inputs and constants allocate nothing
            measured.append(last)
        return measured

    def _repr_html_(self) -> str:
        head = ("", "measured", *(("predicted",) if self.predicted else ()))
        body = preformatted(self._summary())
        for title, sums in self._sums_by():
            rows = [(name or "-", *(_ms(x) for x in took if x is not None)) for name, took in sums.items()]
            body += table(title, head, rows, left=(0,))
        return page(body, lambda file: self.plan.draw(file, self._over_time()))

    def __repr__(self) -> str:
        return self.text()


def profiled(
    step: Callable[[Any, Any], Any],
    plan: Plan,
    entry: CapturedStep,
    state: Any,
    batch: Any,
    machine: Machine | str | os.PathLike[str] | None,
) -> tuple[Any, Profile]:
    """Call a compiled step twice, and return (the second result, the profile). `entry.runner` runs its plan."""
    eager = eager_of(entry.backend, "profile()")
    forget()  # measure operations again, as the machine is now
    predicted = plan.timeline(machine) if machine is not None else None
    values = [x for x in map(tensor_of, plan.program.placeholders) if x is not None and x.dim()]
    device = values[0].device if values else torch.device("cpu")
    clocks = Clock(device), Clock(device)
    entry.bind()
    usual = entry.runner
    try:
        entry.runner = eager.bind(plan.program, clocks[0])
        began = time.perf_counter()
        out = step(state, batch)
        seconds = time.perf_counter() - began
        state = out[0] if plan.program.new_state is not None else state
        entry.runner = eager.bind(plan.program, clocks[1])
        out, memory = _followed(lambda: step(state, batch), clocks[1])
    finally:
        entry.runner = usual
    return out, Profile(plan, seconds, clocks[0], memory, predicted)


def _followed(run: Callable[[], Any], clock: Clock) -> tuple[Any, list[int]]:
    """Return (the result of `run`, the most bytes allocated while each operation ran), from the allocator's own
    events.
    """
    if torch.cuda.is_initialized():
        out = run()
        counts = [x - clock.allocated[0] for x in clock.allocated]
        return out, [max(a, b) for a, b in zip(counts, counts[1:], strict=False)]
    with follow(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        out = run()
    events = [x for x in seen.profiler.kineto_results.events() if x.name() == "[memory]"]
    left = deque(sorted((x.start_ns(), x.nbytes()) for x in events))
    found, live = [], 0
    for _, end in clock.ticks[1:]:
        most = live
        while left and left[0][0] < end:
            live += left.popleft()[1]
            most = max(most, live)
        found.append(most)
    return out, found


def operation_of(node: Node) -> str:
    """Return an operation's name, its result and its pass: "aten.mm [32, 64] forward"."""
    call = call_of(node)
    made = tensors_of(node.meta.get("val"))
    if call is not None and is_region(call.body):
        names = dict.fromkeys(_name(x) for x in call.body.graph.nodes if x.op == "call_function" and not is_view(x))
        what = f"region ({', '.join([*names][:4])}{', ...' if len(names) > 4 else ''})"
    else:
        what = "loop" if call is not None else _name(node)
    shape = str(list(max(made, key=lambda x: x.numel()).shape)) if made else ""
    return " ".join(filter(None, (what, shape, phase_of(node))))


def _name(node: Node) -> str:
    return str(node.target).removesuffix(".default") if isinstance(node.target, OpOverload) else node.name


def kind_of(node: Node) -> str:
    """Return the kind of work that a node's time counts as."""
    if node.target is ops.wait.default:
        return WAITING
    return SENDING if moved(node) is not None else phase_of(node) or REST


def units_of(program: Program) -> dict[Node, str]:
    """Map each node to the unit whose parameters, gradient or state it uses; a node without a unit, to that of the node
    before.
    """
    out: dict[Node, str] = {}
    for node, (_, unit) in zip(program.placeholders, program.owners, strict=False):
        if unit is not None:
            out[node] = unit.name
    for shard, whole, _ in program.copies():
        out[whole] = out[shard]
    last = ""
    holds = dict(out)  # values of a unit, through views and transfers
    for node in program.gm.graph.nodes:
        if node.op != "call_function":
            continue
        transfer = moved(node)
        own = (
            transfer.unit
            if transfer is not None and transfer.unit
            else next((holds[x] for x in node.all_input_nodes if x in holds), "")
        )
        if own and (transfer is not None or is_view(node) or casts(node) or traits(node).passes_on):
            holds[node] = own
        last = out[node] = own or last
    return out


def _rows(process: int, name: str, spans: list[tuple[str, Node, float, float]]) -> Iterator[dict[str, Any]]:
    """Return (row, operation, start, seconds) for a trace."""
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    rows = {row: k for k, row in enumerate(dict.fromkeys(row for row, *_ in spans))}
    for row, k in rows.items():
        yield {"ph": "M", "pid": process, "tid": k, "name": "thread_name", "args": {"name": row}}
    for row, node, start, seconds in spans:
        yield {
            "ph": "X",
            "pid": process,
            "tid": rows[row],
            "name": str(node.target).removesuffix(".default"),
            "ts": start * 1e6,
            "dur": seconds * 1e6,
            "args": {"node": node.name, "phase": phase_of(node) or ""},
        }


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
