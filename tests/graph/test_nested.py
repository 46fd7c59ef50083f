"""Operations that run graphs of their own: ours, and those of torch."""

import pytest
import torch
from torch import cond
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch._ops import HigherOrderOperator
from torch.fx import Graph, GraphModule
from torch.nn.attention.flex_attention import flex_attention

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import captured
from zerofn import optim
from zerofn.capture import verify
from zerofn.capture.loop import loop
from zerofn.graph.alias import writes
from zerofn.graph.nested import calls, give, graphs_of, is_result, is_unknown

aten, ops = torch.ops.aten, torch.ops.zerofn


def state_of():
    torch.manual_seed(0)
    return zerofn.TrainState.create(params={"w": torch.randn(4, 4), "b": torch.randn(4)}, tx=optim.sgd(0.1))


def batches():
    torch.manual_seed(1)
    return [torch.randn(6, 4) for _ in range(5)][2:]  # sums of -0.9, 11.4 and -1.5, of which two halves are positive


def branches(p, x):
    return torch.cond(x.sum() > 0, lambda y, w: (y @ w).sin(), lambda y, w: (y @ w.T).cos(), (x, p["w"])) + p["b"]


def imported_before(p, x):
    return cond(x.mean() > 0, lambda y, w: (y @ w).cos(), lambda y, w: (y @ w).sin(), (x, p["w"])) + p["b"]


def closing(p, x):
    return torch.cond(x.sum() > 0, lambda y: y @ p["w"], lambda y: y * 2, (x,)) + p["b"]


def trees_of_branches(p, x):
    def inner(given):
        return torch.cond(given["x"].mean() > 0, lambda y: y * 2, lambda y: y.sin(), (given["x"],))

    def one(w, given):
        return {"y": (inner(given) @ w).sin(), "more": (given["x"].sum(0), given["x"] * 3)}

    def other(w, given):
        return {"y": given["x"] @ w, "more": (given["x"].mean(0), given["x"].cos())}

    out = torch.cond(x.sum() > 0, one, other, (p["w"], {"x": x + p["b"]}))
    return out["y"] + out["more"][0] + out["more"][1]


def branches_that_write(p, x):
    given = x.clone()
    with torch.no_grad():
        y = torch.cond(x.sum() > 0, lambda a: a.add_(1) * 1, lambda a: a * 2, (given,))
    return (y + given) @ p["w"] + p["b"]


def rounds(p, x):
    with torch.no_grad():
        _, y = while_loop(lambda i, a: a.abs().sum() < 50, lambda i, a: (i + 1, a * 1.5), (torch.tensor(0), x))
    return y @ p["w"] + p["b"]


def carried(p, x):
    with torch.no_grad():
        _, rows = scan(lambda total, row: (total + row, total * row), torch.zeros(4), x)
    return rows @ p["w"] + p["b"]


def attention(p, x):
    with torch.no_grad():
        q = torch.cat([x, x, x, x], 1)[None, None]
        y = flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: torch.where(i >= j, score, -torch.inf))
    return y[0, 0, :, :4] @ p["w"] + p["b"]


@torch.library.custom_op("zerofn_tests::double_", mutates_args=("x",))
def double_(x: torch.Tensor) -> None:
    x.mul_(2)


def an_operation_that_writes(p, x):
    y = x @ p["w"]
    before = y + 1
    double_(y.detach().view(-1))
    return before + y + p["b"]


def step_of(model, n=1):
    def train_step(state, batch):
        vg = state.value_and_grad(lambda p, rows: model(p, rows).square().mean())
        loss, grads = zerofn.accumulate(vg, n)(batch)
        return state.apply_gradients(grads), loss

    return train_step


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch asks, in plain `cond`
@pytest.mark.parametrize(
    "model, n",
    [
        *((model, 2) for model in (branches, imported_before, closing, trees_of_branches, branches_that_write)),
        *((model, 2) for model in (rounds, carried, an_operation_that_writes, attention)),
        *(pytest.param(model, 1, marks=pytest.mark.whole) for model in (imported_before, closing, trees_of_branches)),
        *(pytest.param(model, 1, marks=pytest.mark.whole) for model in (branches, attention)),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_operations_of_torch_with_graphs_are_those_of_plain_torch(model, n):
    plain, state, step = state_of(), zerofn.shard(state_of, stage=3), zerofn.compile(step_of(model, n))
    for batch in batches():
        plain, expected = step_of(model, n)(plain, batch)
        state, loss = step(state, batch)
        assert torch.equal(loss, expected)
    assert_same_trees(zerofn.unshard(state).params, plain.params)


def differentiated_rounds(p, x):
    _, y = while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a * 1.5), (torch.tensor(0), x @ p["w"]))
    return y + p["b"]


