"""Operations with a derivative inside a model: steps have the bits of plain torch, and plans count what they say."""

import functools

import pytest
import torch
from torch import nn
from torch.func import functional_call

import zerofn
from tests.support.same import assert_same_trees
from zerofn import optim, passes
from zerofn.cost.op_cost import flops, touched_bytes
from zerofn.graph.nested import graphs_of
from zerofn.graph.phase import BACKWARD, phase_of
from zerofn.graph.segments import Segments
from zerofn.ops.differentiable import Derivative, define_differentiable
from zerofn.ops.registry import OnShard, Traits
from zerofn.passes.budget.decision import Choice
from zerofn.passes.budget.search import graphs
from zerofn.passes.offload_activations import stays

ops, aten = torch.ops.zerofn, torch.ops.aten
LAYERS, WIDTH = 3, 24


def swiglu(gate, up, scale=1.0):
    return aten.silu(gate) * up * scale


def swiglu_backward(grad, gate, up, scale):
    grad = grad * scale
    return aten.silu_backward(grad * up, gate), grad * aten.silu(gate)


def norm(x, dim):
    size = x.square().sum(dim, keepdim=True).sqrt()
    return x / size, size.squeeze(dim)


def norm_backward(grad, grad_size, y, size, dim):
    inside = grad - y * (grad * y).sum(dim, keepdim=True)
    return inside / size.unsqueeze(dim) + y * grad_size.unsqueeze(dim)


swiglu_of_a_test = define_differentiable(
    "swiglu_of_a_test(Tensor gate, Tensor up, float scale=1.0) -> Tensor",
    swiglu,
    lambda gate, up, scale=1.0: gate.new_empty(gate.shape),
    Derivative(
        swiglu_backward,
        by=["gate", "up"],
        saves=["gate", "up", "scale"],
        traits=Traits(OnShard.REFUSED, flops=lambda given, result: 9 * result[0].numel()),
    ),
    traits=Traits(
        OnShard.REFUSED,
        flops=lambda given, result: 5 * given["gate"].numel(),
        touches=lambda given, result: 3 * result.nbytes,
    ),
)
norm_of_a_test = define_differentiable(
    "norm_of_a_test(Tensor x, int dim) -> (Tensor y, Tensor size)",
    norm,
    lambda x, dim: (x.new_empty(x.shape), x.new_empty([n for k, n in enumerate(x.shape) if k != dim % x.dim()])),
    Derivative(
        norm_backward,
        by=["x"],
        saves=["y", "size", "dim"],
        traits=Traits(OnShard.REFUSED),
        fake=lambda grad, grad_size, y, size, dim: y.new_empty(y.shape),
    ),
    traits=Traits(OnShard.REFUSED),
)


# --- a model -------------------------------------------------------------------------------------


class Gated(nn.Module):
    """Residual blocks with a gate, and a head."""

    def __init__(self, gated):
        super().__init__()
        torch.manual_seed(0)
        self.gated = gated
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)) for _ in range(LAYERS))

    def forward(self, x):
        for gate, up, down in self.layers:
            x = x + down(self.gated(gate(x), up(x), 0.5))
        return x


def rows(rank):
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(rank))


def started(stage, num_microbatches=1, **options):
    net = Gated(ops.swiglu_of_a_test)

    def step(state, x):
        vg = state.value_and_grad(lambda params, x: functional_call(net, params, (x,)).square().mean())
        loss, grads = zerofn.accumulate(vg, num_microbatches, reduce="microbatch")(x)
        return state.apply_gradients(grads), loss

    state = zerofn.TrainState.create(params=dict(net.named_parameters()), tx=optim.sgd(0.1))
    unit = lambda name: ".".join(name.split(".")[:2])  # noqa: E731 - a layer
    return zerofn.shard(state, stage=stage, unit=unit), zerofn.compile(step, **options)


def trained(stage, num_microbatches=1, **options):
    """(plan, parameters after three steps)"""
    state, step = started(stage, num_microbatches, **options)
    x = rows(zerofn.rank())
    plan = step.lower(state, x)
    for _ in range(3):
        state, _ = step(state, x)
    return plan, zerofn.unshard(state.params)


def plain(size, num_microbatches):
    """The same in torch alone, which sums over ranks, then over microbatches."""
    net = Gated(swiglu)
    update = torch.optim.SGD(net.parameters(), lr=0.1)
    scale = torch.tensor(1.0 / (size * num_microbatches))
    for _ in range(3):
        total = None
        for parts in zip(*(rows(r).chunk(num_microbatches) for r in range(size)), strict=True):
            found = [torch.autograd.grad(net(x).square().mean(), list(net.parameters()), scale) for x in parts]
            mine = [functools.reduce(torch.add, x) for x in zip(*found, strict=True)]
            total = mine if total is None else [a + b for a, b in zip(total, mine, strict=True)]
        for p, g in zip(net.parameters(), total, strict=True):
            p.grad = g
        update.step()
    return {name: p.detach() for name, p in net.named_parameters()}


def nodes_of(plan):
    """(forward, backward) nodes of the operation."""
    found = [n for gm in graphs_of(plan.graph) for n in gm.graph.nodes]
    forward, backward = ops.swiglu_of_a_test.default, ops.swiglu_of_a_test_backward.default
    return [n for n in found if n.target is forward], [n for n in found if n.target is backward]


