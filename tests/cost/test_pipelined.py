"""Ranks of a pipeline beside each other, beside the simulation of their schedule."""

import pytest
import torch
from torch.fx import Graph, GraphModule

import zerofn
from zerofn import schedules
from zerofn.comm import channels  # noqa: F401  (defines zerofn::send and zerofn::receive)
from zerofn.comm.mesh import Mesh
from zerofn.cost.pipelined import simulated
from zerofn.planning.stages import as_stages
from zerofn.schedules import Compute, Costs, Edge, Receive, Send, Sent, messages, simulate

ops, aten = torch.ops.zerofn, torch.ops.aten
NODE = zerofn.Machine("node", "cpu", 8, 1e9, 1e3, {"float32": 1e3}, link=100.0, network=50.0, launch=0.0, latency=0.25)
NUMBER = 4  # elements of a message


def graph_of(steps, mesh, meet=True):
    """What a rank of a pipeline runs, with a transfer of all ranks at its end."""
    graph, last, received = Graph(), None, {}
    group = mesh.stages.group

    def call(target, *args, action=None, **kwargs):
        node = graph.call_function(target, args, kwargs)
        node.meta |= {"val": torch.zeros(NUMBER), "action": action}
        return node

    last = graph.placeholder("x")
    last.meta["val"] = torch.zeros(NUMBER)
    for step in steps:
        if isinstance(step, Receive):
            place = ([NUMBER], [1], step.message.source, group, "x")
            received[step.message] = call(ops.receive.default, *place, dtype=torch.float32, device=torch.device("cpu"))
        elif isinstance(step, Send):
            call(ops.send.default, last, step.message.target, group, "x")
        elif isinstance(step, Sent):
            continue  # `simulate` knows nothing of ranks that wait for the end of their last send
        else:
            assert isinstance(step, Compute)
            for message in step.reads:
                call(ops.wait.default, received.pop(message))
            last = call(aten.neg.default, last, action=step.action)
    if meet:
        call(ops.wait.default, call(ops.all_gather.default, last, mesh.stages.size, group, ""))
    graph.output(())
    return GraphModule(torch.nn.Module(), graph)


def beside(name, ranks, microbatches, machine=NODE):
    """(the ranks beside each other, the schedule's simulation)"""
    schedule = schedules.make(name, ranks, microbatches)
    n = schedule.num_stages
    times = [[1.0 + 0.3 * ((s * k) % 4) for s in range(n)] for k in (1, 2, 3)]
    send = machine.latency + 4 * NUMBER / (machine.link if machine.ranks >= ranks else machine.network)
    costs = Costs(*map(tuple, times), (send,) * (n - 1), (send,) * (n - 1), (0.0,) * n, (0.0,) * n)
    edges = [Edge(s, s + 1, "F") for s in range(n - 1)] + [Edge(s + 1, s, "I") for s in range(n - 1)]
    meshes = as_stages(Mesh.planned({"pipe": ranks}))
    graphs = [graph_of(steps, mesh) for steps, mesh in zip(messages(schedule, edges, costs), meshes, strict=True)]

    def cost(node):
        action = node.meta.get("action")
        return costs.seconds(action.stage, action.kind) if action else 0.0

    return simulated(graphs, meshes, machine, cost), simulate(schedule, costs)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "interleaved", "interleaved-zb", "zbv"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 3), (4, 8)])
def test_ranks_take_what_their_schedule_does(name, ranks, microbatches):
    found, expected = beside(name, ranks, microbatches)
    gather = 4 * NUMBER * (ranks - 1) / 100.0 + 0.25 * (ranks // 2)
    assert found.seconds == pytest.approx(expected.makespan + gather)
    idle = [(share * expected.makespan + gather) / found.seconds for share in expected.idle]
    assert found.idle == pytest.approx(idle)


def test_messages_between_nodes_use_the_network():
    slow = zerofn.Machine(**{**vars(NODE), "ranks": 1})
    found, expected = beside("1f1b", 2, 3, slow)
    assert found.seconds == pytest.approx(expected.makespan + 4 * NUMBER / 50.0 + 0.25)


def test_ranks_that_wait_for_each_other_are_told():
    meshes = as_stages(Mesh.planned({"pipe": 2}))
    never = Receive(schedules.messages(schedules.make("gpipe", 2, 1), [Edge(0, 1, "F")])[1][0].message)
    orders = [[Compute(None, ())], [never, Compute(None, (never.message,))]]
    graphs = [graph_of(steps, mesh, False) for steps, mesh in zip(orders, meshes, strict=True)]
    with pytest.raises(ValueError, match="wait for each other"):
        simulated(graphs, meshes, NODE, lambda node: 1.0)