@pytest.mark.part(model=[differentiated_rounds])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch asks
@pytest.mark.parametrize("model", [differentiated_rounds, attention])
def test_plain_torch_runs_them_as_before_after_a_capture(model):
    x = batches()[0]
    torch.compiler.reset()
    expected = model(state_of().params, x)
    torch.compiler.reset()
    zerofn.compile(step_of(model, 2))(zerofn.shard(state_of, stage=3), x)
    assert torch.equal(model(state_of().params, x), expected)


def uncompiled(p, x):
    return torch.ops.higher_order.cond(x.sum() > 0, lambda y: (y @ p["w"],), lambda y: (y * 2,), (x,))[0] + p["b"]


def test_a_branch_may_not_read_what_it_is_not_given():
    with pytest.raises(zerofn.CaptureError, match="cond.* closes over a tensor. Pass this tensor to it"):
        zerofn.compile(step_of(uncompiled))(zerofn.shard(state_of), batches()[0])


def with_a_branch(operation):
    """A graph that runs `cond` with a branch of one operation."""
    inner, outer = Graph(), Graph()
    y = inner.placeholder("y")
    inner.output([inner.call_function(operation, (y,))])
    x = outer.placeholder("x")
    x.meta["val"] = torch.ones(2)
    branch = outer.create_node("get_attr", "branch")
    node = outer.call_function(torch.ops.higher_order.cond, (True, branch, branch, (x,)))
    outer.output([node])
    return GraphModule({"branch": GraphModule({}, inner)}, outer), node, x


def test_a_branch_may_only_compute():
    for operation, told in (
        (aten.bernoulli.default, "draws from torch's global generator"),
        (ops.wait.default, None),
        (aten.relu_.default, None),
    ):
        module, node, x = with_a_branch(operation)
        assert writes(node) == ([x] if operation is aten.relu_.default else [])
        if told:
            with pytest.raises(zerofn.CaptureError, match=told):
                verify._check_foreign(module)
        else:
            verify._check_foreign(module)


def nested(state, batch):
    def outer(index, slices):
        sums, _, _ = loop(lambda i, rows: ([rows[0] * state["w"]], [], None), 2, [slices[0]])
        return [sums[0]], [sums[0] + 1], None

    return loop(outer, 3, [batch])[:2]


def test_a_loop_in_a_loop_has_its_graphs_in_order():
    gm = captured(nested, {"w": torch.ones(5)}, torch.randn(3, 2, 5)).gm
    step, outer, inner = graphs_of(gm)
    ((node, call),) = calls(gm)
    assert step is gm and call.body is outer and getattr(gm, call.name) is outer
    assert (call.rounds, call.num_sums, len(call.results)) == (3, 1, 2)
    ((_, within),) = calls(outer)
    assert within.body is inner and within.rounds == 2
    assert [x.args[1] for x in gm.graph.nodes if is_result(x)] == [0, 1]
    old = next(x for x in call.given.values() if x.op == "placeholder")
    with gm.graph.inserting_before(node):
        new = gm.graph.call_function(torch.ops.aten.clone.default, (old,))
    give(node, old, new)
    ((_, call),) = calls(gm)
    assert new in call.given.values() and old not in call.given.values()


class Unheard(HigherOrderOperator):
    """An operation that nothing describes."""

    def __init__(self):
        super().__init__("zerofn_tests_unheard")

    def __call__(self, x):
        return super().__call__(x)


def test_what_nothing_describes_counts_as_writing_to_all_it_is_given():
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(2)
    node, size = graph.call_function(Unheard(), (x,)), graph.call_function(max, (2, 3))
    assert is_unknown(node) and writes(node) == [x]
    assert is_unknown(size)
    assert not is_unknown(graph.call_function(torch.sym_max, (2, 3))) and not is_unknown(x)
