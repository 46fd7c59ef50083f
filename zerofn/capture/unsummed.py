"""Refuse a step in which what ranks compute with slices of layers meets what is whole, before its sum.

`value_and_grad` and the layers that a plan cuts write down what must hold along such an axis (`tensor`), by
`zerofn::expect`: the loss is the same on all ranks, and so are gradients of whole leaves; what is summed is a rank's
own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from ..collectives.expected import BETWEEN_SLICES, GRADIENT_OF, OWN_OF
from ..comm.mesh import Axis
from ..graph.nested import graphs_of
from ..graph.node_kinds import argument
from ..graph.own_values import OwnValues, SliceOf
from ..graph.program import Program
from ..util.errors import some
from ..util.patterns import pattern_of

ops = torch.ops.zerofn


def unsummed(program: Program, own: OwnValues) -> str:
    """Return a sentence for the first value that meets what is whole before its sum, or is summed though all ranks
    have it whole; "" if there is none.
    """
    axes = program.mesh.partial if program.mesh is not None else ()
    return next(filter(None, (_unsummed_along(program, own, axis) for axis in axes)), "")


def _unsummed_along(program: Program, own: OwnValues, axis: Axis) -> str:
    expected = list(_expected(program, own, axis.name))
    causes = frozenset[str]().union(*(x for what, x in expected if what == "loss"))
    if causes:
        return _used_alike(causes) or _loss(causes, _picks_labels(program, own, axis.name), axis.name)
    for what, found in expected:
        if what.startswith(OWN_OF) and not found:
            name = what.removeprefix(OWN_OF)
            return _used_alike(frozenset([name])) or (
                f"{name}: the plan's word for this module sums over {axis.name!r}, but all ranks have the whole value, "
                f"so the sum would be {axis.size} times too large. Leave {name} out of the plan: the word is for a "
                "module between sliced layers, of whose output each rank computes a part."
            )
    partial = {what.removeprefix(GRADIENT_OF): x for what, x in expected if what.startswith(GRADIENT_OF) and x}
    return (_used_alike(frozenset().union(*partial.values())) or _gradients(partial, axis.name)) if partial else ""


def _expected(program: Program, own: OwnValues, axis: str) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield what is expected of a value along an axis, and the slices that it depends on without a sum."""
    for gm in graphs_of(program.gm):
        for node in gm.graph.nodes:
            if node.target is ops.expect.default and argument(node, "axis") == axis:
                yield argument(node, "what"), _slices(own, node, axis)


def _slices(own: OwnValues, node: Node, axis: str) -> frozenset[str]:
    origins = frozenset(cause for each in own.read.get(node, {}).values() for cause, name in each if name == axis)
    found = frozenset(cause.of for cause in origins if isinstance(cause, SliceOf) and cause.axis == axis)
    return found - {""} or found


def _picks_labels(program: Program, own: OwnValues, axis: str) -> bool:
    """Return whether a slice of logits meets labels: an entry of the vocabulary is looked for in this rank's part."""
    nodes = (node for gm in graphs_of(program.gm) for node in gm.graph.nodes)
    return any(str(node.target).startswith("aten.nll_loss") and _slices(own, node, axis) for node in nodes)


def _loss(causes: frozenset[str], picks_labels: bool, axis: str) -> str:
    names = some(sorted(causes - {""}))
    what = f"this rank's slices of {names}" if names else "this rank's slices of layers"
    if picks_labels:
        advice = (
            "The loss treats a rank's slice of the logits as all logits. Write zerofn.parallel.cross_entropy(logits, "
            "labels, vocab_size), or 'colwise_gather_output' for the LM head."
        )
    else:
        advice = (
            "After a layer that returns slices ('colwise'), make the next linear layer 'rowwise', which sums over "
            f"ranks, or write 'colwise_gather_output'. In your own code, zerofn.collectives.psum(x, {axis!r}) sums the "
            "results of all slices."
        )
    return f"the loss differs along {axis!r}: it depends on {what}, without a sum over ranks. {advice}"


def _used_alike(causes: frozenset[str]) -> str:
    """Return a sentence if values differ by modules alone whose word says that ranks use them in their own ways."""
    if not causes or not all(x.endswith(BETWEEN_SLICES) for x in causes):
        return ""
    names = some(sorted(x.removesuffix(BETWEEN_SLICES) for x in causes))
    return (
        f"the plan has 'replicated_with_grad_allreduce' for {names}, but the input is the same on all ranks, so the "
        f"gradient would be counted once for each rank. Leave {names} out of the plan: the word is for a module "
        "between a layer that returns slices ('colwise') and one that takes slices ('rowwise')."
    )


def _gradients(partial: dict[str, frozenset[str]], axis: str) -> str:
    name, causes = next(iter(partial.items()))
    met = some(sorted(x for x in causes if x))
    others = f" (and of {some([x for x in partial if x != name])})" if len(partial) > 1 else ""
    modules = {pattern_of(x.rpartition(".")[0]) for x in partial}
    word = f"{modules.pop()!r}: " if len(modules) == 1 else ""
    advice = (
        f"Write {word}'replicated_with_grad_allreduce' into the plan, which sums the parts"
        if word
        else f"Before ranks use x with their own slices, write x = zerofn.collectives.vary(x, {axis!r}), as 'colwise' "
        "layers do; for a module between sliced layers, write 'replicated_with_grad_allreduce' into the plan"
    )
    return (
        f"the gradient of {name!r}{others} differs along {axis!r}: the parameter is not sliced, but is used together "
        f"with this rank's slices{f' of {met}' if met else ''}, so each rank has only its own part of the gradient. "
        f"{advice}."
    )
