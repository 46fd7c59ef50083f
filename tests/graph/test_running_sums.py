"""Gradients that a piece of a pipeline adds to those of earlier microbatches: the bits of sums of whole gradients."""

import pytest
import torch
from torch.fx import Graph, GraphModule

from zerofn._torch_compat import FakeTensorMode
from zerofn.graph.liveness import complete_values, moments
from zerofn.graph.running_sums import add_in_place, adding, results_of
from zerofn.runtime.executor import Executor

ops, aten = torch.ops.zerofn, torch.ops.aten
SIZES, OFFSETS, SIZE = (64, 64), (0, 4104), 8208  # two leaves of 64 x 64, with gaps


def piece(dtype=torch.float32):
    """Two products of the inputs, as one flat gradient; and a third product, which is a gradient of its own."""
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    with FakeTensorMode():
        for each in (x, y):
            each.meta["val"] = torch.empty(64, 64)
    first = graph.call_function(aten.mm.default, (x, y))
    second = graph.call_function(aten.mm.default, (y, x))
    third = graph.call_function(aten.mm.default, (x, x))
    flat = graph.call_function(ops.ravel.default, ([first, second], list(OFFSETS), SIZE, dtype))
    graph.output([flat, third])
    complete_values(graph)
    return GraphModule(torch.nn.Module(), graph)


def run(gm, *inputs):
    return Executor(gm).run([x.clone() for x in inputs])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sums_have_the_bits_of_whole_gradients(dtype):
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(64, 64, generator=draw) for _ in "xy")
    flat, third = run(piece(dtype), x, y)
    sums = torch.randn(SIZE, generator=draw).to(dtype), torch.randn(64, 64, generator=draw)
    more = adding(piece(dtype), [0, 1])
    expected = sums[0] + flat, sums[1] + third
    for found in (run(more, x, y, *sums), (add_in_place(more.graph), more.recompile(), run(more, x, y, *sums))[-1]):
        assert all(map(torch.equal, found, expected))
    gap = slice(4096, 4104)
    assert torch.equal(expected[0][gap], sums[0][gap])


def test_they_are_in_the_memory_of_the_sums_and_no_flat_gradient_is_made():
    more = adding(piece(), [0, 1])
    before = max(x.nbytes for x in moments(more, {}))
    add_in_place(more.graph)
    assert not any(x.target is ops.ravel.default for x in more.graph.nodes)
    inputs = [x for x in more.graph.nodes if x.op == "placeholder"]
    assert results_of(more) == inputs[2:]
    leaf = 64 * 64 * 4
    assert before == leaf + 2 * 4 * SIZE  # the third gradient, the flat one, and its sum in new memory
    assert max(x.nbytes for x in moments(more, {})) == leaf


def test_an_addition_stays_whole_where_its_leaf_is_written_later():
    more = adding(piece(), [1])
    graph, (x, *_) = more.graph, more.graph.nodes
    third = next(n for n in graph.nodes if n.target is aten.mm.default and n.args == (x, x))
    with graph.inserting_before(next(iter(reversed(graph.nodes)))):
        graph.call_function(aten.zero_.default, (third,))
    complete_values(graph)
    add_in_place(graph)
    assert any(node.target is aten.add.Tensor for node in graph.nodes)
