"""Run a scheduled graph as one generated Python function, which frees every value at its last use.

FX's own code looks up each operation through four attributes and passes through autograd's dispatch keys. Here each
operation has a name of its own, bound to torch's own function for it, if there is one, or to the dispatcher's; for
ZeroFn's operations, to their implementation. The function runs below autograd, each operation in the grad mode in
which the step called it.
`Executor.source` is the generated code.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.fx import GraphModule, Node

from .._torch_compat import OpOverload, below_autograd, without_autocast
from ..graph.alias import writes
from ..graph.nested import REGION, is_nested, is_region, runs_once
from ..graph.node_kinds import ASIDE
from ..job.step_order import meetings
from ..offload.host_worker import aside
from ..ops.registry import TORCH_FUNCTIONS, aside_of, implementation_of
from ..tracing.grad_mode import grad_mode
from ..util.process import the

Lowered = Callable[[GraphModule], Any]  # a region -> an object with `run(inputs) -> results`, which empties the list
_NODES = "<nodes>"  # a global of the generated code: line -> node. No variable can have this name


class Executor:
    """The eager backend's `Runner`, which empties the list of inputs to free each of them at its last use.

    `wrote`: whether the last run came to a write to its inputs; a failure before that changes nothing. `tick` is
    called with each node before it runs, and with None at the end. A loop counts as one node. `lowered` makes what runs
    a region of a graph; None for one that runs operation by operation, too.
    """

    def __init__(
        self, gm: GraphModule, tick: Callable[[Node | None], None] | None = None, lowered: Lowered | None = None
    ) -> None:
        self.wrote, self.lowered = False, lowered
        self.source, self._names = _generate(gm, self._begin_writing, tick, lowered)
        exec(compile(self.source, "<zerofn step>", "exec"), self._names)
        self._run: Callable[[list[Any]], list[Any]] = self._names["run"]

    def run(self, inputs: list[Any]) -> list[Any]:
        """Run the step, and return its outputs in the graph's order."""
        self.wrote = False
        with below_autograd(), without_autocast(), torch.no_grad():
            return self._run(inputs)

    def close(self) -> None:
        """Release the graph's constants."""
        self._names.clear()

    def _begin_writing(self) -> None:
        meetings().settle()  # the other ranks run this step, too
        self.wrote = True


def failed_node(error: BaseException) -> Node | None:
    """Return the node whose operation raised `error`, the innermost one in a loop; None if it came from elsewhere."""
    found, at = None, error.__traceback__
    while at is not None:
        found = at.tb_frame.f_globals.get(_NODES, {}).get(at.tb_lineno, found)
        at = at.tb_next
    return found


def _generate(
    gm: GraphModule,
    begin_writing: Callable[[], None],
    tick: Callable[[Node | None], None] | None,
    lowered: Lowered | None,
) -> tuple[str, dict[str, Any]]:
    names: dict[str, Any] = {"inf": float("inf"), "nan": float("nan")}
    bound: dict[Any, str] = {}
    alive: list[Any] = []

    def bind(value: Any, hint: str) -> str:
        key = (type(value), value) if isinstance(value, torch.dtype | torch.device) else id(value)
        if key not in bound:
            alive.append(value)  # otherwise another value could get its id
            name = bound[key] = f"F{len(bound)}_{hint}"  # no node has such a name
            names[name] = _body(value, lowered) if isinstance(value, GraphModule) else value
        return bound[key]

    nodes = list(gm.graph.nodes)
    free = _last_uses(nodes)
    inputs = [n.name for n in nodes if n.op == "placeholder"]
    lines = ["def run(inputs):"]
    if inputs:
        lines += [f"    {', '.join(inputs)}, = inputs", "    inputs.clear()"]
    unused = [n.name for n in nodes if n.op == "placeholder" and not n.users]
    lines += [f"    {' = '.join(unused)} = None"] if unused else []
    rows = names[_NODES] = {}
    first_write = next((n for n in nodes if any(x.op == "placeholder" for x in writes(n))), None)
    enabled = False
    for node in nodes:
        wanted = False if node.op == "output" or is_nested(node) else grad_mode(node)
        if wanted is not None and wanted != enabled:
            lines.append(f"    {bind(torch.set_grad_enabled, 'grad')}({wanted})")
            enabled = wanted
        if node is first_write:
            lines.append(f"    {bind(begin_writing, 'begin_writing')}()")
        if tick is not None and node.op in ("call_function", "output"):
            lines.append(f"    {bind(tick, 'tick')}({bind(node, 'node') if node.op != 'output' else None})")
        if node.op == "output":
            lines.append(f"    return {_text(node.args[0], bind)}")
        elif node.op != "placeholder":
            dead = free.get(node, [])
            if runs_once(node):  # the body empties INPUTS, and so frees what nobody else holds
                handed = [x for x in dead if x in node.args[1:]]
                lines.append(f"    INPUTS = {_text(list(node.args[1:]), bind)}{_forget(handed)}")
                dead = [x for x in dead if x not in handed]
            lines.append(f"    {node.name} = {_expression(node, gm, bind)}{_forget(dead)}")
            rows[len(lines)] = node
    return "\n".join(lines) + "\n", names


