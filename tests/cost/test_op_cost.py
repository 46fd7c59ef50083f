"""What operations cost, counted otherwise; and what groups they are timed with."""

from functools import partial

import pytest
import torch
from torch._higher_order_ops.scan import scan
from torch.func import functional_call
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula
from transformers import LlamaConfig, LlamaForCausalLM

import zerofn
from tests.support.small_steps import batch_of, build, captured, fake_ranks, state_of, train_step_of
from zerofn import optim
from zerofn._torch_compat import make_fx
from zerofn.cost import op_timer
from zerofn.cost.op_cost import flops, groups_of, traffic
from zerofn.graph.nested import calls
from zerofn.tracing import fake_kernels  # noqa: F401  (registers the one for float32)

ENDS = torch.tensor([3, 8], dtype=torch.int32)
GROUPS = [slice(0, 3), slice(3, 8)]
PRODUCTS = {  # shapes, and the same by a plain product for each group
    "rows in groups": ((8, 16), (2, 16, 12), lambda a, b: [a[x] @ b[k] for k, x in enumerate(GROUPS)]),
    "columns in groups": ((2, 12, 16), (16, 8), lambda a, b: [a[k] @ b[:, x] for k, x in enumerate(GROUPS)]),
    "what is summed in groups": ((16, 8), (8, 12), lambda a, b: [a[:, x] @ b[x] for x in GROUPS]),
}


def grouped(name):
    """The node of a grouped product, and the operations that plain products take."""
    a, b, plain = PRODUCTS[name]
    a, b = torch.randn(a), torch.randn(b).mT.contiguous().mT
    with FlopCounterMode(display=False) as counted:
        plain(a, b)
    gm = make_fx(lambda a, b, ends: torch._grouped_mm(a, b, offs=ends), tracing_mode="fake")(a, b, ENDS)
    (node,) = [x for x in gm.graph.nodes if "grouped" in str(x.target)]
    return node, counted.get_total_flops()


@pytest.mark.parametrize("name", PRODUCTS)
def test_grouped_products_take_what_their_groups_take(name):
    node, expected = grouped(name)
    assert flops(node) == expected


@pytest.mark.parametrize("name", PRODUCTS)
def test_they_are_timed_with_equal_groups_of_all_rows(monkeypatch, name):
    node, _ = grouped(name)
    ends = []
    monkeypatch.setattr(op_timer, "callable_of", lambda *target: lambda *args: ends.append(args[groups_of(node).at]))
    op_timer._seconds(node, [0, 0, 0])
    assert all(x.tolist() == [4, 8] for x in ends) and ends


@torch.library.custom_op("op_cost_test::scores", mutates_args=())
def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """An operation of a user's."""
    return q @ k.t()


scores.register_fake(lambda q, k: q.new_empty(len(q), len(k)))
scores.register_autograd(
    lambda ctx, grad: (None, grad.t() @ ctx.q), setup_context=lambda ctx, inputs, output: setattr(ctx, "q", inputs[0])
)


def planned_seconds(loss_of=lambda p, q: scores(q, p["k"]).sum()):
    """Of a step on a machine on which nothing takes time but arithmetic: a billion operations a second."""

    def train_step(state, q):
        loss, grads = state.value_and_grad(loss_of)(q)
        return state.apply_gradients(grads), loss

    machine = zerofn.Machine("slow", "cpu", 1, 1e12, 1e30, {"float32": 1e9}, 1e30, 1e30, launch=1e-30)
    state = zerofn.TrainState.create(params={"k": torch.ones(64, 16)}, tx=optim.sgd(0.1))
    options = {"offload": None, "precision": None, "remat": None}
    return zerofn.plan(train_step, state, torch.empty(32, 16), world=1, stage=0, machine=machine, **options)[0].seconds


def test_a_formula_for_a_users_operation_comes_out_in_plans():
    before = planned_seconds()
    assert before == pytest.approx(2 * 64 * 16 * 32 / 1e9)  # the product of the backward pass

    @register_flop_formula(torch.ops.op_cost_test.scores)
    def flops_of_scores(q_shape, k_shape, *, out_shape):
        assert out_shape == (32, 64)
        return 5 * q_shape[0] * q_shape[1] * k_shape[0]

    try:
        assert planned_seconds() - before == pytest.approx(5 * 32 * 16 * 64 / 1e9)
    finally:
        del flop_registry[torch.ops.op_cost_test.scores]


