"""CUDA graphs: a step on one device is recorded, and replayed by one call of the host.

A graph replays kernels with the arguments that they had: addresses, and every number that the host passed. So a step
falls in two. What is computed of scalars in host memory (keys, the step's number, schedules) runs at every call. The
rest is recorded: those scalars come to it in memory of the device, each draw has a generator of its own, which is
seeded before each replay, and the batch is copied into memory that stays. State has its address, since steps write
over it; another state is recorded again.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .._torch_compat import OpOverload
from ..graph.alias import is_written
from ..graph.edit import clean, copied
from ..graph.liveness import complete_values, tensors_of
from ..graph.nested import call_of, is_nested
from ..graph.node_kinds import ASIDE, is_ours, traits
from ..graph.program import Program, tensor_of
from ..job.step_order import meetings
from ..memory.arena import Arenas
from ..ops import cuda
from ..ops.registry import ASKS_VALUES
from ..passes import Pass
from ..random.draws import draws_with_generators, is_draw, seed_of
from ..runtime.backend import Eager
from ..runtime.executor import Executor, Lowered
from ..util.process import the
from .inductor import Inductor

log = logging.getLogger("zerofn")
WARM_UP = 2  # calls that run operation by operation: kernels are compiled, tables made, workspaces allocated
MOST = 8  # recordings of a step, after which it runs without
_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded)
_SHORT = (torch.bfloat16, torch.float16)


class Recorder(Protocol):
    """Runs a graph once in a way that can be repeated, with the memory of these inputs. `draws` lends generators."""

    def __call__(
        self, gm: GraphModule, run: Callable[[list[Any]], list[Any]], inputs: list[Any], draws: Draws
    ) -> tuple[list[Any], Callable[[], None]]:
        """Return the results' memory, and what computes them again. Nothing has to be computed yet."""


class Draws:
    """A generator for each draw of a recording, in order, seeded from the keys of the current step."""

    def __init__(self, device: torch.device, num: int) -> None:
        self.generators = [torch.Generator(device) for _ in range(num)]
        self._keys: list[tuple[Tensor, int]] = []
        self._next = 0

    def begin(self) -> None:
        self._next, self._keys = 0, []

    def lend(self, key: Tensor, position: int) -> torch.Generator:
        """Return the next draw's generator, seeded."""
        generator = self.generators[self._next]
        self._next += 1
        self._keys.append((key, position))
        return generator

    def seed(self) -> None:
        """Seed all generators from what their keys hold now."""
        for generator, (key, position) in zip(self.generators, self._keys, strict=True):
            generator.manual_seed(seed_of(key, position))


class Pool:
    """The memory in which all recordings of the process compute, one after the other: their results are copied out of
    it before the next begins.
    """

    def __init__(self) -> None:
        self.handle: Any = torch.cuda.graph_pool_handle()


def record_cuda_graph(
    gm: GraphModule, run: Callable[[list[Any]], list[Any]], inputs: list[Any], draws: Draws
) -> tuple[list[Any], Callable[[], None]]:
    """The `Recorder` of CUDA."""
    graph = torch.cuda.CUDAGraph()
    for generator in draws.generators:
        graph.register_generator_state(generator)
    where = torch.cuda.graph(graph, pool=the(Pool).handle, capture_error_mode="thread_local")
    with cuda.tables_kept() as tables, where:
        out = run(inputs)

    def replay(alive: Any = tables) -> None:
        graph.replay()

    return out, replay


class Graphs:
    """`backend="graphs"`, and "inductor+graphs": the step of one device is recorded as a CUDA graph and replayed.

    The host then takes one call for a step. A step that cannot be recorded runs as without, and a line in the log says
    why. `inner`: the backend that says what runs.
    """

    def __init__(self, inner: Eager | Inductor, recorder: Recorder = record_cuda_graph, device: str = "cuda") -> None:
        self._inner, self._how = inner, (recorder, device)

    def passes(self, ours: list[Pass]) -> list[Pass]:
        """Return the passes that the inner backend wants."""
        return self._inner.passes(ours) if isinstance(self._inner, Inductor) else ours

    def bind(self, program: Program) -> Replayed:
        """Return a runner that records the step at its third call."""
        lowered = self._inner.lowered(program) if isinstance(self._inner, Inductor) else None
        return Replayed(program, lowered, *self._how)


