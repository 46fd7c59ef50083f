"""The questions to a planner: which step, and which ways to train a table should show."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from ..capture.capture import CaptureError
from ..comm.mesh import Mesh
from ..cost.machine import Machine
from ..geometry.cuts import Cut
from ..sharding.float8 import refuse
from ..sharding.partition import STAGES, check_stage
from ..sharding.precision import Precision, resolve
from ..sharding.shard import initial
from ..sharding.wire import hashable
from .plan_row import Config

T = TypeVar("T")

All = Literal["all"]
ALL: All = "all"
BUDGET = "budget"
RematToPlan = Literal["auto", "full", "budget"]
WAYS = (None, "auto", "full")  # recomputation, ever more of it
REMATS = (*WAYS, BUDGET)
Cuts = Mapping[str, Cut | Sequence[Cut]]


class Layers(NamedTuple):
    """A model of `number` layers, of which all but the first `odd` are alike. `step`: makes the same step with fewer
    layers.
    """

    number: int
    odd: int
    step: Callable[[int], Step]


class Step(NamedTuple):
    """A step to plan: the arguments of `zerofn.plan`.

    `layers`: how to make the same step with fewer layers, if that is possible. `written`: the cuts as code, if they are
    not the usual ones. `again`: as in `Config`. `otherwise`: the step to plan if this one cannot be planned.
    """

    train_step: Callable[[Any, Any], Any]
    init_state: Any
    batch: Any
    cuts: Cuts | None = None
    unit: Callable[[str], str] | None = None
    again: bool = False
    layers: Layers | None = None
    written: str = ""
    otherwise: Callable[[], Step] | None = None

    @property
    def name(self) -> str:
        """The name of the function."""
        return getattr(self.train_step, "__name__", "step")

    def planned_by(self, plan: Callable[[Step], T]) -> T:
        """Return `plan` of this step, or of `otherwise` if this step cannot be planned."""
        try:
            return plan(self)
        except (ValueError, CaptureError):
            if self.otherwise is None:
                raise
            return plan(self.otherwise())


class Asked(NamedTuple):
    """The ways to train that a table should show: for each argument of `shard` or `compile` one value, a list of
    values, or "all".
    """

    stage: Any = ALL
    offload: Any = ALL
    precision: Any = ALL
    remat: Any = ALL
    rows: Any = None
    wire: Any = None


class Initial:
    """The states that initialisation functions make, stored once for each precision: recording one takes longer than
    laying it out.
    """

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Any, Any]] = {}

    def of(self, init_state: Any, precision: Precision) -> Any:
        """Return the whole state."""
        key = id(init_state), precision
        if key not in self._known:
            self._known[key] = init_state, initial(init_state, precision)
        return self._known[key][1]


def listed(x: Any) -> list[Any]:
    """Return a list of values, also if there is only one."""
    return list(x) if isinstance(x, list | tuple) else [x]


def halves(machine: Machine) -> str:
    """Return the half precision in which a machine computes: GPUs before Ampere have no bfloat16."""
    return "bf16" if "bfloat16" in machine.flops else "fp16"


def wide_axes(mesh: Mesh) -> tuple[tuple[str, int], ...]:
    """Return the axes with more than one rank, as `Config.mesh` stores them."""
    return tuple((axis.name, axis.size) for axis in mesh.axes if axis.size > 1)


def configs(asked: Asked, machine: Machine, mesh: Mesh, rows: int) -> Iterator[Config]:
    """Return every requested configuration with this number of rows, without duplicates.

    Raises `ValueError` for an unknown argument.
    """
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise ValueError(f"plan(rows={rows!r}): expected a number above 0, or a list of them.")
    axes = wide_axes(mesh)
    stages = (STAGES if mesh.shards.size > 1 else (3,)) if asked.stage == ALL else listed(asked.stage)
    for stage in stages:
        check_stage(stage)
    usual = (halves(machine), None) if machine.device != "cpu" else (None,)
    precisions = usual if asked.precision == ALL else listed(asked.precision)
    for each in precisions:
        if resolve(each).fp8 and machine.device != "cpu" and "float8_e4m3fn" not in machine.flops:
            refuse(f"machine {machine.name!r}, which has no 'float8_e4m3fn' among its flops")
    remats = (None,) if asked.remat == ALL else listed(asked.remat)
    for how in remats:
        if how not in REMATS:
            raise ValueError(f"plan(remat={how!r}) is not known; write 'full', 'auto', 'budget' or None.")
    for precision, wire, stage in itertools.product(precisions, map(hashable, listed(asked.wire)), stages):
        tiers = _tiers(stage, machine) if asked.offload == ALL else listed(asked.offload)
        for offload, how in itertools.product(tiers, remats):
            yield Config(stage, offload, precision, how, rows, machine.memory, mesh=axes, wire=wire)


def _tiers(stage: int, machine: Machine) -> list[str | None]:
    """Return the tiers to try at a stage: the more a stage saves, the farther from the device."""
    return [None, *["cpu"] * (stage >= 2 and machine.device != "cpu"), *["nvme"] * (stage == 3 and machine.disk > 0)]
