import operator
import weakref

import pytest
import torch
from torch.fx import Graph, GraphModule

from tests.support.same import assert_same_trees
from tests.support.small_steps import batch_of, build, inputs_of, scheduled, state_of, train_step_of
from zerofn.graph.nested import call
from zerofn.runtime.executor import Executor

aten = torch.ops.aten


@pytest.mark.part(stage=[3], n=[2])
@pytest.mark.part(stage=[0, 1], n=[1])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stage", range(4))
def test_results_are_those_of_the_module(stage, n):
    module = build(dropout=0.3)
    state, batch = state_of(module, stage), batch_of()
    program = scheduled(train_step_of(module, n), state, batch)
    clones = lambda: [x.clone() for x in inputs_of(state, batch)]  # noqa: E731
    with torch.no_grad():
        expected = program.gm(*clones())
    assert_same_trees(Executor(program.gm).run(clones()), expected)


def chain(*functions):
    """A graph `x -> functions[-1](... functions[0](x))`, and its nodes."""
    graph = Graph()
    x = graph.placeholder("x")
    nodes = [x]
    for f in functions:
        nodes.append(graph.call_function(f, (nodes[-1],)))
    graph.output([nodes[-1]])
    return GraphModule(torch.nn.Module(), graph)


def watched():
    """References to values, and at each look which of them are alive; a function that makes one, and one that looks."""
    alive, seen = [], []

    def made(x):
        y = x + 1
        alive.append(weakref.ref(y))
        return y

    def looked(x):
        seen.append([ref() is not None for ref in alive])
        return x + 1

    return alive, seen, made, looked


def test_values_are_freed_at_their_last_use():
    alive, seen, made, looked = watched()
    executor = Executor(chain(made, made, looked, made, looked))
    inputs = [torch.zeros(3)]
    alive.append(weakref.ref(inputs[0]))
    (out,) = executor.run(inputs)
    # The caller's value and the first are gone at the first look; only what is looked at is there.
    assert seen == [[False, False, True], [False, False, False, True]]
    assert inputs == [] and torch.equal(out, torch.full((3,), 5.0))


def test_an_input_of_a_call_is_freed_at_its_last_use_inside():
    _, seen, made, looked = watched()
    graph = Graph()
    x = graph.placeholder("x")
    first, second = (graph.call_function(made, (x,)) for _ in range(2))
    body = graph.get_attr("body")
    node = graph.call_function(call, (body, first))
    again = graph.call_function(call, (body, second))
    graph.output([node, again, second])
    root = torch.nn.Module()
    root.body = chain(looked, looked)
    executor = Executor(GraphModule(root, graph))
    out, _, _ = executor.run([torch.zeros(3)])
    # The first value is gone behind its use; the second one is needed outside.
    assert seen == [[True, True], [False, True], [False, True], [False, True]]
    assert torch.equal(out[0], torch.full((3,), 3.0))


def test_unused_inputs_are_freed_at_once():
    graph = Graph()
    x, unused = graph.placeholder("x"), graph.placeholder("unused")
    held = []

    def look(x):
        held.append(ref() is not None)
        return x

    graph.output([graph.call_function(look, (x,))])
    executor = Executor(GraphModule(torch.nn.Module(), graph))
    inputs = [torch.zeros(1), torch.zeros(1)]
    ref = weakref.ref(inputs[1])
    executor.run(inputs)
    assert held == [False] and unused.name in executor.source


def test_every_kind_of_argument():
    graph = Graph()
    x = graph.placeholder("x")
    root = torch.nn.Module()
    root.constant = torch.arange(3.0)
    constant = graph.get_attr("constant")
    cast = graph.call_function(aten._to_copy.default, (x,), {"dtype": torch.float64, "device": torch.device("cpu")})
    filled = graph.call_function(aten.full.default, ([3], float("inf")), {"dtype": torch.float64})
    less = graph.call_function(aten.full.default, ([3], float("-inf")), {"dtype": torch.float64})
    nan = graph.call_function(aten.full.default, ([3], float("nan")))
    parts = graph.call_function(aten.split.Tensor, (cast, 1))
    part = graph.call_function(operator.getitem, (parts, slice(0, 2, None)))
    joined = graph.call_function(aten.cat.default, (part,))
    plus = graph.call_function(aten.add.Tensor, (x, constant), {"alpha": 2})
    graph.output([cast, filled, less, nan, joined, plus])
    executor = Executor(GraphModule(root, graph))
    cast, filled, less, nan, joined, plus = executor.run([torch.tensor([1.0, 2.0, 3.0])])
    assert cast.dtype == torch.float64 and filled.eq(float("inf")).all() and less.eq(float("-inf")).all()
    assert nan.isnan().all() and joined.tolist() == [1.0, 2.0] and plus.tolist() == [1.0, 4.0, 7.0]


def test_the_source_can_be_read():
    module = build(2)
    source = Executor(scheduled(train_step_of(module), state_of(module, 3), batch_of(), donating=True).gm).source
    lines = source.splitlines()
    assert lines[0] == "def run(inputs):" and "inputs.clear()" in lines[2] and lines[-1].startswith("    return [")
    assert sum("adamw_" in line for line in lines) == 2
    assert any(line.endswith(" = None") for line in lines)


def test_nothing_is_recorded_for_a_backward_pass():
    (out,) = Executor(chain(aten.sin.default)).run([torch.ones(2, requires_grad=True)])
    assert out.grad_fn is None
