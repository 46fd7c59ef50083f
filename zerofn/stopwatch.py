"""How long the operations of a step take on this machine: each distinct one is run, on made-up values."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from ._torch_compat import below_autograd, tree_leaves, tree_map
from .graph.alias import body_of, roots
from .graph.cost import groups_of, moved, touched_bytes
from .graph.liveness import complete_values, tensors_of, values_of
from .loop import run_loop
from .machine import Machine
from .runtime.executor import callable_of
from .timeline import Cost, roofline

ops = torch.ops.zerofn
ROUNDS = 5
LARGE = 1 << 30
# An operation finds in caches what was touched not long before. Between its inputs' last use and its run as many bytes
# are written here as the step touches then, in powers of two: as good as none below NEAR, no more than FAR.
NEAR, FAR = 1 << 18, 1 << 25
_FREE = (operator.getitem, run_loop, *(getattr(ops, x).default for x in ("room", "bucket", "ticket", "wait")))
_known: dict[Hashable, float] = {}


def measured(gms: Iterable[GraphModule], machine: Machine) -> Cost:
    """Seconds of the nodes of these graphs and of their loops' bodies, on this `machine`: those of more than `LARGE`
    bytes by its rates. What was run before is not run again.

    Ranks that compute side by side share caches and memory: call it on all of them at once.
    """
    found: dict[Node, float] = {}
    for gm in gms:
        _measure(gm, roofline(machine), found)
    return lambda node: found.get(node, 0.0)


def forget() -> None:
    """Run everything again when it is asked for next: a machine may do other things now."""
    _known.clear()


def _measure(gm: GraphModule, otherwise: Cost, found: dict[Node, float]) -> None:
    complete_values(gm.graph)
    root = roots(gm.graph)
    touched = 0  # bytes, until now
    last: dict[Node, int] = {}  # memory -> how many until it was touched last
    for node in gm.graph.nodes:
        nbytes = touched_bytes(node)
        if node.target is run_loop:
            _measure(body_of(node), otherwise, found)
        elif _counts(node) and nbytes > LARGE:
            found[node] = otherwise(node)
        elif _counts(node):
            ago = [_rounded(touched - last[root[x]]) if root[x] in last else FAR for x in _inputs(node)]
            key = _key(node), *ago
            if key not in _known:
                _known[key] = _seconds(node, ago)
            found[node] = _known[key]
        touched += nbytes
        if node.op == "call_function":  # not an input that is merely there
            last |= dict.fromkeys((root[x] for x in (node, *node.all_input_nodes)), touched)


def _inputs(node: Node) -> list[Node]:
    """The node of each tensor that a node is given, in the order of its arguments."""
    found: list[Node] = []
    map_arg((node.args, node.kwargs), lambda x: found.extend([x] * len(tensors_of(x.meta["val"]))))
    return found


def _rounded(nbytes: int) -> int:
    return 0 if nbytes < NEAR else min(FAR, 1 << nbytes.bit_length())


def _counts(node: Node) -> bool:
    """Whether a node takes time of its own on the processor."""
    return node.op == "call_function" and node.target not in _FREE and moved(node) is None


def _key(node: Node) -> Hashable:
    def text(x: Any) -> Any:
        return (x.dtype, tuple(x.shape), tuple(x.stride())) if isinstance(x, Tensor) else repr(x)

    return node.target, repr(tree_map(text, values_of(node)))


def _seconds(node: Node, ago: list[int]) -> float:
    """The median of some runs, after one that makes what the first one makes. `ago`: bytes that were touched since each
    of the inputs was."""
    args, kwargs = tree_map(_made_up, values_of(node))
    if (groups := groups_of(node)) is not None:
        args[groups.at].copy_(torch.arange(1, groups.number + 1) * groups.rows // groups.number)
    run, others = callable_of(node.target), torch.empty(FAR, dtype=torch.uint8)
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    order = sorted(zip(ago, given, strict=True), key=lambda x: -x[0])
    thens = [*(nbytes for nbytes, _ in order[1:]), 0]
    times = []
    with below_autograd(), torch.no_grad():
        for _ in range(ROUNDS + 1):
            for (nbytes, x), then in zip(order, thens, strict=False):
                if nbytes < FAR:
                    x.sum()
                others[: nbytes - then].zero_()
            times.append(once(lambda: run(*args, **kwargs)))
    return sorted(times[1:])[ROUNDS // 2]


def once(run: Callable[[], object]) -> float:
    """Seconds of a call, and of what it asks of a device."""
    _synchronize()
    start = time.perf_counter()
    kept = run()  # what it made is let go afterwards
    _synchronize()
    seconds = time.perf_counter() - start
    del kept
    return seconds


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _made_up(x: Any) -> Any:
    """A real tensor for a fake one: numbers that index anything, verdicts that let updates be made."""
    if not isinstance(x, Tensor):
        return x
    out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    if not x.dim() or x.dtype == torch.bool:
        return out.fill_(1)
    return out.normal_() if x.is_floating_point() and 0 not in x.stride() else out.zero_()
