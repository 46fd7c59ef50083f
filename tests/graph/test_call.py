"""A body that is called once, on values, beside the same nodes without a call."""

import operator

import pytest
import torch
from torch.fx import Graph, GraphModule

import zerofn
from tests.support.bodies import body_of, call_in, inlined
from tests.support.same import assert_same_trees
from tests.support.small_steps import fake_ranks
from zerofn.cost.machine import KNOWN
from zerofn.cost.op_cost import traffic
from zerofn.cost.simulator import Timeline
from zerofn.graph.alias import check_results, memory_of, writes
from zerofn.graph.liveness import complete_values, moments
from zerofn.graph.nested import call, calls, graphs_of, pass_in
from zerofn.runtime.executor import Executor

aten = torch.ops.aten
X, W = torch.randn(8, 64), torch.randn(64, 64)


def layer(x, w):
    h = x @ w
    return [torch.tanh(h), (h * h).sum()]


def counting(total, y):
    total.add_(y.sum(0))
    return [y.sin()]


def viewing(x):
    return [x.t(), x.cos()]


def called(*bodies):
    """An empty graph in a module that has these bodies, the nodes that read them, and its inputs `x` and `w`."""
    root = torch.nn.Module()
    graph = Graph(root)
    x, w = graph.placeholder("x"), graph.placeholder("w")
    mode = next(iter(bodies[0].graph.nodes)).meta["val"].fake_mode
    x.meta["val"], w.meta["val"] = mode.from_tensor(X), mode.from_tensor(W)
    for k, each in enumerate(bodies):
        setattr(root, f"body_{k}", each)
    return root, graph, [graph.get_attr(f"body_{k}") for k in range(len(bodies))], x, w


def finished(root, graph, outputs):
    graph.output(outputs)
    gm = GraphModule(root, graph)
    complete_values(gm.graph)
    return gm


def layers():
    """One body, called three times, and a body that writes to what it is given."""
    root, graph, (first, second), x, w = called(body_of(layer, X, W), body_of(counting, X[0].clone(), X))
    total = graph.call_function(aten.new_zeros.default, (x, [64]))
    total.meta["val"] = x.meta["val"].new_zeros(64)
    sums = []
    for _ in range(3):
        x, more = call_in(graph, first, x, w)
        (x,) = call_in(graph, second, total, x)
        sums.append(more)
    return finished(root, graph, [x, total, *sums])


def test_results_are_those_without_a_call():
    gm = layers()
    assert [x.target for x in inlined(gm).graph.nodes].count(aten.mm.default) == 3
    expected = Executor(inlined(gm)).run([X.clone(), W])
    assert_same_trees(Executor(gm).run([X.clone(), W]), expected)
    with torch.no_grad():
        assert_same_trees(gm(X.clone(), W), expected)  # as other backends may run it


def test_a_body_that_is_called_often_is_compiled_once():
    gm = layers()
    assert len(graphs_of(gm)) == 3 and len(list(calls(gm))) == 6
    executor = Executor(gm)
    assert sum(type(x).__name__ == "_Body" for x in executor._names.values()) == 2


def test_a_call_writes_what_its_body_writes():
    gm = layers()
    total = next(x for x in gm.graph.nodes if x.target is aten.new_zeros.default)
    assert [writes(node) for node, _ in calls(gm)] == [[], [total]] * 3
    assert [x.target for x in total.users] == [call] * 3 + ["output"]


def level(gm):
    """(operation, bytes that are alive) of each operation of a graph and its bodies, in the order of execution."""
    there = [x for x in moments(gm, {}) if x.node.op == "call_function"]
    return [(str(x.node.target), x.nbytes) for x in there if x.node.target not in (call, operator.getitem)]


def test_an_edited_body_writes_what_it_writes_by_then():
    inner = body_of(lambda x: [x.sin().cos(), x + 1], X)
    root, graph, (where,), x, _ = called(inner)
    gm = finished(root, graph, call_in(graph, where, x))
    ((node, there),) = calls(gm)
    assert writes(node) == []
    given = next(iter(there.given))
    with inner.graph.inserting_after(given):
        inner.graph.call_function(aten.mul_.Tensor, (given, 2))
    assert writes(node) == [x]


def test_memory_is_that_without_a_call():
    gm = layers()
    assert level(gm) == level(inlined(gm))
    assert max(nbytes for _, nbytes in level(gm)) == 3 * 8 * 64 * 4 + 64 * 4 + 2 * 4  # h, its square, tanh(h)


def test_a_result_may_lie_in_an_input():
    root, graph, (body,), x, w = called(body_of(viewing, X))
    with graph.inserting_after(w):
        h = graph.call_function(aten.sin.default, (x,))
    turned, cosine = call_in(graph, body, h)
    out = graph.call_function(aten.mm.default, (cosine, turned))
    gm = finished(root, graph, [out])
    assert memory_of(turned) is h and memory_of(cosine) is cosine
    assert level(gm) == level(inlined(gm))
    assert_same_trees(Executor(gm).run([X, W]), Executor(inlined(gm)).run([X, W]))


def test_results_may_not_share_memory():
    root, graph, (body,), x, _ = called(body_of(lambda x: [y := x.sin(), y.t()], X))
    gm = finished(root, graph, call_in(graph, body, x))
    with pytest.raises(ValueError, match="body_0 returns the memory of sin twice; return it once"):
        check_results(gm)
    check_results(layers())


def test_a_body_in_a_body():
    inner = layers()
    root, graph, (body,), x, w = called(inner)
    y, *more = call_in(graph, body, x, w)
    gm = finished(root, graph, [*more, *call_in(graph, body, y, w)])
    assert_same_trees(Executor(gm).run([X.clone(), W]), Executor(inlined(gm)).run([X.clone(), W]))
    assert level(gm) == level(inlined(gm))


def test_one_more_value_is_passed_to_a_body():
    root, graph, (body,), x, w = called(body_of(layer, X, W))
    y, more = call_in(graph, body, x, w)
    gm = finished(root, graph, [y, more])
    ((node, each),) = calls(gm)
    inside = pass_in(node, each, x)
    result = each.results[0]
    with each.body.graph.inserting_after(result):
        plus = each.body.graph.call_function(aten.add.Tensor, (result, inside))
    result.replace_all_uses_with(plus, lambda user: user is not plus)
    h, total = layer(X, W)
    assert_same_trees(Executor(gm).run([X, W]), [h + X, total])


def test_its_transfers_and_its_time_are_those_without_a_call():
    def sent(x, w):
        return [zerofn.collectives.all_gather((x @ w).view(-1))]

    with fake_ranks(2):
        body = body_of(sent, X, W)
        root, graph, (where,), x, w = called(body)
        found = [call_in(graph, where, x, w)[0] for _ in range(3)]
        gm = finished(root, graph, found)
        plain = inlined(gm)
        ((sent_once, times),) = traffic(gm).items()
        assert traffic(gm) == traffic(plain) and (times, sent_once.nbytes) == (3, 8 * 64 * 4)
        machine = KNOWN["H100-8"]
        assert Timeline(gm, machine, 2).seconds == Timeline(plain, machine, 2).seconds > 0