def products(k, q):
    """Two products, of 2 * 64 * 16 * 32 operations each if `q` has 32 rows."""
    return q @ k.t() @ k


@torch.no_grad()
def plainly(p, q):
    return products(p["k"], q)


@torch.no_grad()
def in_a_branch(p, q):
    return torch.cond(q.sum() > 0, lambda k, q: q.sin(), products, (p["k"], q))


@torch.no_grad()
def in_rows(p, q):
    k = p["k"]
    _, rows = scan(lambda c, x: (c + 1, products(k, x)), torch.zeros(()), q.reshape(4, 8, 16))
    return rows


@pytest.mark.parametrize("run", [plainly, in_a_branch, in_rows])
def test_what_runs_graphs_takes_what_they_take(run):
    seconds = planned_seconds(lambda p, q: (p["k"] * run(p, q).sum()).sum())
    assert seconds == pytest.approx(2 * 2 * 64 * 16 * 32 / 1e9)


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_takes_what_attention_takes():
    def with_it(p, q):
        q = q.reshape(1, 2, 16, 16)
        return (p["k"] * flex_attention(q, q, q, score_mod=lambda score, *at: score * 2).detach().sum()).sum()

    assert planned_seconds(with_it) == pytest.approx(2 * 2 * 2 * 16 * 16 * 16 / 1e9)  # two products in each head


def test_a_loop_moves_what_its_rounds_move():
    found = {}
    for n in (2, 4):
        with fake_ranks(2):
            program = captured(train_step_of(build(2), n), state_of(build(2), 3), batch_of(rows=8))
            ((_, call),) = calls(program.gm)
            found[n], inside = traffic(program.gm, program.mesh), traffic(call.body, program.mesh)
        assert inside and {x: n * times for x, times in inside.items()}.items() <= found[n].items()
        assert all(x.axis == "data" for x in found[n])
    assert found[2].keys() == found[4].keys()  # gathers and reductions of parameters, however many rows there are


@pytest.mark.part(options=[{}], kv_heads=[2])
@pytest.mark.part(options=[{"remat": "full"}], kv_heads=[4])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"remat": "full"}])
def test_a_decoder_takes_what_the_field_counts(kv_heads, options):
    """6 N + 12 x layers x width x length a token; what is recomputed is beside it."""
    layers, width, length, vocab = 2, 32, 24, 64
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": 48, "vocab_size": vocab}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=kv_heads, use_cache=False)
    model = LlamaForCausalLM(config)
    params = {k: p.detach() for k, p in model.named_parameters()}
    state = zerofn.shard(zerofn.TrainState.create(params=params, tx=optim.sgd(0.1)), stage=3)

    def step(state, ids):
        vg = state.value_and_grad(
            lambda p, ids: functional_call(model, p, kwargs={"input_ids": ids, "labels": ids}).loss
        )
        loss, grads = vg(ids)
        return state.apply_gradients(grads), loss

    run, ids = zerofn.compile(step, **options), torch.zeros(3, length, dtype=torch.int64)
    assert run.flops == 0
    plan = run.lower(state, ids)
    products = sum(p.numel() for k, p in params.items() if p.dim() == 2 and "embed" not in k)
    assert run.flops == plan.flops.model == 3 * length * (6 * products + 12 * layers * width * length)
    assert (plan.flops.again > 2 * layers * 3 * length * length * width) == bool(options)
    assert "computed by a rank in a step" in plan.text()


def test_what_a_step_checkpoints_itself_counts_once():
    params = {"a": torch.randn(16, 32), "b": torch.randn(32, 4)}
    state = zerofn.TrainState.create(params=params, tx=optim.sgd(0.1))
    again = {}
    for how in (lambda f, *args: f(*args), partial(checkpoint, use_reentrant=False)):

        def step(state, x, how=how):
            loss, grads = state.value_and_grad(lambda p, x: how(lambda x: (x @ p["a"]).relu() @ p["b"], x).sum())(x)
            return state.apply_gradients(grads), loss

        plan = zerofn.compile(step).lower(zerofn.shard(state), torch.ones(8, 16))
        assert plan.flops.model == 2 * 8 * (2 * 16 * 32 + 3 * 32 * 4)  # of `a` there is no gradient of the input
        again[how] = plan.flops.again
    assert [*again.values()] == [0, 2 * 8 * 16 * 32]
