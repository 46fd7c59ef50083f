"""value_and_grad and accumulate against plain torch on the global batch, in float64."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.nn.functional import cross_entropy, dropout

import zerofn
from zerofn import Precision, Sharded, accumulate, optim, shard, tree, unshard, value_and_grad

STAGES = (0, 1, 2, 3)
Pair = namedtuple("Pair", "x y")


@dataclass
class Batch:
    x: Any
    y: Any
    scale: float = 2.0


def params(dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    shapes = {"0.w": (6, 9), "0.b": (9,), "1.w": (9, 4), "unused": (3, 3), "none": (0,), "big.t": (70_000,)}
    return {k: torch.randn(s, generator=generator, dtype=dtype) for k, s in shapes.items()}


def rows(rank, n=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(20 + rank)
    return torch.randn(n, 6, generator=generator, dtype=dtype), torch.randint(0, 4, (n,), generator=generator)


def logits(p, x):
    return torch.tanh(x @ p["0.w"] + p["0.b"]) @ p["1.w"] + p["big.t"][::7000].sum()


def mean_loss(p, x, y):
    return cross_entropy(logits(p, x), y)


def by_torch(loss, p, *args):
    """(loss, gradients) of plain torch; unused parameters have zeros."""
    leaves = {k: v.detach().clone().requires_grad_() for k, v in p.items()}
    value = loss(leaves, *args)
    grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    return value.detach(), {
        k: torch.zeros_like(v) if g is None else g for (k, v), g in zip(leaves.items(), grads, strict=True)
    }


def close(found, expected, rtol=1e-10, atol=1e-12):
    loss, grads = found
    torch.testing.assert_close(loss, expected[0], rtol=rtol, atol=atol)
    for key, want in expected[1].items():
        torch.testing.assert_close(grads[key], want, rtol=rtol, atol=atol, msg=lambda m, key=key: f"{key}: {m}")


def cut(stage, p=None, **options):
    return shard({"params": params() if p is None else p}, stage=stage, **options)["params"]


def test_plain_trees_are_plain_torch():
    x, y = rows(0)
    loss, grads = value_and_grad(mean_loss)(params(), x, y)
    want, expected = by_torch(mean_loss, params(), x, y)
    assert torch.equal(loss, want) and list(grads) == list(params())
    assert all(torch.equal(grads[k], expected[k]) for k in expected)
    assert not loss.requires_grad and not any(g.requires_grad for g in grads.values())


def global_batch(stage, n):
    x, y = rows(dist.get_rank())
    vg = value_and_grad(mean_loss)
    loss, grads = (accumulate(vg, n) if n > 1 else vg)(cut(stage), x, y)
    assert isinstance(grads, Sharded)
    return loss, unshard(grads)


@pytest.mark.part(size=[3], stage=[3])
@pytest.mark.part(size=[2], stage=[0, 1])
@pytest.mark.part(size=[1], stage=[2])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_the_mean_over_the_global_batch(ranks, size, stage):
    batch = [torch.cat(t) for t in zip(*(rows(r) for r in range(size)), strict=True)]
    expected = by_torch(mean_loss, params(), *batch)
    for n in (1, 2, 4):
        for found in ranks(size, global_batch, stage, n):
            close(found, expected)


# --- weighted


def ragged(rank):
    """A ragged number of rows, none on the last rank of three."""
    return rows(rank, [5, 2, 0, 7][rank])


def sum_and_weight(p, x, y):
    return cross_entropy(logits(p, x), y, reduction="sum"), len(y)


def weighted(stage, scale):
    x, y = ragged(dist.get_rank())
    scale = None if scale is None else zerofn.StaticLossScale(scale)
    loss, grads = value_and_grad(sum_and_weight, scale=scale)(cut(stage), x, y)
    return loss, unshard(grads)


@pytest.mark.parametrize("size, stage", [(1, 3), (2, 0), (3, 1), (3, 2), (4, 3)])
def test_sum_and_weight_are_exact_over_ragged_ranks(ranks, size, stage):
    batch = [torch.cat(t) for t in zip(*(ragged(r) for r in range(size)), strict=True)]
    for found in ranks(size, weighted, stage, 1024.0 if stage == 3 else None):
        close(found, by_torch(mean_loss, params(), *batch))


def masked(p, x, y, mask):
    each = cross_entropy(logits(p, x), y, reduction="none")
    return (each * mask).sum(), mask.sum()


def masks(rank):
    return (torch.arange(8) % (rank + 2) == 0).double() * (torch.arange(8) >= 4 * (rank == 1))


def weighted_microbatches(stage):
    x, y = rows(dist.get_rank(), 8)
    loss, grads = accumulate(value_and_grad(masked), 4)(cut(stage), x, y, masks(dist.get_rank()))
    return loss, unshard(grads)


@pytest.mark.parametrize("stage", STAGES)
def test_sum_and_weight_are_exact_over_microbatches(ranks, stage):
    """Three of the four microbatches of rank 1 have not a single token."""
    x, y = (torch.cat(t) for t in zip(*(rows(r, 8) for r in range(2)), strict=True))
    mask = torch.cat([masks(r) for r in range(2)])

    def loss(p, x, y):
        total, weight = masked(p, x, y, mask)
        return total / weight

    for found in ranks(2, weighted_microbatches, stage):
        close(found, by_torch(loss, params(), x, y))


# --- aux, frozen, mixed trees, batches of all kinds


def contrasted(size):
    rank = dist.get_rank()
    x = torch.linspace(-1, 1, 6 * size * 2, dtype=torch.float64).view(size, 6, 2)
    p = torch.tensor([[0.3, -1.0], [0.7, 0.2]], dtype=torch.float64)
    params = cut(3, {"w": p})

    def loss_fn(p, x):
        y = torch.tanh(x @ p["w"])
        scores = y @ zerofn.collectives.all_gather(y).T
        return scores.pow(3).sum(), float(rank + 1)

    return value_and_grad(loss_fn)(params, x[rank])


def test_ranks_that_look_at_each_others_values_and_have_weights(ranks):
    """A rank's gradient is then of the others' losses, too, which enter with their own weights."""
    size = 3
    x = torch.linspace(-1, 1, 6 * size * 2, dtype=torch.float64).view(size, 6, 2)
    p = torch.tensor([[0.3, -1.0], [0.7, 0.2]], dtype=torch.float64, requires_grad=True)
    y = torch.tanh(x @ p)
    loss = (y.flatten(0, 1) @ y.flatten(0, 1).T).pow(3).sum() / 6  # the weights are 1, 2 and 3
    (grad,) = torch.autograd.grad(loss, p)
    for found, grads in ranks(size, contrasted_and_whole, size):
        close((found, grads), (loss.detach(), {"w": grad}))


def contrasted_and_whole(size):
    loss, grads = contrasted(size)
    return loss, unshard(grads)


def with_aux(p, x, y):
    out = logits(p, x)
    return cross_entropy(out, y), {"logits": out.detach(), "rows": len(x), "none": None}


def test_aux():
    x, y = rows(0, 6)
    (loss, aux), _ = value_and_grad(with_aux, has_aux=True)(cut(3), x, y)
    assert torch.equal(aux["logits"], logits(params(), x)) and aux["rows"] == 6
    (again, stacked), _ = accumulate(value_and_grad(with_aux, has_aux=True), 3)(cut(3), x, y)
    torch.testing.assert_close(loss, again)
    torch.testing.assert_close(stacked["logits"].reshape(6, 4), aux["logits"])
    assert stacked["logits"].shape == (3, 2, 4)


def frozen_and_unused(stage):
    p = params() | {"ids": torch.arange(5)}
    tx = optim.sgd(0.1)
    state = shard(zerofn.TrainState.create(params=p, tx=tx, frozen=lambda name: name.startswith("1.")), stage=stage)
    seen = {}

    def loss_fn(q, x, y):
        seen.update({k: v.requires_grad for k, v in q.items()})
        return mean_loss(q, x, y)

    loss, grads = state.value_and_grad(loss_fn)(*rows(dist.get_rank()))
    strides = {u.name: g.stride() for u, g in zip(grads.layout.units, grads.shards, strict=True) if not u.trainable}
    return seen, strides, (loss, unshard(grads))


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_and_unused_parameters(ranks, stage):
    batch = [torch.cat(t) for t in zip(*(rows(r) for r in range(2)), strict=True)]
    loss, expected = by_torch(mean_loss, params(), *batch)
    expected["1.w"] = torch.zeros(9, 4, dtype=torch.float64)
    for seen, strides, found in ranks(2, frozen_and_unused, stage):
        close(found, (loss, expected))
        assert found[1]["unused"].abs().sum() == 0 and found[1]["none"].shape == (0,)
        assert [k for k, learns in seen.items() if not learns] == ["1.w", "ids"]
        assert len(strides) == 2 and set(strides.values()) == {(0,)}, "no memory for what is frozen"


def test_what_a_module_is_lent_is_a_parameter():
    def build():
        return torch.nn.Linear(3, 2)

    model = zerofn.skeleton(build)

    class Penalised(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model

        def forward(self, x):
            own = [p for p in self.net._parameters.values() if isinstance(p, torch.nn.Parameter)]
            return self.net(x).mean() + self.net.get_parameter("weight").square().sum() + sum(p.sum() for p in own)

    part, plain, x = Penalised(), build(), torch.randn(4, 3)
    state = shard(lambda: zerofn.TrainState.create(params=dict(plain.named_parameters()), tx=optim.sgd(0.1)))

    def loss_fn(params):
        return torch.func.functional_call(part, {f"net.{name}": p for name, p in params.items()}, (x,))

    @zerofn.compile
    def train_step(state, batch):
        loss, grads = state.value_and_grad(loss_fn)()
        return state.apply_gradients(grads), loss

    state, loss = train_step(state, {})
    expected = plain(x).mean() + plain.weight.square().sum() + plain.weight.sum() + plain.bias.sum()
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    after = unshard(state.params)
    torch.testing.assert_close(after["weight"], plain.weight.detach() - 0.1 * plain.weight.grad)
    torch.testing.assert_close(after["bias"], plain.bias.detach() - 0.1 * plain.bias.grad)


def test_plain_leaves_that_do_not_learn():
    p = {"w": torch.ones(3), "kept": torch.ones(3), "ids": torch.arange(2), "on": torch.tensor(True)}
    seen = {}

    def loss_fn(q, x):
        seen.update({k: v.requires_grad for k, v in q.items()})
        return (x * q["w"] * q["kept"]).sum()

    for n in (1, 2):
        x = torch.ones(2, 3)
        _, grads = accumulate(value_and_grad(loss_fn, frozen=lambda name: name == "kept"), n)(p, x)
        assert torch.equal(grads["w"], torch.full((3,), 2.0 / n)) and list(grads) == list(p)
        assert [k for k, learns in seen.items() if learns] == ["w"]
        for k in ("kept", "ids", "on"):
            assert not grads[k].any() and (grads[k].dtype, grads[k].shape) == (p[k].dtype, p[k].shape)


def test_complex_leaves_are_held_as_real_ones():
    w = torch.randn(4, dtype=torch.complex128)
    lone = lambda q, x: (x * q["a"][0]["w"]).abs().square().sum()  # noqa: E731
    with pytest.raises(TypeError, match=r"parameter 'a.0.w' is complex128.*torch.view_as_real\(w\)"):
        value_and_grad(lone)({"a": [{"w": w}]}, torch.ones(4))
    as_real = lambda q, x: lone({"a": [{"w": torch.view_as_complex(q["w"])}]}, x)  # noqa: E731
    _, grads = value_and_grad(as_real)({"w": torch.view_as_real(w)}, torch.ones(4))
    torch.testing.assert_close(torch.view_as_complex(grads["w"]), 2 * w)
    state = zerofn.TrainState.create(
        params={"w": w, "b": torch.ones(4).double()}, tx=optim.adamw(0.1), frozen=lambda name: name == "w"
    )
    for s in (state, shard(state)):
        loss_fn = lambda q, x: (q["w"].abs() * q["b"] * x).sum()  # noqa: E731
        _, grads = s.value_and_grad(loss_fn)(torch.ones(4))
        after = unshard(s.apply_gradients(grads).params)
        assert torch.equal(after["w"], w) and after["b"].max() < 1


def both_kinds():
    x, y = rows(dist.get_rank())
    mixed = {"net": cut(3), "temperature": torch.tensor(1.5, dtype=torch.float64)}
    loss, grads = value_and_grad(lambda p, x, y: mean_loss(p["net"], x, y) * p["temperature"])(mixed, x, y)
    return loss, unshard(grads)


def test_a_plain_leaf_beside_sharded_ones(ranks):
    """It is replicated, so its gradient is the mean over ranks as well."""
    batch = [torch.cat(t) for t in zip(*(rows(r) for r in range(3)), strict=True)]
    mean, expected = by_torch(mean_loss, params(), *batch)
    for loss, grads in ranks(3, both_kinds):
        torch.testing.assert_close(loss, 1.5 * mean)
        torch.testing.assert_close(grads["temperature"], mean)
        close((loss, grads["net"]), (1.5 * mean, {k: 1.5 * g for k, g in expected.items()}))


def get(batch, name):
    return batch[name] if isinstance(batch, dict | TensorDict) else getattr(batch, name)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("kind", [dict, Batch, Pair, TensorDict])
def test_batches_of_every_kind(kind, n):
    x, y = rows(0, 6)
    batch = TensorDict({"x": x, "y": y}, [6]) if kind is TensorDict else kind(x=x, y=y)
    kinds = []

    def loss_fn(p, b):
        kinds.append((type(b), len(get(b, "x"))))
        return mean_loss(p, get(b, "x"), get(b, "y"))

    close(accumulate(value_and_grad(loss_fn), n)(params(), batch), by_torch(mean_loss, params(), x, y))
    assert set(kinds) == {(kind, 6 // n)}


def test_accumulating_what_accumulates_cuts_further():
    seen = []

    def loss_fn(p, batch):
        seen.append(batch["x"].shape[0])
        return (p["w"] * batch["x"]).mean()

    x = torch.arange(12.0, dtype=torch.float64)
    _, grads = accumulate(accumulate(value_and_grad(loss_fn), 3), 2)({"w": torch.ones((), dtype=x.dtype)}, {"x": x})
    assert set(seen) == {2}
    torch.testing.assert_close(grads["w"], x.mean())


def test_accumulate_cuts_in_order_and_raises_where_it_cannot():
    seen = []

    def loss_fn(p, b):
        seen.append((b["x"][:, 0].tolist(), b["n"], b["none"]))
        return p["w"] * b["x"].mean()

    batch = {"x": torch.arange(6.0).view(6, 1), "n": 3, "none": None}
    accumulate(value_and_grad(loss_fn), 3)({"w": torch.ones(())}, batch)
    assert seen == [([0, 1], 3, None), ([2, 3], 3, None), ([4, 5], 3, None)]
    for bad in (torch.zeros(7, 2), torch.zeros(())):
        with pytest.raises(ValueError, match=r"shape \(.*cannot be cut along dim 0 into 3 equal parts"):
            accumulate(value_and_grad(loss_fn), 3)({"w": torch.ones(())}, batch | {"x": bad})
    for n in (0, 1.5, "2", True):
        with pytest.raises(ValueError, match="n must be a positive integer"):
            accumulate(value_and_grad(loss_fn), n)
    with pytest.raises(TypeError, match="vg must be the function that value_and_grad returns, got function"):
        accumulate(loss_fn, 2)


def shared(n):
    """A plain state, a batch, and steps whose loss hands memory of others, or one tensor several times, to the loop."""
    p = {"a": torch.randn(3, 2, dtype=torch.float64), "b": torch.randn(3, 2, dtype=torch.float64)}
    batch = {"x": torch.randn(8, 3, dtype=torch.float64), "n": torch.full((n,), 2.0)}
    losses = {
        "a weight of the batch": lambda p, b: ((b["x"] @ p["a"]).square().sum(), b["n"]),
        "one gradient for two leaves": lambda p, b: (b["x"] @ (p["a"] + p["b"])).square().mean(),
        "an expanded gradient": lambda p, b: p["a"].sum() * 3 + p["b"].sum(),
    }

    def stepped(loss_fn):
        def step(state, batch):
            with_loss = lambda p, b: (out := loss_fn(p, b), {"out": out, "x": b["x"]})  # noqa: E731
            vg = state.value_and_grad(with_loss, has_aux=True)
            (loss, aux), grads = accumulate(vg, n)(batch)
            return state.apply_gradients(grads), (loss, aux, grads)

        return step

    return zerofn.TrainState.create(params=p, tx=optim.sgd(0.1)), batch, losses, stepped


@pytest.mark.parametrize("how", [lambda step: step, zerofn.compile], ids=["eager", "compiled"])
def test_sums_share_no_memory_with_what_the_loss_returns(how):
    n = 4
    state, batch, losses, stepped = shared(n)
    before = tree.tree_map(torch.clone, batch)
    plain = {k: v.clone() for k, v in state.params.items()}
    for name, loss_fn in losses.items():
        given = state.replace(params={k: v.clone() for k, v in plain.items()})
        _, (loss, aux, grads) = how(stepped(loss_fn))(given, batch)
        assert all(torch.equal(batch[k], before[k]) for k in batch), name
        parts = [{"x": x, "n": w} for x, w in zip(batch["x"].chunk(n), batch["n"], strict=True)]
        outs = [loss_fn(plain, part) for part in parts]
        weighted = isinstance(outs[0], tuple)
        each = torch.stack([out[0] if weighted else out for out in outs])
        found = aux["out"][0] if weighted else aux["out"]
        torch.testing.assert_close(found, each, msg=name)  # row 0 is not the sum
        assert torch.equal(aux["x"].reshape(8, 3), batch["x"])

        def whole(q, loss_fn=loss_fn, parts=parts, weighted=weighted):
            outs = [loss_fn(q, part) for part in parts]
            return sum(out[0] for out in outs) / sum(out[1] for out in outs) if weighted else sum(outs) / n

        close((loss, grads), by_torch(whole, plain))


@pytest.mark.parametrize("n", [2, 4])
def test_a_weight_may_be_a_buffer_that_is_written(n):
    weight = torch.zeros(())

    def loss_fn(p, x):
        weight.add_(1)  # microbatch i weighs i + 1
        return (p["w"] * x).sum(), weight

    loss, _ = accumulate(value_and_grad(loss_fn), n)({"w": torch.ones(())}, torch.ones(4))
    torch.testing.assert_close(loss.item(), 4 / sum(range(1, n + 1)))


def carried(stage):
    """A buffer the loss function writes is there in the next microbatch."""
    running = torch.zeros((), dtype=torch.float64)

    def loss_fn(p, x):
        running.mul_(0.5).add_(x.mean())
        return (p["w"] * running.clone()).sum()

    accumulate(value_and_grad(loss_fn), 4)(cut(stage, {"w": torch.ones(3, dtype=torch.float64)}), torch.arange(4.0))
    return running


@pytest.mark.parametrize("stage", [1, 3])
def test_buffers_are_carried_in_order(ranks, stage):
    expected = 0.0
    for i in range(4):
        expected = 0.5 * expected + i
    assert [x.item() for x in ranks(2, carried, stage)] == [expected] * 2


# --- precision


def in_precision(precision, scale, n):
    seen = []

    def loss_fn(p, x, y):
        seen.append({v.dtype for v in p.values()})
        return cross_entropy(logits(p, x.to(p["0.w"].dtype)).float(), y)

    p = cut(3, params(torch.float32), precision=precision)
    vg = value_and_grad(loss_fn, scale=scale)
    x, y = rows(dist.get_rank())
    loss, grads = accumulate(vg, n)(p, x, y)
    return seen[0], {g.dtype for g in grads.shards}, loss, unshard(grads)


@pytest.mark.parametrize(
    "precision, scale, computes, reduces, rtol",
    [
        ("bf16", None, torch.bfloat16, torch.float32, 0.05),
        ("fp16", 2.0**12, torch.float16, torch.float32, 0.01),
        (Precision(torch.float32, torch.float16), 2.0**10, torch.float16, torch.float32, 0.01),
        (Precision(torch.float32, torch.bfloat16), None, torch.bfloat16, torch.bfloat16, 0.05),
    ],
)
def test_precision(ranks, precision, scale, computes, reduces, rtol):
    """Gradients are unscaled, and close to those of float32."""
    batch = [torch.cat(t) for t in zip(*(rows(r) for r in range(2)), strict=True)]
    loss, expected = by_torch(mean_loss, params(torch.float32), batch[0].float(), batch[1])
    scale = None if scale is None else zerofn.DynamicLossScale(scale)
    for n in (1, 2):
        for seen, reduced, found, grads in ranks(2, in_precision, precision, scale, n):
            assert seen == {computes} and reduced == {reduces}
            assert found.dtype == torch.float32
            torch.testing.assert_close(found, loss, rtol=rtol, atol=0.01)
            for key in ("0.w", "0.b", "1.w"):
                error = torch.linalg.vector_norm(grads[key] - expected[key])
                assert error < rtol * torch.linalg.vector_norm(expected[key]), key


def test_small_fp16_gradients_survive():
    """2^-26 is nothing in float16; the scale brings it through the backward pass."""
    p = {"w": torch.ones(3)}
    weak = lambda q: (q["w"].float() * 2.0**-26).sum()  # noqa: E731
    for precision in ("fp16", Precision(torch.float32, torch.float16)):
        _, lost = value_and_grad(weak)(cut(3, p, precision=precision))
        _, kept = value_and_grad(weak, scale=zerofn.StaticLossScale(2.0**15))(cut(3, p, precision=precision))
        assert unshard(lost)["w"].sum() == 0
        assert torch.equal(unshard(kept)["w"], torch.full((3,), 2.0**-26))


# --- randomness


def noisy(p, x):
    return (dropout(x, 0.5) @ p["w"]).sum(), dropout(torch.ones(64), 0.5)


def draws():
    p, x = cut(3, {"w": torch.ones(6)}), torch.ones(8, 6)
    key = zerofn.TrainState.create(params={"w": torch.ones(1)}, tx=optim.sgd(0.1), seed=3).rng_at()
    vg = value_and_grad(noisy, has_aux=True, rng=key)
    torch.manual_seed(dist.get_rank())
    before = torch.get_rng_state()
    (loss, mask), grads = vg(p, x)
    (again, same), equal = vg(p, x)
    assert torch.equal(loss, again) and torch.equal(mask, same)
    assert torch.equal(unshard(grads)["w"], unshard(equal)["w"])
    assert torch.equal(torch.get_rng_state(), before)
    (_, masks), _ = accumulate(vg, 4)(p, x)
    with pytest.raises(RuntimeError, match=r"is random, but has no key.*rng=state.rng_at\(\)"):
        value_and_grad(noisy, has_aux=True)(p, x)
    return mask, masks


def test_random_operations_need_a_key_and_differ_over_ranks_and_microbatches(ranks):
    found = ranks(3, draws)
    masks = [mask for mask, _ in found] + [m for _, several in found for m in several]
    different = {tuple(m.tolist()) for m in masks}
    # microbatch 0 of several is the one of a single one
    assert len(different) == 3 * 4 and all(torch.equal(mask, several[0]) for mask, several in found)


# --- mistakes


@pytest.mark.parametrize(
    "loss_fn, has_aux, words",
    [
        (lambda p: p["w"], False, r"scalar tensor or \(sum, weight\), got shape \(3,\); write loss.mean"),
        (lambda p: (p["w"] * 1j).square().sum(), False, r"must return a real number, .*complex64; write loss\.real"),
        (lambda p: 1.0, False, "got float"),
        (lambda p: None, False, "got NoneType"),
        (lambda p: (p["w"].sum(), 1, 2), False, "got tuple"),
        (lambda p: p["w"].sum(), True, r"must return \(loss, aux\), got shape \(\)"),
    ],
)
def test_what_a_loss_function_may_return(loss_fn, has_aux, words):
    with pytest.raises(ValueError, match=words):
        value_and_grad(loss_fn, has_aux=has_aux)({"w": torch.ones(3)})


def test_a_loss_of_one_element():
    one = value_and_grad(lambda p: p["w"].sum().view(1))({"w": torch.ones(3)})[0]
    assert one.shape == () and one == 3


def inside(stage):
    p, x, y = cut(stage), *rows(dist.get_rank())
    with torch.no_grad():
        loss, grads = value_and_grad(mean_loss)(p, x, y)
    wide = tree.tree_map(torch.Tensor.double, cut(stage, params(torch.float32)))
    _, fine = value_and_grad(mean_loss)(wide, x, y)
    return loss, unshard(grads), {g.dtype for g in fine.shards}


def test_under_no_grad_and_with_pieces_of_another_dtype(ranks):
    x, y = (torch.cat(t) for t in zip(*(rows(r) for r in range(2)), strict=True))
    for loss, grads, dtypes in ranks(2, inside, 3):
        close((loss, grads), by_torch(mean_loss, params(), x, y))
        assert dtypes == {torch.float64}


class Held:
    def __init__(self, x):
        self.x = x


def test_accumulate_refuses_an_object_whose_tensors_it_would_not_cut():
    f = zerofn.accumulate(zerofn.value_and_grad(lambda w, held: (w * held.x).mean()), 2)
    with pytest.raises(TypeError, match=r"accumulate: an argument's entry '0' is a Held, but leaves must be tensors"):
        f(torch.tensor(2.0), Held(torch.arange(4.0)))
    g = zerofn.accumulate(zerofn.value_and_grad(lambda w, square, x: square(w * x).mean()), 2)
    assert g(torch.tensor(2.0), torch.square, torch.arange(4.0))[0] == 14  # a function has nothing to cut


# --- layers that are parametrized for one call


class Doubled(torch.nn.Module):
    def forward(self, w):
        return 2 * w


def parametrized_for_a_call(net, p, x):
    """As adapters do; torch calls `set_` on the parameter, between two layers of one unit."""

    class Between(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            h = self.net[0](x).tanh()
            torch.nn.utils.parametrize.register_parametrization(self.net[1], "weight", Doubled())
            try:
                return self.net[1](h).square().mean()
            finally:
                torch.nn.utils.parametrize.remove_parametrizations(self.net[1], "weight", leave_parametrized=False)

    return torch.func.functional_call(Between(), {f"net.{k}": v for k, v in p.items()}, (x,))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_parameter_that_is_set_leaves_the_others_of_its_unit(compiled):
    def build():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 4)).double()

    def step(state, x):
        return state, state.value_and_grad(lambda p, x: parametrized_for_a_call(net, p, x))(x)

    x, net, given = rows(0)[0], build(), dict(build().named_parameters())
    expected = by_torch(lambda p, x: parametrized_for_a_call(build(), p, x), given, x)
    state = shard(zerofn.TrainState.create(params=given, tx=optim.sgd(0.1)), stage=3, unit=lambda name: "all")
    loss, grads = (zerofn.compile(step) if compiled else step)(state, x)[1]
    close((loss, unshard(grads)), expected)
