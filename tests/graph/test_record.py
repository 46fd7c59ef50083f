"""What is known of a graph is known once, and anew after every edit."""

import pytest
import torch

from tests.graph.test_call import called, finished
from tests.support.bodies import body_of, call_in
from zerofn.dry_run.fake_machine import FakeMachine
from zerofn.graph.alias import writes
from zerofn.graph.edit import copied
from zerofn.graph.nested import calls
from zerofn.graph.record import recorded

aten = torch.ops.aten
X = torch.randn(4, 4)


@pytest.fixture
def asked():
    """A function of a graph, and how often it has run."""
    runs = []

    @recorded
    def count(gm):
        runs.append(gm)
        return len(gm.graph.nodes)

    return count, runs


def edits():
    """Ways to edit the graph of `x -> [cos(sin(x)), x + 1]`."""

    def nodes(gm):
        return {x.name: x for x in gm.graph.nodes}

    def add(gm):
        with gm.graph.inserting_after(nodes(gm)["sin"]):
            gm.graph.call_function(aten.exp.default, (nodes(gm)["sin"],))

    def erase(gm):
        nodes(gm)["output"].args = ([nodes(gm)["cos"]],)
        gm.graph.erase_node(nodes(gm)["add"])

    def move(gm):
        nodes(gm)["sin"].prepend(nodes(gm)["add"])

    def replace(gm):
        nodes(gm)["sin"].target = aten.tan.default

    def rewire(gm):
        nodes(gm)["cos"].args = (nodes(gm)["arg0_1"],)

    def option(gm):
        nodes(gm)["add"].kwargs = {"alpha": 2}

    def another_input(gm):
        nodes(gm)["arg0_1"].meta["val"] = nodes(gm)["arg0_1"].meta["val"].double()

    return add, erase, move, replace, rewire, option, another_input


def body():
    return body_of(lambda x: [x.sin().cos(), x + 1], X)


@pytest.mark.parametrize("edit", edits(), ids=lambda x: x.__name__)
def test_after_an_edit_it_is_computed_again(asked, edit):
    count, runs = asked
    gm = body()
    assert count(gm) == count(gm) == len(gm.graph.nodes) and len(runs) == 1
    edit(gm)
    assert count(gm) == count(gm) == len(gm.graph.nodes) and len(runs) == 2


@pytest.mark.parametrize("edit", edits(), ids=lambda x: x.__name__)
def test_an_edit_of_a_body_counts_for_the_graph_around_it(asked, edit):
    count, runs = asked
    inner = body()
    root, graph, (where,), x, _ = called(inner)
    gm = finished(root, graph, call_in(graph, where, x))
    count(gm)
    edit(inner)
    count(inner)  # asked of itself first, too
    count(gm)
    assert runs == [gm, inner, gm]
    gm.body_0 = body()
    count(gm)
    assert runs == [gm, inner, gm, gm]


def test_an_edited_body_writes_what_it_writes_by_then():
    inner = body()
    root, graph, (where,), x, _ = called(inner)
    gm = finished(root, graph, call_in(graph, where, x))
    ((node, call),) = calls(gm)
    assert writes(node) == []
    given = next(iter(call.given))
    with inner.graph.inserting_after(given):
        inner.graph.call_function(aten.mul_.Tensor, (given, 2))
    assert writes(node) == [x]


def test_a_copy_has_a_record_of_its_own(asked):
    count, runs = asked
    gm = body()
    assert count(gm) == count(copied(gm)) and len(runs) == 2


def test_what_holds_on_a_fake_machine_is_kept_apart(asked):
    count, runs = asked
    gm = body()
    count(gm)
    for _ in range(2):
        with FakeMachine(accelerator=True, dram=1.0, link=1.0)():
            count(gm)
    count(gm)
    assert len(runs) == 2
