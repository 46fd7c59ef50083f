"""Linear layers in float8, beside plain torch that rounds by torchao's formula and multiplies in float64."""

import functools
import logging
import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import zerofn
from tests.support import tiny_models
from tests.support.same import assert_same_trees
from tests.support.some import some_of
from zerofn import optim, tree_map
from zerofn.comm.transport import SentBytes
from zerofn.graph.phase import FORWARD, phase_of
from zerofn.training.float8 import Products, float8_products
from zerofn.util.process import the

FORMATS = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def rounded(x, dtype=torch.float8_e4m3fn):
    """As float64: one power of two for the tensor, torchao's tensorwise recipe."""
    scale = torch.exp2(torch.floor(torch.log2(FORMATS[dtype] / x.abs().max().float())))
    return (x.float() * scale).to(dtype).double() / scale.double()


class ByTorch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, bias):
        ctx.save_for_backward(x, w)
        return (rounded(x) @ rounded(w).T + bias.double()).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        g = rounded(dy, torch.float8_e5m2)
        return (g @ rounded(w)).to(dy.dtype), (g.T @ rounded(x)).to(dy.dtype), dy.sum(0)


class Net(nn.Module):
    """Layers with two and three readers of one input, odd numbers of rows, and a last one of odd size."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)
        self.last = nn.Linear(32, 3)

    def forward(self, x, linear=None):
        linear = linear or nn.functional.linear
        h = linear(x, self.a.weight, self.a.bias).tanh() * linear(x, self.b.weight, self.b.bias)
        return nn.functional.linear(linear(h, self.c.weight, self.c.bias).relu(), self.last.weight, self.last.bias)


def batch_of(rank=0, step=0, rows=5):
    x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(10 * step + rank))
    return {"x": x, "y": x[:, :3].sin()}


def started(precision="fp8", num_microbatches=1, net=None, call=None, **options):
    """(state, step)"""
    net = net or Net()

    def loss_fn(params, batch):
        run = functional_call if call is None else call
        return (run(net, params, (batch["x"].bfloat16(),)).float() - batch["y"]).square().mean()

    def step(state, batch):
        vg = state.value_and_grad(loss_fn)
        loss, grads = (vg if num_microbatches == 1 else zerofn.accumulate(vg, num_microbatches))(batch)
        return state.apply_gradients(grads), {"loss": loss, "norm": zerofn.global_norm(grads)}

    init = zerofn.TrainState.create(params=dict(net.named_parameters()), tx=optim.adamw(1e-2))
    return zerofn.shard(init, precision=precision, **options), step


def trained(state, run, steps=3, rows=5):
    losses = []
    for k in range(steps):
        state, aux = run(state, batch_of(zerofn.rank(), k, rows))
        losses.append(aux["loss"])
    return {"losses": torch.stack(losses), "norm": aux["norm"], **zerofn.unshard(state.params)}


def test_gradients_are_those_of_products_of_rounded_numbers():
    net = Net()
    state, _ = started(net=net)
    batch = batch_of()

    def loss_fn(params, batch):
        return (functional_call(net, params, (batch["x"].bfloat16(),)).float() - batch["y"]).square().mean()

    loss, grads = state.value_and_grad(loss_fn)(batch)
    params = {k: p.detach().bfloat16().requires_grad_() for k, p in net.named_parameters()}
    out = functional_call(net, params, (batch["x"].bfloat16(), ByTorch.apply))
    want = (out.float() - batch["y"]).square().mean()
    want.backward()
    assert abs(float(loss - want.detach())) < 1e-3 * float(loss)
    for name, g in zerofn.unshard(grads).items():
        ours, theirs = g.float(), params[name].grad.float()
        assert (ours - theirs).norm() <= 0.01 * theirs.norm(), name
    exact = {k: p.detach().float().requires_grad_() for k, p in net.named_parameters()}
    (functional_call(net, exact, (batch["x"],)) - batch["y"]).square().mean().backward()
    off = exact["a.weight"].grad - zerofn.unshard(grads)["a.weight"]
    assert off.norm() > 0.01 * exact["a.weight"].grad.norm()  # what the first comparison would have to notice


def test_losses_follow_those_in_bfloat16():
    curves = {}
    for precision in ("bf16", "fp8"):
        state, step = started(precision)
        run = zerofn.compile(step)
        for k in range(60):
            state, aux = run(state, batch_of(0, k % 4, 64))
            curves.setdefault(precision, []).append(float(aux["loss"]))
    first, last = curves["bf16"][0], sum(curves["bf16"][-8:]) / 8
    assert last < 0.35 * first
    assert abs(sum(curves["fp8"][-8:]) / 8 - last) < 0.05 * first
    assert curves["fp8"] != curves["bf16"]


def test_a_compiled_step_has_the_bits_of_the_step_itself():
    for num_microbatches in (1, 2):
        state, step = started(num_microbatches=num_microbatches)
        plain = trained(state, step, rows=6)
        state, step = started(num_microbatches=num_microbatches)
        assert_same_trees(trained(state, zerofn.compile(step), rows=6), plain, f"{num_microbatches} microbatches")


def in_layers(net, params, args):
    """The net's first half as a segment of torch's checkpointing."""

    def run(x):
        h = functional_call(net.a, _under(params, "a"), (x,)).tanh() * functional_call(net.b, _under(params, "b"), (x,))
        return functional_call(net.c, _under(params, "c"), (h,)).relu()

    return functional_call(net.last, _under(params, "last"), (checkpoint(run, *args, use_reentrant=False),))


def _under(params, name):
    return {k.removeprefix(f"{name}."): p for k, p in params.items() if k.startswith(f"{name}.")}


@pytest.mark.part(how=["remat"])
@pytest.mark.parametrize("how", ["remat", "memory", "donate"])
def test_what_is_recomputed_has_the_same_bits(how):
    """Within nine tenths of the memory, too."""
    wide = nn.Sequential(*(x for _ in range(4) for x in (nn.Linear(32, 32), nn.GELU())), nn.Linear(32, 3))
    state, step = started(net=wide)
    run = zerofn.compile(step)
    total = run.lower(state, batch_of(rows=1024)).memory().total
    want = trained(state, run, rows=1024)
    options = {"remat": {"remat": "full"}, "memory": {"memory": int(0.9 * total)}, "donate": {"donate": False}}[how]
    state, step = started(net=wide)
    assert_same_trees(trained(state, zerofn.compile(step, **options), rows=1024), want, how)


def test_checkpointed_segments_have_the_same_bits():
    state, step = started()
    want = trained(state, zerofn.compile(step))
    for compile_ in (zerofn.compile, lambda step: step):
        state, step = started(call=in_layers)
        assert_same_trees(trained(state, compile_(step)), want)


def every_stage(num_microbatches):
    found = {}
    for stage in range(4):
        state, step = started(stage=stage, num_microbatches=num_microbatches, unit=lambda name: name.split(".")[0])
        found[stage] = trained(state, zerofn.compile(step), rows=6)
    pairs = [(0, 1), (2, 3)] + [(0, 2)] * (num_microbatches == 1)
    for first, other in pairs:
        assert_same_trees(found[other], found[first], f"stage {other} beside {first}")
    state, step = started(stage=3, num_microbatches=num_microbatches, unit=lambda name: name.split(".")[0])
    run = zerofn.compile(step, remat="full")
    assert_same_trees(trained(state, run, rows=6), found[3], "recomputed")


@pytest.mark.whole  # but for the microbatches, `gathered` asks the same
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_every_stage_has_the_same_bits(ranks, num_microbatches):
    ranks(2, every_stage, num_microbatches)


RULE = zerofn.Fp8(lambda name: name not in ("last.weight", "4.weight"), gather=True)
GATHERED = zerofn.Precision(torch.float32, torch.bfloat16, torch.float32, fp8=RULE)


def gathered():
    options = {"unit": lambda name: "last" if name.startswith("last") else "all"}
    found = {}
    for stage in some_of(range(4), 0, 3):
        state, step = started(GATHERED, stage=stage, **options)
        masters, weights = zerofn.unshard(state.params), zerofn.gather(state.params)
        for name in ("a.weight", "b.weight", "c.weight"):
            assert 0 < float((weights[name] - masters[name]).abs().max()) < 0.1 * float(masters[name].abs().max())
        for name in ("a.bias", "last.weight"):
            assert_same_trees(weights[name], masters[name].bfloat16())
        found[stage] = trained(state, zerofn.compile(step))
        assert_same_trees(found[stage], found[0], f"stage {stage}")
    for how, compiled in (("eager", lambda step: step), ("remat", functools.partial(zerofn.compile, remat="full"))):
        state, step = started(GATHERED, stage=3, **options)
        assert_same_trees(trained(state, compiled(step)), found[3], how)


def test_weights_are_gathered_in_float8_and_every_stage_computes_with_them(ranks):
    ranks(2, gathered)


def bytes_of_gathers():
    """Of four layers as one unit, whose biases travel as they are."""
    found = {}
    for precision, stage in (("fp8", 3), *((GATHERED, stage) for stage in some_of(range(4), 1, 3))):
        net = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)), nn.Linear(128, 3))
        state, step = started(precision, net=net, stage=stage, unit=lambda name: "all")
        batch, run = {"x": torch.zeros(8, 128), "y": torch.zeros(8, 3)}, zerofn.compile(step)
        plan = run.lower(state, batch)
        state, _ = run(state, batch)
        zerofn.unshard(state.params)  # waits for copies
        before = the(SentBytes).by_group.total()
        state, _ = run(state, batch)
        zerofn.unshard(state.params)
        both, before = the(SentBytes).by_group.total() - before, the(SentBytes).by_group.total()
        zerofn.unshard(state.params)
        assert both - (the(SentBytes).by_group.total() - before) == plan.sent, f"stage {stage}"
        if stage == 3:
            (found[precision],) = {x.nbytes for x in plan.collectives() if x.what == "all_gather" and x.unit}
    assert 0.5 < found[GATHERED] / found["fp8"] < 0.56


def test_half_the_bytes_are_sent_and_planned(ranks):
    ranks(2, bytes_of_gathers)


def in_slices():
    """Losses of a few steps with slices of both layers, by precision and stage."""

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    found = {}
    for precision, stage in (("bf16", 3), ("fp8", 0), ("fp8", 3)):
        mesh, model = zerofn.Mesh.make(tensor=2), zerofn.skeleton(build)
        cuts = zerofn.parallel.tensor(model, mesh, {"0": "colwise", "2": "rowwise"})
        init = zerofn.TrainState.create(params=dict(build().named_parameters()), tx=optim.adamw(1e-2))
        state = zerofn.shard(init, mesh=mesh, cuts=cuts, precision=precision, stage=stage)

        def step(state, x, model=model):
            loss_fn = lambda p, x: (functional_call(model, p, (x.bfloat16(),)).float() - x).square().mean()  # noqa: E731
            loss, grads = state.value_and_grad(loss_fn)(x)
            return state.apply_gradients(grads), loss

        run, losses = zerofn.compile(step), []
        if precision == "fp8":
            assert run.lower(state, batch_of()["x"]).float8 == {"0.weight": "", "2.weight": ""}
        for k in range(4):
            state, loss = run(state, batch_of(0, k, 16)["x"])
            losses.append(loss)
        found[precision, stage] = torch.stack(losses)
    return found


def test_slices_of_layers_multiply_in_float8(ranks):
    found = ranks(2, in_slices)[0]
    assert torch.equal(found["fp8", 0], found["fp8", 3])
    near = (found["fp8", 3] - found["bf16", 3]).abs() / found["bf16", 3]
    assert 0 < near.max() < 0.02


def nodes_of(plan, name, phase=None):
    target = getattr(torch.ops.zerofn, name).default
    return [n for n in plan.graph.graph.nodes if n.target is target and phase in (None, phase_of(n))]


def test_each_number_is_rounded_once_and_codes_are_saved_for_the_backward_pass():
    state, step = started()
    plan = zerofn.compile(step).lower(state, batch_of(rows=16))
    assert len(nodes_of(plan, "fp8_mm", FORWARD)) == 3 and len(nodes_of(plan, "fp8_mm")) == 3 + 3 + 1  # none for x
    scales = nodes_of(plan, "fp8_scale")
    assert len(scales) == 2 + 3 + 3  # of x and h; of three weights; of three gradients
    assert len(nodes_of(plan, "fp8_codes")) == 2 + 3  # and of c's gradient both, of those of a and b the turned ones
    assert len(nodes_of(plan, "fp8_both")) == 1
    assert len(nodes_of(plan, "fp8_turned")) == 2 + 2 + 1  # and x, h, and the weight of c for the gradient of h
    state, step = started("bf16")
    assert plan.flops == zerofn.compile(step).lower(state, batch_of(rows=16)).flops


def test_saved_activations_take_less_memory():
    def peak(precision):
        net = nn.Sequential(*(x for _ in range(6) for x in (nn.Linear(64, 64), nn.GELU())), nn.Linear(64, 3))
        state, step = started(precision, net=net)
        batch = {"x": torch.zeros(2048, 64), "y": torch.zeros(2048, 3)}
        return zerofn.compile(step).lower(state, batch).memory().peak["activations"]

    assert peak("fp8") <= 0.8 * peak("bf16")  # of two tensors a layer, one has half the bytes


def test_wide_layers_are_planned_to_be_faster():
    """Eight of 4,096 with 8,192 rows, on one H100."""
    net = nn.Sequential(*(x for _ in range(8) for x in (nn.Linear(4096, 4096, device="meta"), nn.GELU())))
    params = dict(net.named_parameters())

    def step(state, batch):
        loss_fn = lambda p, x: functional_call(net, p, (x,)).float().square().mean()  # noqa: E731
        loss, grads = state.value_and_grad(loss_fn)(batch)
        return state.apply_gradients(grads), loss

    def init():
        return zerofn.TrainState.create(params=tree_map(torch.empty_like, params), tx=optim.sgd(1e-3))

    batch = torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta")
    options = {"machine": "H100", "world": 1, "stage": 3, "offload": None, "remat": None, "rows": 8192}
    bf16, fp8 = (zerofn.plan(step, init, batch, precision=x, **options)[0].seconds for x in ("bf16", "fp8"))
    assert 0.5 * bf16 < fp8 < 0.85 * bf16


def test_what_stays_in_bfloat16_is_said_and_can_be_chosen():
    state, step = started()
    plan = zerofn.compile(step).lower(state, batch_of())
    odd = "its sizes [3, 32] are not multiples of 16"
    assert plan.float8 == {"a.weight": "", "b.weight": "", "c.weight": "", "last.weight": odd}
    assert "in float8: a.weight, b.weight, c.weight\n" in plan.text()
    assert f"in bfloat16, {odd}: last.weight" in plan.text() and plan.json()["float8"] == plan.float8
    rule = zerofn.Fp8(lambda name: name.startswith("c"))
    precision = zerofn.Precision(torch.float32, torch.bfloat16, torch.float32, fp8=rule)
    state, step = started(precision)
    plan = zerofn.compile(step).lower(state, batch_of())
    assert [name for name, why in plan.float8.items() if not why] == ["c.weight"]
    assert plan.float8["a.weight"] == "Fp8(where) leaves it out"
    state, step = started("bf16")
    assert zerofn.compile(step).lower(state, batch_of()).float8 is None


def test_a_rule_that_reads_a_global_is_that_of_the_state():
    kept = {"a.weight"}
    rule = zerofn.Fp8(lambda name: name in kept)
    state, step = started(zerofn.Precision(torch.float32, torch.bfloat16, torch.float32, fp8=rule))
    run = zerofn.compile(step, donate=False)
    before = trained(state, run)
    kept.clear()
    assert_same_trees(trained(state, run), before)
    assert_same_trees(trained(state, zerofn.compile(step, donate=False)), before)
    for rows in (5, 6):  # a captured batch, and a new one
        assert [name for name, why in run.lower(state, batch_of(rows=rows)).float8.items() if not why] == ["a.weight"]


TRANSFORM, EMPTY = "its layer is called inside a transform of torch.func", "its input is empty"


@pytest.mark.parametrize(
    "calls, told",
    [
        ("plain", ""),
        ("vmap", TRANSFORM),
        ("jvp", TRANSFORM),
        ("jacrev", TRANSFORM),
        ("weight", TRANSFORM),
        ("empty", EMPTY),
        ("float32", "its input is float32, and not bfloat16"),
        ("empty plain", f"in some calls: {EMPTY}"),
        ("plain empty", f"in some calls: {EMPTY}"),
        ("plain vmap", f"in some calls: {TRANSFORM}"),
    ],
)
def test_every_call_is_decided_and_told(calls, told, caplog):
    """The loss is the sum of those of the calls."""
    func = torch.func

    def linear(x, w):
        return nn.functional.linear(x, w)

    def cast(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            return linear(x.float(), w)

    functions = {
        "plain": linear,
        "empty": lambda x, w: linear(x[:0], w),
        "float32": cast,
        "vmap": lambda x, w: func.vmap(lambda row: linear(row, w))(x),
        "jvp": lambda x, w: func.jvp(lambda x: linear(x, w), (x,), (torch.ones_like(x),))[1],
        "jacrev": lambda x, w: func.jacrev(lambda x: linear(x, w).sum(0))(x),
        "weight": lambda x, w: func.grad(lambda w: linear(x, w).float().square().sum())(w),
    }

    def loss_of(w, x, functions):
        return sum(functions[name](x, w).float().square().sum() for name in calls.split())

    def step(state, x):
        loss, grads = state.value_and_grad(lambda p, x: loss_of(p["w"], x, functions))(x)
        return state.apply_gradients(grads), loss

    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    w = torch.randn(16, 32, generator=torch.Generator().manual_seed(2))
    state = zerofn.shard(zerofn.TrainState.create(params={"w": w}, tx=optim.sgd(0.1)), precision="fp8")
    run = zerofn.compile(step)
    assert run.lower(state, x).float8 == {"w": told}
    with caplog.at_level(logging.WARNING, "zerofn"):
        _, loss = run(state, x)
    assert ("no product is float8" in caplog.text) == (told in (TRANSFORM, EMPTY) or "float32" in told)
    by_torch = {**functions, "plain": lambda x, w: (rounded(x) @ rounded(w).T).to(x.dtype)}
    want = loss_of(w.bfloat16(), x, by_torch)
    assert abs(float(loss - want)) <= 1e-4 * abs(float(want))


@pytest.mark.part(name=["gpt2"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_heads_stay_in_bfloat16(name):
    """Also such as have a weight of their own, and Conv1D has weights [inputs, outputs]."""
    torch.manual_seed(0)
    built, batch = tiny_models.BUILDERS[name](), tiny_models.batch(name)
    built.config.vocab_size = 112  # no layer inside is so wide
    model = type(built)(built.config)
    labels = batch.get("decoder_input_ids", batch["input_ids"])

    def step(state, batch):
        loss_fn = lambda p, b: functional_call(model, p, kwargs={**b, "labels": labels}).loss  # noqa: E731
        loss, grads = state.value_and_grad(loss_fn)(batch)
        return state.apply_gradients(grads), loss

    init = zerofn.TrainState.create(params=dict(model.named_parameters()), tx=optim.adamw(1e-3), seed=0)
    losses = {}
    for precision in ("bf16", "fp8"):
        state = zerofn.shard(init, precision=precision)
        run = zerofn.compile(step)
        if precision == "fp8":
            found = run.lower(state, batch).float8
            heads = {x for x, why in found.items() if why.startswith("a head")}
            assert heads == {"gpt2": {"transformer.wte.weight"}, "llama": {"lm_head.weight"}}.get(
                name, {"shared.weight"}
            )
            assert sum(not why for why in found.values()) == {"gpt2": 8, "llama": 14}.get(name, 32)
            assert all(why.startswith(("", "a head", "an embedding")) for why in found.values())
        state, losses[precision] = run(state, batch)
    assert abs(float(losses["fp8"] - losses["bf16"])) < 0.02 * float(losses["bf16"])
    assert float(losses["fp8"]) != float(losses["bf16"])


def test_a_step_without_such_a_layer_is_told(caplog):
    class Viewed(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(32, 3))

        def forward(self, x):
            return x @ self.w

    for net, why in (
        (Viewed(), "no linear layer multiplies by it as it is."),
        (nn.Linear(32, 3), "not multiples of 16."),
    ):
        state, step = started(net=net)
        with caplog.at_level(logging.WARNING, "zerofn"):
            caplog.clear()
            zerofn.compile(step)(state, batch_of())
        assert why in caplog.text


def test_gathered_weights_and_codes_leave_memory_with_their_last_use():
    """Nothing waits for Python to find a circle of references."""
    weight = torch.zeros(32, 32, dtype=torch.bfloat16)
    x = torch.ones(16, 32, dtype=torch.bfloat16)
    products = Products(zerofn.Fp8(), {"w": weight})
    with float8_products():
        nn.functional.linear(x, weight)
        codes = products.codes_of(x).codes
        assert codes is products.codes_of(x).codes
        x += 1
        assert codes is not products.codes_of(x).codes  # of other numbers
    seen = [weakref.ref(weight), weakref.ref(x)]
    del weight, x
    assert [ref() for ref in seen] == [None, None]


def test_a_second_derivative_is_refused():
    state, _ = started()
    net = Net()

    def loss_fn(params, batch):
        x = batch["x"].bfloat16().requires_grad_()
        out = functional_call(net, params, (x,)).float().sum()
        return torch.autograd.grad(out, x, create_graph=True)[0].square().mean()

    with pytest.raises(NotImplementedError, match="no second derivative: write precision='bf16'"):
        state.value_and_grad(loss_fn)(batch_of())


def test_a_layer_of_another_size_that_the_rule_takes_is_refused():
    precision = zerofn.Precision(torch.float32, torch.bfloat16, torch.float32, fp8=zerofn.Fp8(lambda name: True))
    state, step = started(precision)
    with pytest.raises(ValueError, match=r"selects 'last.weight', a weight of \[3, 32\].*Pad the layer"):
        zerofn.compile(step)(state, batch_of())


def test_what_is_not_finite_skips_the_update():
    state, step = started()
    run = zerofn.compile(step)
    before = {k: v.clone() for k, v in zerofn.unshard(state.params).items()}
    batch = batch_of()
    batch["x"][2, 3] = torch.inf
    state, _ = run(state, batch)
    assert_same_trees(zerofn.unshard(state.params), before)
