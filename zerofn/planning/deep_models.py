"""Estimates for deep models: bytes and seconds of a step with many layers, from two plans of the step with few.

Each of several equal layers adds the same bytes and the same seconds, once the model is so deep that its first and last
layers do not interact. All layers share static buffers, which do not grow. Waits and packing differ by a few percent.
So estimates choose which meshes to plan in full, and describe the others. If latency is longer than computation, the
number of units in flight grows with depth, and the estimate of memory is too low.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..comm.mesh import Mesh
from ..cost.machine import Machine
from .asked import ALL, BUDGET, Initial, Layers, Step
from .plan import Memory
from .plan_row import Config, Estimate, Needs, Row, lacking
from .plan_variants import RowPlanner

FEW = 3  # beside the odd ones: a first one, a last one and one between, so that transfers of neighbours overlap
SPAN = 3  # more of them in the second plan
UNSURE = 1.05  # of the device's memory: what is estimated to need less may fit


class Estimator:
    """Estimates rows of one step on one mesh of a machine, see `RowPlanner`. `step.layers` must be set."""

    def __init__(self, step: Step, mesh: Mesh, machine: Machine, machine_argument: str, initials: Initial) -> None:
        assert step.layers is not None
        self._layers, self._machine, self._num_batches = step.layers, machine, mesh.batch.size
        self._few, self._more = depths_of(step.layers)
        self._planners = [
            RowPlanner(step.layers.step(number), mesh, machine, machine_argument, initials)
            for number in (self._few, self._more)
        ]

    def rows(self, config: Config, remat: str | None) -> Iterator[Row]:
        """Estimate one configuration. If `remat` is "all", estimate it with more and more recomputation, as rows are
        requested.
        """
        one, other = self._planners
        config = one.with_dtypes(config)
        states = zip(one.of_state(config), other.of_state(config), strict=True)
        state = Needs(*(round(self._at_depth(a, b)) for a, b in states))
        if lacks := lacking(state, self._machine, one.ranks_of_node):
            yield Row(config, state, f"{lacks} for the state alone", None)
        elif remat != ALL:
            yield self._row(one.row(config), other.row(config))
        else:
            most = math.inf
            for few, more in zip(one.ways(config), other.ways(config), strict=False):
                row = self._row(few, more, most)
                most = row.needs.device
                yield row
                if self._without_activations(few, more) > UNSURE * self._machine.memory:
                    return  # recomputation saves nothing else

    def _row(self, few: Row, more: Row, most: float = math.inf) -> Row:
        """Return a row. `most`: bytes that the row with less recomputation needs; this row needs no more."""
        plans = [x.plan for x in (few, more) if x.plan is not None]  # both: the state of all layers fits
        memories, times = [x.memory() for x in plans], [x.timeline() for x in plans]
        device = int(min(self._device(*memories), most))
        needs = Needs(
            device, *(round(self._at_depth(a, b)) for a, b in zip(few.needs[1:], more.needs[1:], strict=True))
        )
        busy = {lane: self._at_depth(times[0].busy.get(lane, 0.0), x) for lane, x in times[1].busy.items()}
        sent = {x: round(self._at_depth(few.sent.get(x, 0), n)) for x, n in more.sent.items()}
        seconds = self._at_depth(times[0].seconds, times[1].seconds)
        bound = max(busy, key=busy.__getitem__, default=more.bound)
        found = Estimate(self._few, self._more, seconds, sent, bound, self._num_batches)
        lacks = lacking(needs, self._machine, self._planners[0].ranks_of_node)
        return Row(few.config, needs, lacks, None, few.tokens, few.unit, found, microbatches=few.microbatches)

    def _device(self, few: Memory, more: Memory) -> int:
        """Return the bytes of the peak. The peak is where most activations or most gradients wait, or at the end. Each
        of these moments grows by itself, so with many layers the peak may be at a different moment than with few.
        """
        pairs = zip(_moments(few), _moments(more), strict=True)
        grown = [self._at_depth(a - few.static_buffers, b - more.static_buffers) for a, b in pairs]
        return max(round(max(grown)) + max(few.static_buffers, more.static_buffers), more.total)

    def _without_activations(self, few: Row, more: Row) -> float:
        """Return bytes of a step that no recomputation saves: those at the end of the step."""
        found = [x.plan.memory() for x in (few, more) if x.plan is not None]
        return self._at_depth(*(x.over_time[-1].nbytes - x.static_buffers for x in found))

    def _at_depth(self, few: float, more: float) -> float:
        """Return a quantity for all layers, from its values with few layers: each layer adds the same."""
        return more + (more - few) * (self._layers.number - self._more) / (self._more - self._few)


def _moments(memory: Memory) -> list[int]:
    """Return the bytes at the moments that may be the peak of a model with more layers."""
    by_kind = [max(memory.over_time, key=lambda x: (x.live[kind], x.nbytes)) for kind in ("activations", "gradients")]
    return [x.nbytes for x in (*by_kind, memory.over_time[-1])]


def depths_of(layers: Layers) -> tuple[int, int]:
    """Return the two numbers of layers that are planned for an estimate."""
    return layers.odd + FEW, layers.odd + FEW + SPAN


def is_deep(step: Step, remat: str | None) -> bool:
    """Return whether a step is estimated first: it has more layers than both small plans together, and no memory
    budget. (With a budget, a step with few layers would use all of it, too.)
    """
    return step.layers is not None and remat != BUDGET and step.layers.number > sum(depths_of(step.layers))
