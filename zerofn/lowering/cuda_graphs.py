"""CUDA graphs: the segments of a step are recorded, and each is replayed by one call of the host.

A graph replays kernels with the arguments that they had: addresses, and every number that the host passed. So what
comes into a segment either has its address, as state, gathered units and what other segments have made, or is copied
into memory of the recording: the batch, what transfers have made, scalars of the host. Each draw has a generator of its
own, which is seeded before each replay. Another state, or a buffer that has moved, is recorded again.

All segments of a step are recorded in one call, in the order in which they always run. So the memory of a value that
nobody reads any more serves those after it, as in a step that is not recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule

from .._torch_compat import unowned
from ..graph.alias import is_written
from ..graph.liveness import complete_values, tensors_of
from ..graph.program import Program, tensor_of
from ..memory.arena import Arenas
from ..ops import cuda
from ..passes import Pass
from ..random.draws import draws_with_generators, seed_of
from ..runtime.backend import Eager
from ..runtime.executor import Executor
from ..util.process import the
from .inductor import Inductor, Regions
from .segments import SEGMENT, Cut, Segment, cut

log = logging.getLogger("zerofn")
WARM_UP = 2  # calls that run operation by operation: kernels are compiled, tables made, workspaces allocated
MOST = 8  # recordings of a step, after which it runs without


Run = Callable[[list[Any]], list[Any]]  # empties the list
Allocate = Callable[[Sequence[Any]], list[Any]]


class Recorder(Protocol):
    """Runs a segment once in a way that can be repeated."""

    def __call__(
        self, gm: GraphModule, run: Run, given: Sequence[Any], allocate: Allocate, draws: Draws
    ) -> tuple[list[Any], Callable[[], None]]:
        """Return the results' memory, and what computes them again. Nothing may have been computed.

        `allocate` makes the recording's inputs of those that are `given`; their memory is the recording's, as that of
        what `run` makes. `draws` lends generators.
        """


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
    """The memory in which all recordings of the process compute, step after step: what a step returns is copied out."""

    def __init__(self) -> None:
        self.handle: Any = torch.cuda.graph_pool_handle()


def record_cuda_graph(
    gm: GraphModule, run: Run, given: Sequence[Any], allocate: Allocate, draws: Draws
) -> tuple[list[Any], Callable[[], None]]:
    """The `Recorder` of CUDA."""
    graph = torch.cuda.CUDAGraph()
    for generator in draws.generators:
        graph.register_generator_state(generator)
    where = torch.cuda.graph(graph, pool=the(Pool).handle, capture_error_mode="thread_local")
    with cuda.tables_kept() as tables, where:
        out = run(allocate(given))

    def replay(alive: Any = tables) -> None:
        graph.replay()

    return out, replay


class Graphs:
    """`backend="graphs"`, and "inductor+graphs": the segments of a step are recorded as CUDA graphs and replayed.

    On one device without offloading that is the whole step. What cannot be recorded runs between two segments, and a
    line in the log says why. `inner`: the backend that says what runs.
    """

    def __init__(self, inner: Eager | Inductor, recorder: Recorder = record_cuda_graph, device: str = "cuda") -> None:
        self._inner, self._how = inner, (recorder, device)

    def passes(self, ours: list[Pass]) -> list[Pass]:
        """Return the passes that the inner backend wants."""
        return self._inner.passes(ours) if isinstance(self._inner, Inductor) else ours

    def bind(self, program: Program) -> Replayed:
        """Return a runner that records the step at its third call."""
        return Replayed(program, self._inner.bind(program), *self._how)


class Replayed:
    """A `Runner` that replays the segments of a step. The first calls, and a step without segments, run operation by
    operation.

    `wrote`: as of an `Executor`. `eager`: what runs the step so. `device`: of the segments; the host's for tests, with
    a recorder of their own.
    """

    def __init__(
        self, program: Program, eager: Executor, recorder: Recorder = record_cuda_graph, device: str = "cuda"
    ) -> None:
        self._program, self._device, self._recorder = program, device, recorder
        self._executor = self._eager = eager
        self._calls = self._recordings = 0
        self._segments: list[_Replay] = []
        self._fixed: dict[int, int] = {}  # number of an input -> the address that was recorded
        self._arenas: dict[int, int] | None = None  # None: nothing is recorded
        self._why = ""
        self.wrote = False

    def run(self, inputs: list[Any]) -> list[Any]:
        """Run the step, and return its outputs in the graph's order."""
        self._calls += 1
        if self._calls == WARM_UP + 1:
            self._cut()
        recording = bool(self._segments) and not self._holds(inputs)
        if recording:
            self._begin(inputs)
        whole = False
        try:
            results = self._executor.run(inputs)
            whole = True
        finally:
            self.wrote = self._executor.wrote
            if recording:  # half a recording has memory that the other half would take
                self._arenas = the(Arenas).addresses() if whole else None
        if self._why and self._segments:
            self._stop()
        return results

    def close(self) -> None:
        """Free the recording and the graph's constants."""
        self._forget()
        self._executor.close()
        self._eager.close()

    @property
    def left_out(self) -> set[str]:
        """The names of regions that run operation by operation."""
        return self._eager.left_out if isinstance(self._eager, Regions) else set()

    def leave_out(self, names: set[str]) -> None:
        """Run these operation by operation, too."""
        if isinstance(self._eager, Regions):
            self._eager.leave_out(names)

    def _cut(self) -> None:
        """Cut the step into segments, or say why there are none."""
        name, made = self._program.name, _cut_step(self._program, self._device)
        if isinstance(made, str):
            log.info("%s: runs without a CUDA graph: %s", name, made)
            self._why = made
            return
        found, fixed = made
        self._fixed = dict.fromkeys(fixed, 0)
        self._executor = Executor(found.gm, None, self._lowered_or_replayed)
        if found.between:
            node, why = next(iter(found.between.items()))
            log.info("%s: %d CUDA graphs run %d operations; %d others run between them, the first since %s %s",
                     name, found.segments, found.inside, len(found.between), node, why)  # fmt: skip

    def _lowered_or_replayed(self, gm: GraphModule) -> Any:
        lowered = self._eager.lowered
        if SEGMENT not in gm.meta:
            return None if lowered is None else lowered(gm)
        self._segments.append(_Replay(gm, Executor(gm, None, lowered).run, self))
        return self._segments[-1]

    def _holds(self, inputs: Sequence[Any]) -> bool:
        """Return whether state and buffers have the memory that was recorded."""
        same = all(inputs[k].data_ptr() == address for k, address in self._fixed.items())
        return same and the(Arenas).addresses() == self._arenas

    def _begin(self, inputs: Sequence[Any]) -> None:
        """Let each segment be recorded at its next call."""
        self._forget()
        self._fixed = {k: inputs[k].data_ptr() for k in self._fixed}
        self._recordings += 1
        if self._recordings > MOST:
            self.give_up(f"the step was recorded {MOST} times, each time for a different state or different buffers.")

    def _forget(self) -> None:
        for segment in self._segments:
            segment.recording = None

    def give_up(self, why: str) -> None:
        """Record no more. The step in progress continues without recordings."""
        self._why = self._why or why

    def lose(self) -> None:
        """Record again at the next call: some memory has moved."""
        self._arenas = None

    def recorded(self, segment: _Replay, inputs: Sequence[Any]) -> _Recording | None:
        """Return a recording of a segment, or None if that fails."""
        if self._why:
            return None
        try:
            return _Recording(segment, inputs, self._recorder)
        except Exception as error:  # while recording nothing is computed, so nothing is lost
            self.give_up(f"{type(error).__name__}: {error}".splitlines()[0][:300])
            return None

    def _stop(self) -> None:
        log.info("%s: runs without a CUDA graph from here on: %s", self._program.name, self._why)
        self._forget()
        self._segments = []
        self._executor.close()
        self._executor = self._eager