class Replayed:
    """A `Runner` that replays the step. What cannot be recorded, and the first calls, run operation by operation.

    `wrote`: as of an `Executor`. `device`: of the step; the host's for tests, with a recorder of their own.
    """

    def __init__(
        self,
        program: Program,
        lowered: Lowered | None = None,
        recorder: Recorder = record_cuda_graph,
        device: str = "cuda",
    ) -> None:
        self._eager = Executor(program.gm, None, lowered)
        self._recorder, self._name = recorder, program.name
        self._calls = self._recordings = 0
        self._recording: _Recording | None = None
        self._why = _why_not(program, device)
        self._told = False
        self.wrote = False
        if not self._why:
            self._parts = _split(program)
            self._on_host = Executor(self._parts.host)
            self._on_device = Executor(self._parts.device, None, lowered)

    def run(self, inputs: list[Any]) -> list[Any]:
        """Run the step, and return its outputs in the graph's order."""
        self._calls += 1
        if self._why or self._calls <= WARM_UP:
            return self._as_it_is(inputs)
        if self._recording is None or not self._recording.holds(inputs):
            self._record(inputs)
        return self._as_it_is(inputs) if self._recording is None else self._replay(inputs, self._recording)

    def close(self) -> None:
        """Free the recording and the graph's constants."""
        self._recording = None
        self._eager.close()

    def _as_it_is(self, inputs: list[Any]) -> list[Any]:
        if self._why and not self._told:
            self._told = True
            log.info("%s: runs without a CUDA graph: %s", self._name, self._why)
        try:
            return self._eager.run(inputs)
        finally:
            self.wrote = self._eager.wrote

    def _record(self, inputs: list[Any]) -> None:
        self._recording = None  # its memory is free for the next
        self._recordings += 1
        if self._recordings > MOST:
            self._why = f"it was recorded {MOST} times, each time for another state or other buffers."
            return
        try:
            self._recording = _Recording(self._parts, self._on_host, self._on_device, inputs, self._recorder)
        except Exception as error:  # while recording nothing is computed, so nothing is lost
            self._why = f"{type(error).__name__}: {error}".splitlines()[0][:300]

    def _replay(self, inputs: list[Any], recording: _Recording) -> list[Any]:
        self.wrote = False
        given = list(inputs)
        inputs.clear()
        values = self._on_host.run(list(given))
        recording.fill(given, values)
        meetings().settle()
        self.wrote = True
        recording.replay()
        return recording.results(values)


@dataclass(frozen=True)
class _Parts:
    """A step in two. `host` takes the step's inputs and returns scalars: those of the step's results (`on_host`, their
    places -> which scalar), and behind them those that `device` takes behind the step's inputs.

    `fixed`: inputs of the device's part that keep their memory; the others are copied. `keys`: its inputs that only
    draws read. `num_draws`: in it.
    """

    host: GraphModule
    device: GraphModule
    on_host: dict[int, int]
    first: int
    fixed: frozenset[int]
    keys: frozenset[int]
    num_draws: int
    at: torch.device


class _Recording:
    def __init__(
        self, parts: _Parts, on_host: Executor, on_device: Executor, inputs: list[Any], recorder: Recorder
    ) -> None:
        self._parts = parts
        given = [*inputs, *on_host.run(list(inputs))[parts.first :]]
        self._static = [self._place(k, x) for k, x in enumerate(given)]
        self._addresses = {k: given[k].data_ptr() for k in parts.fixed}
        self._arenas = the(Arenas).addresses()
        self._draws = Draws(parts.at, parts.num_draws)
        self._draws.begin()
        with draws_with_generators(self._draws.lend):
            self._out, self._again = recorder(parts.device, on_device.run, list(self._static), self._draws)
        places = {x.untyped_storage().data_ptr() for k, x in enumerate(given) if k in parts.fixed}
        self._own = [isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in places for x in self._out]

    def _place(self, k: int, x: Any) -> Any:
        if k in self._parts.fixed or k in self._parts.keys:
            return x.clone() if k in self._parts.keys else x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=self._parts.at).copy_(x)

    def holds(self, inputs: Sequence[Any]) -> bool:
        """Return whether state and buffers have the memory that was recorded."""
        same = all(inputs[k].data_ptr() == address for k, address in self._addresses.items())
        return same and the(Arenas).addresses() == self._arenas

    def fill(self, inputs: Sequence[Any], values: Sequence[Any]) -> None:
        """Put this step's batch and scalars where the recording reads them."""
        for k, x in enumerate((*inputs, *values[self._parts.first :])):
            if k not in self._parts.fixed:
                self._static[k].copy_(x, non_blocking=True)

    def replay(self) -> None:
        self._draws.seed()
        self._again()

    def results(self, values: Sequence[Any]) -> list[Any]:
        """Return the step's results, in memory that the next replay leaves alone."""
        found = [x.clone() if own else x for x, own in zip(self._out, self._own, strict=True)]
        for place, k in self._parts.on_host.items():
            found[place] = values[k]
        return found


# --- what can be recorded --------------------------------------------------------------------------------------------


def _why_not(program: Program, device: str) -> str:
    """Return why a step cannot be recorded, in a sentence; "" if it can."""
    complete_values(program.gm.graph)
    if program.num_ranks > 1:
        return "it runs on several ranks, whose transfers the host starts."
    devices = {x.device for n in program.placeholders if (x := tensor_of(n)) is not None and x.dim()}
    if len(devices) != 1 or next(iter(devices)).type != device:
        names = ", ".join(sorted(map(str, devices))) or "no device"
        return f"its state and batch lie on {names}; all must lie on one {device} device."
    if any(x.layout != torch.strided for n in program.placeholders for x in tensors_of(n.meta.get("val"))):
        return "its state or batch has sparse tensors."
    for node in filter(is_written, program.placeholders):
        if node in program.batch_placeholders or node.meta["val"].device.type != device:
            return f"it writes to {node.name}, which is copied to memory of the recording."
    on_host = _on_host(program.gm)
    for node in program.gm.graph.nodes:
        if node in on_host or node.op != "call_function":
            continue
        if any(x.device.type != device for x in tensors_of(node.meta.get("val"))):
            return f"{node.name} ({node.target}) is computed in host memory."
        if reason := _unrecordable(node, on_host, inside=False):
            return f"{node.name} ({node.target}) {reason}"
    return ""


