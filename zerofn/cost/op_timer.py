"""Measure the operations of a step on this machine: each distinct one is run on made-up values."""

from __future__ import annotations

import operator
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from .._torch_compat import OpOverload, below_autograd, tree_leaves, tree_map
from ..graph.alias import roots
from ..graph.liveness import complete_values, tensors_of, values_of
from ..graph.nested import REGION, call_of, graphs_of, is_nested, is_region
from ..graph.node_kinds import is_ours, traits
from ..runtime.executor import CompiledRegions, callable_of
from ..tracing.invented_values import takes_any_values
from ..util.process import the
from .machine import Machine
from .op_cost import groups_of, moved, touched_bytes
from .simulator import Cost, roofline

ROUNDS = 5
LARGE = 1 << 30
# Caches hold what was touched recently. To reproduce that, the timer writes as many bytes before an operation runs as
# the step touches since the inputs' last use, rounded to a power of two; below NEAR that is nothing, above FAR no more.
NEAR, FAR = 1 << 18, 1 << 25
QUEUED = 8  # runs of an operation between two waits for a device
_known: dict[Hashable, float] = {}


def measured(gms: Iterable[GraphModule], machine: Machine) -> Cost:
    """Return the seconds of nodes of these graphs and of the bodies in them. Regions that no step of this process runs
    compiled, what touches more than `LARGE` bytes and what invented values might not suit have them by the rates of
    `machine`.

    What was measured before is not run again. Call it on all ranks of a machine at once: they share caches and
    memory.
    """
    found: dict[Node, float] = {}
    for each in dict.fromkeys(x for gm in gms for x in graphs_of(gm)):
        _measure(each, roofline(machine), found)
    return lambda node: found.get(node, 0.0)


def forget() -> None:
    """Measure everything again when it is next needed: the machine's load may have changed."""
    _known.clear()


def _measure(gm: GraphModule, otherwise: Cost, found: dict[Node, float]) -> None:
    complete_values(gm.graph)
    root = roots(gm.graph)
    touched = 0  # bytes, until now
    touches: dict[Node, list[_Touch]] = defaultdict(list)  # by memory
    for node in gm.graph.nodes:
        nbytes = touched_bytes(node)
        region = _region(node)
        if (region or _counts(node)) and (nbytes > LARGE or not _may_run(node)):
            found[node] = otherwise(node)
        elif region or _counts(node):
            ago = [_rounded(_since(touches[root[n]], *_extent(x), touched)) if nbytes else 0 for n, x in _inputs(node)]
            key = _key(node), *ago
            if key not in _known:
                _known[key] = _seconds(node, ago)
            found[node] = _known[key]
        touched += nbytes
        for used in (node, *node.all_input_nodes) if nbytes else ():
            touches[root[used]] += [_Touch(*_extent(x), touched) for x in tensors_of(used.meta["val"])]


class _Touch(NamedTuple):
    """Bytes [start, stop) of some memory were touched; `then`: the bytes of all memory touched up to that point."""

    start: int
    stop: int
    then: int


def _since(touches: list[_Touch], start: int, stop: int, now: int) -> int:
    """Return the bytes touched anywhere since most of [start, stop) was touched; `FAR` if it never was."""
    left = (stop - start + 1) // 2
    for touch in reversed(touches):
        left -= max(0, min(stop, touch.stop) - max(start, touch.start))
        if left <= 0:
            return now - touch.then
    return FAR


def _extent(x: Tensor) -> tuple[int, int]:
    """Return the bytes of its memory that a tensor spans."""
    start = int(x.storage_offset())
    length = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return start * x.element_size(), (start + length) * x.element_size()


def _inputs(node: Node) -> list[tuple[Node, Tensor]]:
    """Return a node's input tensors and the nodes that made them, in the order of its arguments."""
    found: list[tuple[Node, Tensor]] = []
    map_arg((node.args, node.kwargs), lambda n: found.extend((n, x) for x in tensors_of(n.meta["val"])))
    return found


def _rounded(nbytes: int) -> int:
    return 0 if nbytes < NEAR else min(FAR, 1 << (nbytes - 1).bit_length())


def _counts(node: Node) -> bool:
    """Return whether a node takes time on the processor."""
    return (
        node.op == "call_function"
        and node.target is not operator.getitem
        and not is_nested(node)
        and not traits(node).free
        and moved(node) is None
    )


def _region(node: Node) -> str:
    """Return the name of the region that a node calls, or ""."""
    call = call_of(node)
    return call.body.meta[REGION] if call is not None and is_region(call.body) else ""


def _may_run(node: Node) -> bool:
    """Return whether a node may be run on made-up values. Our own operations are written so that they may, and regions
    were tried so.
    """
    if region := _region(node):
        return region in the(CompiledRegions).by_name
    if is_ours(node) or not isinstance(node.target, OpOverload):
        return not traits(node).opaque
    return takes_any_values(node.target, [x for _, x in _inputs(node)])


def _key(node: Node) -> Hashable:
    def text(x: Any) -> Any:
        return (x.dtype, tuple(x.shape), tuple(x.stride())) if isinstance(x, Tensor) else repr(x)

    return _region(node) or node.target, repr(tree_map(text, values_of(node)))


def _seconds(node: Node, ago: list[int]) -> float:
    """Return the median of some runs, after a warm-up. `ago`: bytes touched since the last use of each input."""
    args, kwargs = tree_map(_made_up, values_of(node))
    if (groups := groups_of(node)) is not None:
        args[groups.at].copy_(torch.arange(1, groups.number + 1) * groups.rows // groups.number)
    run, others = _function_of(node), torch.empty(FAR, dtype=torch.uint8)
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    order = sorted(zip(ago, given, strict=True), key=lambda x: -x[0])
    thens = [*(nbytes for nbytes, _ in order[1:]), 0]
    # A device begins the next operation when it has ended one: to wait for each would count its launch and its end.
    repeats, times = QUEUED if any(x.is_cuda for x in given) else 1, []
    with below_autograd(), torch.no_grad():
        for _ in range(ROUNDS + 1):
            for (nbytes, x), then in zip(order, thens, strict=False):
                if nbytes < FAR:
                    x.sum()
                others[: nbytes - then].zero_()
            times.append(once(lambda: _repeat(run, args, kwargs, repeats)) / repeats)
    return sorted(times[1:])[ROUNDS // 2]


def _function_of(node: Node) -> Callable[..., object]:
    if not (region := _region(node)):
        return callable_of(node.target, node.kwargs)
    compiled = the(CompiledRegions).by_name[region]
    return lambda body, *inputs: compiled.run(list(inputs))


def _repeat(run: Callable[..., object], args: list[Any], kwargs: dict[str, Any], times: int) -> object:
    for _ in range(times - 1):
        run(*args, **kwargs)
    return run(*args, **kwargs)


def once(run: Callable[[], object]) -> float:
    """Return the seconds of a call, including its work on a device."""
    _synchronize()
    start = time.perf_counter()
    kept = run()  # its result is freed afterwards
    _synchronize()
    seconds = time.perf_counter() - start
    del kept
    return seconds


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _made_up(x: Any) -> Any:
    """Return a real tensor for a fake one: numbers are valid indices, and finite checks allow updates."""
    if not isinstance(x, Tensor):
        return x
    out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    if not x.dim() or x.dtype == torch.bool:
        return out.fill_(1)
    return out.normal_() if x.is_floating_point() and 0 not in x.stride() else out.zero_()
