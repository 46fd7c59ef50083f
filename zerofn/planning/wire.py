"""The gain of encoded transfers: how much faster a step is on slow links, and above which rate of links it gains
nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from torch.fx import GraphModule, Node

from ..comm.mesh import Mesh
from ..cost.machine import Machine
from ..cost.simulator import Cost, Timeline, roofline
from ..graph.alias import roots
from ..graph.edit import copied
from ..graph.nested import graphs_of
from ..graph.node_kinds import argument, gathers_parameters, is_gather, set_argument, traits
from ..graph.program import tensor_of
from ..sharding.wire import CODED, Wire, block_in
from ..util.patterns import pattern_of
from ..util.sizes import in_words

_SENDS = {"gather": "gathered", "gather in place": "gathered", "scatter": "reduced"}  # collectives of units
_USUAL = "int8"  # what a step that sends its units as they are is compared with
_ALL = 1 << 40  # blocks: as many as any unit has
_SLOW, _FAST = 1e5, 1e14  # bytes a second: no link is slower or faster
_NOTHING = 1.02  # times as fast: no gain
_NEARLY = 0.95  # of the logarithm of the gain on the slowest link


class BreakEven(NamedTuple):
    """The gain of sending units as `form`. Rates are bytes per second of a rank on the slowest links that it uses,
    "between nodes" if `far`.

    `here`: the time of a step without codes over the time with codes, on the machine as it is; `most`: the same on the
    slowest of all simulated links. `full`: below this rate the gain is nearly `most`. `none`: above this rate nothing
    is gained; inf if links within nodes then limit the step.
    """

    form: str
    here: float
    most: float
    full: float
    none: float
    far: bool

    def __str__(self) -> str:
        where = " between nodes" if self.far else ""
        if self.most < _NOTHING:
            return f"{self.form} on the wire: no gain on links{where}, at any rate"
        below, above = (in_words(float(f"{8 * rate:.2g}"), "bit/s") for rate in (self.full, self.none))
        nothing = f", no gain above {above}" if math.isfinite(self.none) else ""
        return (
            f"{self.form} on the wire: steps {self.most:.2g} times as fast on links{where} below {below}{nothing}; "
            f"{self.here:.2f} times as fast on this machine"
        )


def break_even(gm: GraphModule, machine: Machine, world: int, mesh: Mesh | None = None) -> BreakEven | None:
    """Return the gain of the codes in which a step sends its units, or of int8 if it sends them unchanged. None if it
    sends no unit.

    The gain comes from simulated runs on slower and faster links. At stages 0 to 2, which hold whole parameters, codes
    need a second copy of these or of the shards. Only a plan with `wire=` counts the time for this copy.
    """
    form = " and ".join(forms(gm))
    coded, plain = (gm, recoded(gm, None)) if form else (recoded(gm, _USUAL), gm)
    if not any(_units(coded)):
        return None
    far, cost = world > machine.ranks, functools.cache(roofline(machine))

    @functools.cache
    def gain(rate: float | None) -> float:
        there = machine if rate is None else _with_links(machine, rate, far)
        without, with_codes = (_seconds(x, there, world, mesh, cost) for x in (plain, coded))
        return without / with_codes

    most = gain(_SLOW)
    full = _up_to(lambda rate: gain(rate) >= most**_NEARLY)
    none = math.inf if gain(_FAST) >= _NOTHING else _up_to(lambda rate: gain(rate) >= _NOTHING)
    return BreakEven(form or _USUAL, gain(None), most, full, none, far)


def forms(gm: GraphModule) -> list[str]:
    """Return the forms in which units are coded, in the order of their first use."""
    return [form for form in dict.fromkeys(_form(node)[0] for node, _ in _units(gm)) if form]


def recoded(gm: GraphModule, form: str | None) -> GraphModule:
    """Return a copy of a step that sends its units, including small leaves, as `form`, or unchanged. The copy shows
    what is sent, and cannot run.
    """
    new = copied(gm)
    for node, _ in _units(new):
        set_argument(node, "codec", "" if form is None else _codec(node, form))
    return new


def wire_in_words(gm: GraphModule) -> list[str]:
    """Return lines that say which units are gathered and reduced in which form; no lines if all are sent unchanged."""
    found: dict[str, dict[str, dict[str, None]]] = {}
    for node, does in _units(gm):
        form, block = _form(node)
        told = f"as {form}{block and ' in blocks of '}{block}" if form else "as they are"
        found.setdefault(does, {}).setdefault(told, {})[pattern_of(argument(node, "unit"))] = None
    if not any(form != "as they are" for forms in found.values() for form in forms):
        return []
    return [f"    {does} {form}: {', '.join(units)}" for does, forms in found.items() for form, units in forms.items()]


def _units(gm: GraphModule) -> Iterator[tuple[Node, str]]:
    """Yield the transfers of units to other ranks, and what they do with them; not those of sums of gradients that
    ranks gather, which have no codes.
    """
    for each in graphs_of(gm):
        root = roots(each.graph)
        for node in each.graph.nodes:
            does = _SENDS.get(traits(node).collective)
            if does and argument(node, "unit") and (not is_gather(node) or gathers_parameters(node, root)):
                yield node, does


def _codec(node: Node, form: str) -> str:
    x = tensor_of(node.all_input_nodes[0])
    if x is None or x.dtype not in CODED:
        return ""
    part = x.shape[-1] if traits(node).collective == "gather" else x.shape[-1] // argument(node, "size")
    return f"{form}.{block_in(part, Wire.block)}:0-{_ALL}"


def _form(node: Node) -> tuple[str, str]:
    """Return the form in which a transfer sends its unit, and the size of its blocks; "" for none."""
    form, _, block = argument(node, "codec").partition(":")[0].partition(".")
    return form, block


def _with_links(machine: Machine, rate: float, far: bool) -> Machine:
    return replace(machine, network=rate) if far else replace(machine, link=rate)


def _seconds(gm: GraphModule, machine: Machine, world: int, mesh: Mesh | None, cost: Cost) -> float:
    return Timeline(gm, machine, world, cost, mesh).seconds


def _up_to(holds: Callable[[float], bool]) -> float:
    """Return the highest rate, to a tenth, at which a condition holds that holds on slow links."""
    low, high = math.log(_SLOW), math.log(_FAST)
    while high - low > 0.1:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(math.exp(middle)) else (low, middle)
    return math.exp(low)
