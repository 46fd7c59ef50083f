"""Transfers of values between layers run while gradients of weights are computed."""

import torch
from torch import nn
from torch.func import functional_call

import zerofn
from tests.support.small_steps import step_with
from zerofn.comm.mesh import Mesh
from zerofn.cost.op_cost import flops
from zerofn.graph.alias import positions
from zerofn.graph.node_kinds import arguments, is_start, wait_of
from zerofn.parallel import tensor

PLAN = {"*.mlp.0": "colwise", "*.mlp.2": "rowwise"}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Tanh(), nn.Linear(32, 16, bias=False))

    def forward(self, x):
        return x + self.mlp(x)


def layers():
    return nn.Sequential(Layer(), Layer(), Layer())


def planned(plan, sizes):
    mesh = Mesh.planned(sizes)
    model = zerofn.skeleton(layers)
    cuts = tensor(model, mesh, plan)

    def init_state():
        return zerofn.TrainState.create(params=dict(layers().named_parameters()), tx=zerofn.optim.sgd(0.1))

    train_step = step_with(lambda p, x: functional_call(model, p, (x,)).pow(2).mean())

    table = zerofn.plan(
        train_step, init_state, torch.zeros(2, 4, 16), mesh=mesh, cuts=cuts, machine="H100-8", stage=1,
        precision=None, offload=None, remat=None,
    )  # fmt: skip
    return table[0].plan.graph.graph


def hidden(graph):
    """For each transfer of values, in order, the products between its start and its wait."""
    nodes, where = list(graph.nodes), positions(graph)
    starts = [n for n in nodes if n.op == "call_function" and is_start(n) and not arguments(n).get("unit")]
    between = [nodes[where[n] + 1 : where[wait_of(n)]] for n in starts]
    return [sum(flops(x) > 0 for x in found) for found in between]


def test_sums_of_gradients_run_beside_products_of_weights_gradients():
    found = hidden(planned(PLAN, {"tensor": 8}))
    # A sum is a reduce-scatter and an all-gather. Forwards nothing is free. Backwards the gradients of the two weights
    # are, one beside each half; the first layer's input has no gradient.
    assert [x for x in found if x] == [1, 1, 1, 1]


def test_parts_of_sequences_are_summed_beside_products_too():
    found = hidden(planned(PLAN | {"*": "sequence_parallel"}, {"tensor": 2}))
    # What a layer took is gathered again beside three products, and its gradient is summed beside those of two weights.
    # There is no such sum for the first layer.
    assert [x for x in found if x] == [3, 2, 3, 2, 2]