def _last_uses(nodes: Sequence[Node]) -> dict[Node, list[Node]]:
    """Map each node to the values that are used there for the last time."""
    seen: set[Node] = set()
    free: dict[Node, list[Node]] = {}
    for node in reversed(nodes):
        if node not in seen and not node.users and node.op not in ("output", "placeholder"):
            free.setdefault(node, []).append(node)
        for used in node.all_input_nodes:
            if used not in seen:
                seen.add(used)
                if node.op != "output":
                    free.setdefault(node, []).append(used)
    return free


def _forget(dead: Sequence[Node]) -> str:
    return f"; {' = '.join(x.name for x in dead)} = None" if dead else ""


def _expression(node: Node, gm: GraphModule, bind: Callable[[Any, str], str]) -> str:
    if node.op == "get_attr":
        return bind(operator.attrgetter(str(node.target))(gm), "constant")
    if runs_once(node):
        return f"{_text(node.args[0], bind)}.run(INPUTS)"
    if node.target is operator.getitem:
        return f"{_text(node.args[0], bind)}[{_text(node.args[1], bind)}]"
    run = callable_of(node.target, node.kwargs)
    function = bind(run, getattr(node.target, "__name__", "f").split(".")[0].strip("_") or "f")
    args = [_text(a, bind) for a in node.args]
    args += [f"{k}={_text(v, bind)}" for k, v in node.kwargs.items()]
    if node.meta.get(ASIDE):
        other = aside_of(node.target) if isinstance(node.target, OpOverload) else None
        function, args = (bind(other, "aside"), args) if other else (bind(aside, "aside"), [function, *args])
    return f"{function}({', '.join(args)})"


class CompiledRegions:
    """What runs compiled in this process's steps, by the names of regions: objects as `Lowered` returns them."""

    def __init__(self) -> None:
        self.by_name: WeakValueDictionary[str, Any] = WeakValueDictionary()


def _body(gm: GraphModule, lowered: Lowered | None) -> Any:
    found = lowered(gm) if lowered is not None and is_region(gm) else None
    if found is None:
        return _Body(gm, lowered)
    the(CompiledRegions).by_name[gm.meta[REGION]] = found
    return found


class _Body:
    """A body, as the operation that runs it calls it. `run` takes the inputs in a list, and empties it."""

    def __init__(self, gm: GraphModule, lowered: Lowered | None) -> None:
        self.run = Executor(gm, None, lowered)._run

    def __call__(self, *inputs: Any) -> list[Any]:
        return self.run(list(inputs))


def callable_of(target: Any, named: Collection[str] = ()) -> Callable[..., Any]:
    """Return the function that runs a node's target. ZeroFn's own operations bypass the dispatcher.

    `named`: the arguments that are given by name. torch's functions have another one for "self".
    """
    if not isinstance(target, OpOverload):
        return target
    return implementation_of(target) or (None if "self" in named else TORCH_FUNCTIONS.get(target)) or target._op


def _text(value: Any, bind: Callable[[Any, str], str]) -> str:
    if isinstance(value, Node):
        return value.name
    if isinstance(value, list):
        return f"[{', '.join(_text(v, bind) for v in value)}]"
    if isinstance(value, tuple):
        return f"({''.join(_text(v, bind) + ', ' for v in value)})"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, slice):
        return f"slice({_text(value.start, bind)}, {_text(value.stop, bind)}, {_text(value.step, bind)})"
    return bind(value, "constant")
