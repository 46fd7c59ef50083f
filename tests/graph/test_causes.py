"""What values are computed from, and memory that is written."""

import torch

from tests.support.bodies import body_of
from zerofn.graph.causes import ACT, FREE, PARAM, Causes

aten = torch.ops.aten


def causes_of(fn, *inputs):
    """Causes of the values of `fn(row, weight, *given)`: rows vary, `weight` is a parameter. And nodes, by target."""
    body = body_of(fn, torch.randn(4), torch.randn(4), *inputs)
    row, weight, *_ = body.graph.nodes
    found = {x.target: x for x in body.graph.nodes if x.op == "call_function"}
    return Causes(body.graph, {weight: "w"}, [row]), found


def test_values_are_of_the_batch_of_parameters_or_of_both():
    known, at = causes_of(lambda row, w: [row.sin(), w.cos(), row.exp() * w.tanh()])
    kinds = {x.target: known.kind[x] for x in at.values()}
    assert kinds == {
        aten.sin.default: FREE,
        aten.cos.default: PARAM,
        aten.exp.default: FREE,
        aten.tanh.default: PARAM,
        aten.mul.Tensor: ACT,
    }
    assert known.leaves[at[aten.tanh.default]] == {"w"}


def test_memory_that_an_activation_is_written_to_is_one():
    def fn(row, w):
        made = row.new_zeros(4)
        made[1:].copy_((row * w)[1:])
        return [made.exp()]

    known, at = causes_of(fn)
    assert known.kind[at[aten.new_zeros.default]] == known.kind[at[aten.exp.default]] == ACT
    assert at[aten.copy_.default] in known.inputs[at[aten.exp.default]]


def test_memory_from_outside_that_is_written_has_one_place():
    def fn(row, w, count):
        before = count * 1
        count.add_(1)
        return [before, row * w]

    known, at = causes_of(fn, torch.zeros(()))
    assert known.kind[at[aten.add_.Tensor]] == known.kind[next(x for x in at.values() if x.target == aten.mul.Tensor)]
    assert known.kind[at[aten.add_.Tensor]] == ACT