def _unrecordable(node: Node, on_host: Container[Node], inside: bool) -> str:
    if any(x.layout != torch.strided for x in tensors_of(node.meta.get("val"))):
        return "is a sparse tensor."
    if node.op != "call_function" or node.target is operator.getitem:
        return ""
    if node.meta.get(ASIDE):
        return "runs on the host's own thread."
    if is_nested(node):
        call = call_of(node)
        assert call is not None
        return next((why for x in call.body.graph.nodes if (why := _unrecordable(x, (), inside=True))), "")
    if not isinstance(node.target, OpOverload):
        return "runs graphs or functions of its own."
    if node.target in ASKS_VALUES or any(tag in node.target.tags for tag in _TAGS):
        return "asks the device for a value, or draws from torch's global generator."
    if is_ours(node):
        known = traits(node)
        if known.moves or known.opaque or known.checks or known.stores or known.lends:
            return "is done by the host."
        if is_draw(node.target) and (inside or not is_draw(node.target, seeds=True)):
            return "draws in a loop, or from torch's default generator."
        return "makes a key in a loop." if inside and "fold_in" in str(node.target) else ""
    scalars = [x for x in node.all_input_nodes if x in on_host or x.op != "call_function" and _is_scalar_of_host(x)]
    if scalars and any(x.dtype in _SHORT for x in tensors_of(node.meta["val"])):
        return "computes 16-bit values with a number of the host, which is rounded otherwise on the device."
    return ""


def _is_scalar_of_host(node: Node) -> bool:
    value = tensor_of(node)
    return value is not None and not value.dim() and value.device.type == "cpu"


def _on_host(gm: GraphModule) -> dict[Node, None]:
    """Return, in order, the operations that compute scalars in host memory of nothing but such scalars."""
    found: dict[Node, None] = {}
    for node in gm.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, OpOverload) or node.target._schema.is_mutable:
            continue
        given = node.all_input_nodes
        scalars = all(x in found or x.op != "call_function" and _is_scalar_of_host(x) for x in given)
        if scalars and _is_scalar_of_host(node) and not is_draw(node.target) and not is_written(node):
            found[node] = None
    return found


def _split(program: Program) -> _Parts:
    gm, names = program.gm, {x.name for x in _on_host(program.gm)}
    results = list(program.output.args[0])  # type: ignore[arg-type]
    host, device = copied(gm), copied(gm)
    inside = {x.name: x for x in host.graph.nodes}
    wanted = [x for x in device.graph.nodes if x.name in names and any(u.name not in names for u in x.users)]
    crossing = [x for x in wanted if any(u.name not in names and u.op != "output" for u in x.users)]
    on_host = {k: x.name for k, x in enumerate(results) if isinstance(x, Node) and x.name in names}
    scalars = list(dict.fromkeys(on_host.values()))
    _give(host, [inside[name] for name in (*scalars, *(x.name for x in crossing))])
    for x in [x for x in reversed(host.graph.nodes) if x.op == "call_function" and x.name not in names]:
        host.graph.erase_node(x)  # what writes
    last = [x for x in device.graph.nodes if x.op == "placeholder"][-1]
    inputs = [x for x in device.graph.nodes if x.op == "placeholder"]
    for x in crossing:
        with device.graph.inserting_after(last):
            last = device.graph.placeholder(f"{x.name}_of_host")
        last.meta.update(x.meta)
        x.replace_all_uses_with(last)
        inputs.append(last)
    kept = [None if k in on_host else x for k, x in enumerate(next(iter(reversed(device.graph.nodes))).args[0])]
    _give(device, kept)
    num_state = len(program.placeholders) - len(program.batch.names)
    known = [tensor_of(x) for x in inputs[:num_state]]
    written = set(filter(is_written, inputs))
    fixed = [k for k, x in enumerate(known) if x is not None and (x.dim() or inputs[k] in written)]
    keys = [k for k, x in enumerate(inputs) if x.users and all(is_draw(u.target) and u.args[0] is x for u in x.users)]
    num_draws = sum(is_draw(x.target) for x in device.graph.nodes if x.op == "call_function")
    at = next(x.device for n in inputs if (x := tensor_of(n)) is not None and x.dim())
    places = {k: scalars.index(name) for k, name in on_host.items()}
    return _Parts(host, device, places, len(scalars), frozenset(fixed), frozenset(keys), num_draws, at)


def _give(gm: GraphModule, results: Sequence[Any]) -> None:
    """Let a graph return these values, and nothing that it does not need."""
    output = next(iter(reversed(gm.graph.nodes)))
    output.args = (list(results),)
    clean(gm)
