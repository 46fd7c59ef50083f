"""gather and scatter: transposes of each other, and derivatives of every order against plain torch in float64."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

import zerofn
from tests.support.same import assert_same_trees
from zerofn import Precision, Sharded, gather, scatter, shard, tree, unshard
from zerofn._torch_compat import make_fx
from zerofn.comm.mesh import Axis, Mesh

STAGES = (0, 1, 2, 3)
BIG = 70_000  # elements: a unit of its own


def params(dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    shapes = {"0.w": (7, 9), "0.b": (9,), "0.empty": (0, 2), "1.w": (9, 5), "1.scale": (), "big.t": (BIG,)}
    return {k: torch.randn(s, generator=generator, dtype=dtype) for k, s in shapes.items()}


def like(values, seed):
    generator = torch.Generator().manual_seed(seed)
    return tree.tree_map(lambda x: torch.randn(x.shape, generator=generator, dtype=x.dtype), values)


def batch(rank, rows=6):
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(rows, 7, generator=generator, dtype=torch.float64)


def model(p, x):
    hidden = torch.tanh(x @ p["0.w"] + p["0.b"])
    return (hidden @ p["1.w"]).sin() * p["1.scale"] + p["big.t"][::1000].pow(3).mean()


def loss(p, x):
    return model(p, x).pow(2).mean()


def inner(a, b):
    return sum((x * y).sum() for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


def sharded(values, stage):
    return shard({"params": values}, stage=stage)["params"]


# --- transposes


def transposes(stage):
    rank, size = dist.get_rank(), dist.get_world_size()
    p = sharded(params(), stage)
    v = sharded(like(params(), 6), stage)  # another point of the shards
    g = like(params(), 50 + rank)  # a value on gathered parameters: one per rank
    full, pull = torch.func.vjp(gather, p)
    (back,) = pull(g)
    out, pull_scatter = torch.func.vjp(lambda t: scatter(t, p), g)
    (forward,) = pull_scatter(v)
    s = scatter(g, p)
    bits = zip(tree.leaves((back, out, forward)), tree.leaves((s, s, gather(v))), strict=True)
    assert all(torch.equal(a, b) for a, b in bits), "each is the other's transpose, bit for bit"
    # by torch.autograd too, and forwards
    shards = [x.detach().clone().requires_grad_() for x in p.shards]
    by_autograd = torch.autograd.grad(tree.leaves(gather(Sharded(p.spec, shards))), shards, tree.leaves(g))
    assert_same_trees(by_autograd, s.shards)
    primal, tangent = torch.func.jvp(gather, (p,), (v,))
    assert_same_trees(tangent, gather(v))
    share = size if stage == 0 else 1
    return inner(gather(v), g) / size, inner(v, s) / share, unshard(s), g


@pytest.mark.part(size=[3])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_inner_products(ranks, size, stage):
    """<gather(p), g>, the mean over ranks, is <p, scatter(g)>, the sum over shards (stage 0: over one replica)."""
    found = ranks(size, transposes, stage)
    gathered, shards = (sum(f[i] for f in found) for i in (0, 1))
    torch.testing.assert_close(gathered, shards, rtol=1e-10, atol=1e-10)
    for name, mean in found[0][2].items():
        expected = torch.stack([f[3][name] for f in found]).sum(0) / size
        torch.testing.assert_close(mean, expected, rtol=1e-14, atol=1e-14)


# --- derivatives of the global batch


def derivatives(stage):
    p = sharded(params(), stage)
    v = sharded(like(params(), 8), stage)
    x = batch(dist.get_rank())

    def local(p):
        return loss(gather(p), x)

    def by_autograd(p):
        shards = [shard.detach().requires_grad_() for shard in p.shards]
        grads = torch.autograd.grad(local(Sharded(p.spec, shards)), shards, create_graph=True)
        products = torch.autograd.grad(sum((g * t).sum() for g, t in zip(grads, v.shards, strict=True)), shards)
        return Sharded(p.spec, [g.detach() for g in grads]), Sharded(p.spec, products)

    grad, hvp = by_autograd(p)
    functional = torch.func.grad(local)(p)
    forward = torch.func.jvp(torch.func.grad(local), (p,), (v,))[1]
    reverse = torch.func.vjp(torch.func.grad(local), p)[1](v)[0]
    third = torch.func.grad(
        lambda p: sum(
            (a * b).sum()
            for a, b in zip(torch.func.jvp(torch.func.grad(local), (p,), (v,))[1].shards, v.shards, strict=True)
        )
    )(p)
    return [unshard(t) for t in (grad, functional, hvp, forward, reverse, third)]


@pytest.mark.part(size=[3], stage=[3])
@pytest.mark.part(size=[2], stage=[1])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_and_hessian_vector_products(ranks, size, stage):
    everything = torch.cat([batch(r) for r in range(size)])
    p, v = params(), like(params(), 8)

    def directional(p):
        return torch.func.jvp(lambda q: torch.func.jvp(lambda r: loss(r, everything), (q,), (v,))[1], (p,), (v,))[1]

    grad = torch.func.grad(loss)(p, everything)
    hvp = torch.func.vjp(lambda q: torch.func.grad(loss)(q, everything), p)[1](v)[0]
    third = torch.func.grad(directional)(p)
    for found in ranks(size, derivatives, stage):
        for name, got, want in zip(
            "grad functional hvp forward reverse third".split(), found, [grad, grad, hvp, hvp, hvp, third], strict=True
        ):
            for key in p:
                torch.testing.assert_close(got[key], want[key], rtol=1e-9, atol=1e-12, msg=f"{name} {key}")


def per_sample(stage):
    p = sharded(params(), stage)
    x = batch(dist.get_rank())
    grads = torch.vmap(torch.func.grad(lambda p, row: loss(gather(p), row[None])), in_dims=(None, 0))(p, x)
    norms = torch.vmap(lambda *shards: sum(q.pow(2).sum() for q in shards))(*grads.shards)
    each = [unshard(Sharded(p.spec, [q[i] for q in grads.shards])) for i in range(len(x))]
    samples = torch.vmap(lambda row: model(gather(p), row[None]))(x)
    return each, norms, samples


@pytest.mark.part(size=[2], stage=[2, 3])
@pytest.mark.parametrize("size, stage", [(1, 3), (2, 0), (2, 2), (2, 3), (3, 3)])
def test_per_sample_gradients(ranks, size, stage):
    """vmap(grad) through gather: sample i of every rank, averaged over ranks."""
    found = ranks(size, per_sample, stage)
    for i in range(6):
        rows = torch.stack([batch(r)[i] for r in range(size)])
        expected = torch.func.grad(lambda p, rows: torch.stack([loss(p, r[None]) for r in rows]).mean())(params(), rows)
        for each, _, samples in found:
            for key, want in expected.items():
                torch.testing.assert_close(each[i][key], want, rtol=1e-9, atol=1e-12)
            assert samples.shape == (6, 1, 5)


def captured(stage):
    p = sharded(params(), stage)
    x = batch(dist.get_rank())

    def step(*shards):
        q = Sharded(p.spec, shards)
        grads = torch.func.grad(lambda q: loss(gather(q), x))(q)
        return [a - 0.1 * b for a, b in zip(q.shards, grads.shards, strict=True)]

    graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*p.shards)
    plain = Sharded(p.spec, p.shards)
    assert_same_trees(graph(*plain.shards), step(*plain.shards))
    names = [str(n.target) for n in graph.graph.nodes]
    return sum("zerofn.all_gather" in n for n in names), sum("zerofn.reduce_scatter" in n for n in names)


@pytest.mark.parametrize("stage", [0, 3])
def test_capture(ranks, stage):
    assert ranks(2, captured, stage) == [(2, 2)] * 2


# --- the gathered copy of stages 1 and 2


def cached(stage):
    p = sharded(params(torch.float32), stage)
    size = dist.get_world_size()
    assert (p.full is None) == (size == 1)
    fresh = tree.unflatten(*reversed(tree.flatten(p)))
    assert fresh.full is None, "any unflatten drops it"
    for a, b in zip(tree.leaves(gather(p)), tree.leaves(gather(fresh)), strict=True):
        assert torch.equal(a, b)
    grads = [torch.func.grad(lambda q: loss(gather(q), batch(0).float()))(q).shards for q in (p, fresh)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    if size > 1:
        shards = {x.untyped_storage().data_ptr() for x in p.shards}
        assert shards == {x.untyped_storage().data_ptr() for x in p.full}, "the shard is a view of it"
        half = shard({"params": params(torch.float32)}, stage=stage, precision="bf16")["params"]
        assert {x.dtype for x in half.full} == {torch.bfloat16} and {x.dtype for x in half.shards} == {torch.float32}
        again = gather(Sharded(half.spec, half.shards))
        assert_same_trees(gather(half), again)


@pytest.mark.parametrize("size, stage", [(1, 2), (2, 1), (3, 2)])
def test_the_gathered_copy_is_only_a_cache(ranks, size, stage):
    ranks(size, cached, stage)


def copied(stage):
    p = sharded(params(), stage)
    for twin in (pickle.loads(pickle.dumps(p)), copy.deepcopy(p)):
        assert twin.layout == p.layout and (twin.spec.stage, twin.spec.axis) == (stage, p.spec.axis)
        assert twin.full is None and all(map(torch.equal, twin.shards, p.shards))
        assert not {x.data_ptr() for x in twin.shards if x.numel()} & {x.data_ptr() for x in p.shards}
        assert_same_trees(gather(twin), gather(p))


@pytest.mark.parametrize("stage", [2, 3])
def test_copies_and_pickles_have_the_pieces_and_no_gathered_copy(ranks, stage):
    ranks(2, copied, stage)


# --- precision


def dtypes(name):
    precision = {
        "bf16 wire": Precision(torch.float32, torch.bfloat16),
        "fp32, bf16 wire": Precision(torch.float32, torch.float32, torch.bfloat16),
    }.get(name, name)
    p = shard({"params": params(torch.float32)}, stage=3, precision=precision)["params"]
    grads = scatter(tree.tree_map(torch.ones_like, gather(p)), p)
    plain = tree.tree_map(lambda x: x.double(), p)
    mean = unshard(scatter({k: x.copy_(uneven(dist.get_rank(), x)) for k, x in gather(p).items()}, p))
    return [{x.dtype for x in tree.leaves(t)} for t in (p, gather(p), grads, gather(plain))], mean


def uneven(rank, x):
    """Values of which both the sum of roundings and the rounded sum differ from the sum."""
    a, b = ((1.0, 1 + 2**-8), (2**-12, 2**-8))[rank]
    return torch.where(torch.arange(x.numel()).view(x.shape) % 2 == 0, a, b)


@pytest.mark.parametrize(
    "name, computes, reduces",
    [
        (None, "float32", "float32"),
        ("bf16", "bfloat16", "float32"),
        ("fp16", "float16", "float32"),
        ("bf16 wire", "bfloat16", "bfloat16"),
        ("fp32, bf16 wire", "float32", "bfloat16"),
    ],
)
def test_cast_before_the_gather_and_before_the_reduction(ranks, name, computes, reduces):
    for (stored, gathered, reduced, doubled), mean in ranks(2, dtypes, name):
        assert stored == {torch.float32}
        assert gathered == {getattr(torch, computes)} and reduced == {getattr(torch, reduces)}
        assert doubled == {torch.float64 if name is None else getattr(torch, computes)}
        for key, x in params().items():
            a, b = (uneven(r, x).to(getattr(torch, computes)).to(getattr(torch, reduces)) for r in range(2))
            assert torch.equal(mean[key], (a + b) / 2)


# --- parts, updates, what is where


def update_of_shards(stage):
    p, g = sharded(params(), stage), sharded(like(params(), 3), stage)
    new = tree.tree_map(lambda a, b: a - 0.5 * b, p, g)
    assert isinstance(new, Sharded)
    with pytest.raises(ValueError):
        tree.tree_map(torch.add, p, sharded({k: v for k, v in params().items() if k != "0.b"}, stage))
    return unshard(new)


@pytest.mark.parametrize("stage", [0, 3])
def test_tree_map_is_the_partitioned_update(ranks, stage):
    for found in ranks(3, update_of_shards, stage):
        for key, p, g in zip(params(), params().values(), like(params(), 3).values(), strict=True):
            torch.testing.assert_close(found[key], p - 0.5 * g, rtol=0, atol=1e-15)


def parts(stage, container):
    critic = {"0.w": torch.randn(40, 40), "1.w": torch.randn(BIG)}
    whole = container({"actor": {"0.w": torch.randn(9, 8)}, "q1": critic, "q2": like(critic, 2)})
    zeros = tree.tree_map(torch.zeros_like, whole)
    state = shard({"params": whole, "mu": {"q1": zeros["q1"], "q2": zeros["q2"]}, "all": zeros}, stage=stage)
    p, mu = state["params"], state["mu"]
    assert isinstance(p["q1"], Sharded) and isinstance(mu["q1"], Sharded)
    moved = tree.tree_map(lambda a, m: a + m + 1, p["q1"], mu["q1"])
    twin = tree.tree_map(lambda a, b: 0.5 * a + 0.5 * b, p["q1"], p["q2"])  # a target network
    assert torch.equal(gather(twin)["0.w"], 0.5 * whole["q1"]["0.w"] + 0.5 * whole["q2"]["0.w"])
    new = unshard(p.replace({"q1": moved, "q2": twin}))
    assert torch.equal(new["q1"]["0.w"], whole["q1"]["0.w"] + 1)
    assert torch.equal(new["q2"]["1.w"], unshard(twin)["1.w"])
    assert torch.equal(new["actor"]["0.w"], whole["actor"]["0.w"])
    assert type(unshard(p["q2"])) is type(whole["q2"])
    with pytest.raises(ValueError, match="the layout of the new 'actor' differs from"):
        p.replace({"actor": moved})
    grads = torch.func.grad(lambda q: sum(x.pow(2).sum() for x in tree.leaves(gather(q))))(p["q1"])
    assert torch.equal(unshard(grads)["0.w"], 2 * whole["q1"]["0.w"])


@pytest.mark.parametrize("container", [dict, TensorDict])
@pytest.mark.parametrize("stage", [1, 3])
def test_parts_of_a_tree_train_apart(ranks, stage, container):
    ranks(2, parts, stage, container)


def test_a_unit_is_shown_with_those_that_were_merged_into_it():
    big = torch.zeros(1 << 16)
    leaves = {
        "tokens.w": big,
        "h.0.w": big,
        "h.0.b": torch.zeros(3),
        "norm.w": torch.zeros(3),
        "norm.b": torch.zeros(3),
    }
    shown = repr(shard({"params": leaves})["params"])
    assert "  h.0 + norm    4 leaves " in shown and "  tokens " in shown
    own = repr(shard({"params": leaves}, unit=lambda name: "all")["params"])
    assert "  all    5 leaves" in own


def looks(stage):
    p = shard({"params": {"h.0.w": torch.arange(5000.0).view(50, 100), "h.0.b": torch.zeros(3)}}, stage=stage)["params"]
    held = p["h.0.w"]
    assert torch.equal(held.local, torch.arange(float(held.start), float(held.stop)))
    with pytest.raises(KeyError, match="no leaf is named 'h.1'"):
        p["h.1"]
    return repr(p), repr(held), repr(p["h.0.b"])


def test_the_repr_says_which_rank_holds_what(ranks):
    (first, w, b), (second, w1, _) = ranks(2, looks, 3)
    assert first.splitlines()[0] == (
        "Sharded: 2 leaves, 5,003 elements in 1 unit; stage 3, rank 0 of 2 holds 16,384 bytes"
    )
    assert "h.0    2 leaves         5,003 x float32  here [0:4,096]" in first and "[4,096:8,192]" in second
    assert w == "h.0.w [50, 100] float32, unit 'h.0'; here: elements 0:4,064 (16,256 bytes)"
    assert w1 == "h.0.w [50, 100] float32, unit 'h.0'; here: elements 4,064:5,000 (3,744 bytes)"
    assert b == "h.0.b [3] float32, unit 'h.0'; here: elements 0:3 (12 bytes)"


def test_donated_buffers_raise_what_was_said():
    p = sharded(params(), 3)
    p.donate("step 7 consumed this state")
    for use in (lambda: gather(p), lambda: tree.leaves(p), lambda: p["0.w"], lambda: unshard(p)):
        with pytest.raises(RuntimeError, match="step 7 consumed this state"):
            use()
    assert "step 7" in repr(p)


def test_scatter_refuses_other_trees():
    p = sharded(params(), 3)
    values = params()
    with pytest.raises(ValueError, match=r"'0.w' has shape \(9, 7\), expected \(7, 9\)"):
        scatter(values | {"0.w": values["0.w"].t()}, p)
    with pytest.raises(ValueError, match="differ in .*'0.b'"):
        scatter({k: v for k, v in values.items() if k != "0.b"}, p)
    renamed = {("1.v" if k == "1.w" else k): v for k, v in values.items()}
    with pytest.raises(ValueError, match="differ in .*'1.v', '1.w'"):
        scatter(renamed, p)


def test_gather_and_scatter_name_their_axis():
    values = params()
    for name in ("data", "rows"):
        p = shard({"params": values}, mesh=Mesh((Axis(name, 1),)))["params"]
        for axis in (None, name, Axis(name, 1)):
            again = gather(scatter(values, like=p, axis=axis), axis=axis)
            assert all(torch.equal(again[k], values[k]) for k in values)
        said = f"the tree is sharded over '{name}', not over 'expert'. Write axis='{name}'"
        with pytest.raises(ValueError, match=f"^gather: {said}"):
            gather({"plain": values, "cut": p}, axis="expert")
        with pytest.raises(ValueError, match=f"^scatter: {said}"):
            scatter(values, like=p, axis=Axis("expert", 1))
    with pytest.raises(ValueError, match="sharded over 'rows', not over 'data'"):
        torch.func.grad(lambda q: gather(q, axis="data")["0.w"].sum())(p)


def test_plain_trees_pass():
    values = params()
    out = gather({"plain": values, "cut": sharded(values, 3)})
    assert out["plain"]["0.w"] is values["0.w"] and torch.equal(out["cut"]["0.w"], values["0.w"])
    assert zerofn.gather(3) == 3


def test_what_a_rank_holds_of_a_leaf_can_be_copied_and_pickled():
    held = zerofn.shard({"params": {"w": torch.arange(3.0)}})["params"]["w"]
    for same in (copy.copy(held), copy.deepcopy(held), pickle.loads(pickle.dumps(held))):
        assert same == held and torch.equal(same.local, held.local)


def test_a_sharded_tree_is_no_dict():
    p = sharded(params(), 3)
    for misuse in ("keys", "items", "values"):
        with pytest.raises(AttributeError, match=r"it is this rank's part of a tree.* zerofn.gather\(params\)"):
            getattr(p, misuse)
    for misuse in (list, lambda p: "0.w" in p, lambda p: p[0]):
        with pytest.raises(TypeError, match=r"has no entry 0: it is this rank's part of a tree"):
            misuse(p)
    with pytest.raises(AttributeError, match="a Sharded has no 'nothing'"):
        p.nothing  # noqa: B018


def test_what_a_rank_holds_of_a_leaf_is_not_gathered_by_itself():
    held = sharded(params(), 3)["0.w"]
    for function in (gather, unshard):
        with pytest.raises(TypeError, match=rf"Write zerofn.{function.__name__}\(params\)\['0.w'\]"):
            function(held)