def as_plain_torch(num_microbatches):
    expected = plain(zerofn.world_size(), num_microbatches)
    for stage in range(4):
        plan, found = trained(stage, num_microbatches)
        assert list(map(len, nodes_of(plan))) == [LAYERS, LAYERS]
        assert_same_trees(found, expected, f"stage {stage}")


@pytest.mark.part(size=[2], num_microbatches=[4])
@pytest.mark.parametrize("size, num_microbatches", [(1, 1), (1, 4), (2, 1), (2, 4)])
def test_a_step_has_the_bits_of_plain_torch_with_one_node_each_way(ranks, size, num_microbatches):
    ranks(size, as_plain_torch, num_microbatches)


@pytest.mark.parametrize("how", ["computed again", "on the host"])
def test_its_result_may_be_computed_again_or_wait_on_the_host(monkeypatch, how):
    def decide(self, program, **options):
        found = [gm.graph for gm in graphs(program.gm)]
        if how == "computed again":
            return [Choice(dropped=frozenset(x.name for x in Segments(graph).activations)) for graph in found]
        return [Choice(offloaded=frozenset(x.memory.name for x in stays(graph))) for graph in found]

    monkeypatch.setattr(passes.Pipeline, "decide", decide)
    plan, found = trained(3, memory="1TB")
    assert_same_trees(found, plain(1, 1))
    forward, _ = nodes_of(plan)
    again = [n for n in forward if phase_of(n) == BACKWARD]
    back = [n for n in plan.graph.graph.nodes if n.target is ops.bring.default and phase_of(n) == BACKWARD]
    assert len(again if how == "computed again" else back) >= LAYERS


def test_plans_count_the_flops_and_bytes_that_an_operation_declares():
    plan, _ = trained(0)
    forward, backward = nodes_of(plan)
    assert [flops(n) for n in forward] == [5 * 8 * WIDTH] * LAYERS
    assert [flops(n) for n in backward] == [9 * 8 * WIDTH] * LAYERS
    assert [touched_bytes(n) for n in forward] == [3 * 8 * WIDTH * 4] * LAYERS  # by what it says
    assert [touched_bytes(n) for n in backward] == [5 * 8 * WIDTH * 4] * LAYERS  # two results, three arguments


# --- the declaration -----------------------------------------------------------------------------


def test_derivatives_are_those_of_finite_differences():
    torch.manual_seed(0)
    gate, up = (torch.randn(5, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(ops.swiglu_of_a_test, (gate, up, 0.5))
    assert torch.autograd.gradcheck(ops.swiglu_of_a_test, (gate, up))  # with the default
    assert torch.autograd.gradcheck(lambda x: ops.norm_of_a_test(x, 1), (gate,))  # of results that are saved
    assert torch.autograd.gradcheck(lambda x: ops.norm_of_a_test(x, 0)[1], (gate,))  # of one result of two


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own in torch 2.15
def test_fake_results_are_as_real_ones():
    x = torch.randn(5, 3, requires_grad=True)
    torch.library.opcheck(ops.swiglu_of_a_test.default, (x, torch.randn(5, 3, requires_grad=True), 0.5))
    torch.library.opcheck(ops.norm_of_a_test.default, (x, 1))


def test_there_is_no_second_derivative():
    gate, up = torch.randn(3, requires_grad=True), torch.randn(3)
    (first,) = torch.autograd.grad(ops.swiglu_of_a_test(gate, up).sum(), gate, create_graph=True)
    with pytest.raises(NotImplementedError, match="zerofn::swiglu_of_a_test has no second derivative"):
        first.sum().backward()


@pytest.mark.parametrize(
    ("by", "saves", "says"),
    [
        (["x"], ["z"], "zerofn::refused_of_a_test has no 'z'; it has x, y, result0"),
        (["x", "y"], ["result0", "y"], "save x of zerofn::refused_of_a_test, whose shape its gradient has"),
    ],
)
def test_what_a_declaration_lacks_is_told(by, saves, says):
    traits = Traits(OnShard.REFUSED)
    with pytest.raises(ValueError, match=says):
        define_differentiable(
            "refused_of_a_test(Tensor x, Tensor y) -> Tensor",
            torch.mul,
            torch.mul,
            Derivative(torch.mul, by=by, saves=saves, traits=traits),
            traits=traits,
        )


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_of_torch_func_differentiate_the_function():
    gate, up = torch.randn(2, 3, WIDTH, dtype=torch.float64)

    def gated(own):
        return lambda gate, up: (swiglu_of_a_test if own else swiglu)(gate, up).square().sum()

    def normed(own):
        return lambda x: sum(y.pow(3).sum() for y in (norm_of_a_test if own else norm)(x, -1))

    by = functools.partial(torch.func.grad, argnums=(0, 1))
    same = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
    same(by(gated(True))(gate, up), by(gated(False))(gate, up))
    same(*(torch.func.vmap(by(gated(own)))(gate, up) for own in (True, False)))
    same(*(torch.func.jacrev(normed(own))(gate) for own in (True, False)))
    with pytest.raises(NotImplementedError, match="zerofn::norm_of_a_test has no second derivative"):
        torch.func.jacrev(torch.func.grad(normed(True)))(gate)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(normed(True), (gate,), (gate,))