class _Replay:
    """What runs a segment: it is recorded at the first call."""

    def __init__(self, gm: GraphModule, run: Run, owner: Replayed) -> None:
        self.gm, self.as_it_is, self._owner = gm, run, owner
        self.recording: _Recording | None = None

    def run(self, inputs: list[Any]) -> list[Any]:
        """Run the segment, and empty the list."""
        if self.recording is None:
            self.recording = self._owner.recorded(self, inputs)
        elif not self.recording.holds(inputs):
            self._owner.lose()
            return self.as_it_is(inputs)
        return self.as_it_is(inputs) if self.recording is None else self.recording.replay(inputs)


class _Recording:
    def __init__(self, segment: _Replay, given: Sequence[Any], recorder: Recorder) -> None:
        self._how: Segment = segment.gm.meta[SEGMENT]
        self._static: dict[int, Tensor] = {}
        self._addresses = {k: given[k].data_ptr() for k in self._how.fixed}
        self._draws = Draws(self._how.at, self._how.num_draws)
        self._draws.begin()
        with draws_with_generators(self._draws.lend):
            out, self._again = recorder(segment.gm, segment.as_it_is, given, self._allocate, self._draws)
        self._out = list(map(unowned, out))
        self._first: list[Any] | None = out  # which hold the memory for as long as this call reads them

    def _allocate(self, given: Sequence[Any]) -> list[Any]:
        inputs = []
        for k, x in enumerate(given):
            if k in self._how.keys:
                self._static[k] = x = x.clone()
            elif k not in self._how.fixed:
                x = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=self._how.at)
                self._static[k] = unowned(x)  # so that it is free once the segment has read it
            inputs.append(x)
        return inputs

    def holds(self, inputs: Sequence[Any]) -> bool:
        """Return whether what has an address is where it was."""
        return all(inputs[k].data_ptr() == address for k, address in self._addresses.items())

    def replay(self, inputs: list[Any]) -> list[Any]:
        """Return the results, in memory that the next replay writes over. `inputs` is emptied."""
        for k, static in self._static.items():
            once(static).copy_(once(inputs[k]), non_blocking=True)
        inputs.clear()
        self._draws.seed()
        self._again()
        out, self._first = self._first or self._out, None
        return list(out)


def once(x: Tensor) -> Tensor:
    """Return the elements of a tensor without repetitions of the same memory, as in an expanded one."""
    return x.as_strided([min(n, 1) if not by else n for n, by in zip(x.shape, x.stride(), strict=True)], x.stride())


def _cut_step(program: Program, kind: str) -> tuple[Cut, list[int]] | str:
    """Return a step, cut into segments, and the numbers of inputs that keep their address; or why there are none."""
    complete_values(program.gm.graph)
    values = [x for n in program.gm.graph.nodes for x in tensors_of(n.meta.get("val"))]
    devices = {x.device for x in values if x.device.type == kind}
    if len(devices) != 1:
        names = ", ".join(sorted({str(x.device) for x in values if x.dim()})) or "no device"
        return f"the state and the batch lie on {names}, but must all lie on one {kind} device."
    num_state = len(program.placeholders) - len(program.batch.names)
    known = [(k, n, tensor_of(n)) for k, n in enumerate(program.placeholders[:num_state])]
    at = devices.pop()
    fixed = [k for k, n, x in known if x is not None and x.device == at and (x.dim() or kind != "cpu" or is_written(n))]
    found = cut(program.gm, at, fixed)
    if not found.segments:
        node, why = next(iter(found.between.items()), ("it", "computes nothing."))
        return f"{node} {why}"
    return found, fixed
