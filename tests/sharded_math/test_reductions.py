"""Numbers over whole trees against plain torch on the full tensors."""

import pytest
import torch

import zerofn
from zerofn import shard, tree
from zerofn._torch_compat import make_fx

STAGES = (0, 1, 2, 3)


def values(seed=2):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"0.w": (61, 77), "0.b": (77,), "0.empty": (0, 3), "1.w": (300, 301), "1.s": (), "z": (5,)}
    return {k: torch.randn(s, generator=generator) for k, s in shapes.items()}


def mixed():
    v = values()
    return {k: x.to([torch.float32, torch.float64, torch.bfloat16][i % 3]) for i, (k, x) in enumerate(v.items())}


def double(seed=2):
    return {k: x.double() for k, x in values(seed).items()}


def cut(x, stage):
    return shard({"params": x}, stage=stage)["params"]


def numbers(stage):
    a, b = cut(values(), stage), cut(values(3), stage)
    plain = {"sharded": a, "plain": values(3)["0.w"]}  # a replicated leaf is counted once
    return {
        "norm": zerofn.global_norm(a),
        "with a plain leaf": zerofn.global_norm(plain),
        "vdot": zerofn.vdot(a, b),
        "leaves": zerofn.leaf_norms(a),
        "finite": zerofn.all_finite(a),
        "double": zerofn.global_norm(cut(double(), stage)),
        "double vdot": zerofn.vdot(cut(double(), stage), cut(double(3), stage)),
        "mixed": zerofn.global_norm(cut(mixed(), stage)),
        "mixed vdot": zerofn.vdot(cut(mixed(), stage), tree.tree_map(torch.Tensor.float, cut(mixed(), stage))),
    }


def wide(x, y=None):
    flat = torch.cat([v.double().reshape(-1) for v in tree.leaves(x)])
    return (
        torch.linalg.vector_norm(flat)
        if y is None
        else flat @ torch.cat([v.double().reshape(-1) for v in tree.leaves(y)])
    )


@pytest.mark.part(size=[1, 3])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_equal_plain_torch_at_every_stage_and_each_other_bit_for_bit(ranks, size):
    a, b = values(), values(3)
    found = [ranks(size, numbers, stage) for stage in STAGES]
    first = found[0][0]
    expected = {
        "norm": wide(a),
        "with a plain leaf": wide({"a": a, "b": b["0.w"]}),
        "vdot": wide(a, b),
        "double": wide(a),
        "double vdot": wide(a, b),
        "mixed": wide(mixed()),
        "mixed vdot": wide(mixed(), mixed()),
    }
    for name, want in expected.items():
        assert first[name].dtype == (torch.float32 if name in ("norm", "with a plain leaf", "vdot") else torch.float64)
        rounding = 1e-13 if "double" in name else 1e-6  # float32 leaves are summed in float32, mixed ones too
        torch.testing.assert_close(first[name].double(), want, rtol=rounding, atol=0)
    assert list(first["leaves"]) == sorted(a)
    for name, norm in first["leaves"].items():
        torch.testing.assert_close(norm, torch.linalg.vector_norm(a[name]), rtol=1e-6, atol=0)
    assert first["finite"].item() is True
    for of_stage in found:
        for of_rank in of_stage:
            for x, y in zip(tree.leaves(of_rank), tree.leaves(first), strict=True):
                assert torch.equal(x, y)
    if size == 1:
        total = torch.nn.utils.get_total_norm(tree.leaves(a))
        assert torch.equal(first["norm"], total)


def nonfinite(stage, where, bad):
    x = values()
    name, index = where
    x[name].view(-1)[index] = bad
    tree_of = {"params": cut(x, stage), "clean": cut(values(), stage)}
    return (
        zerofn.all_finite(tree_of).item(),
        zerofn.first_nonfinite(tree_of),
        zerofn.first_nonfinite(tree_of["params"]),
    )


@pytest.mark.part(stage=[0, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_one_bad_element_is_seen_by_all_and_named(ranks, stage):
    for where in (("0.w", 0), ("1.w", 90_299), ("1.s", 0), ("z", 4)):
        for bad in (float("nan"), float("inf"), float("-inf")) if stage == 3 else (float("nan"),):
            assert ranks(3, nonfinite, stage, where, bad) == [(False, f"params.{where[0]}", where[0])] * 3


def padding_is_not_read():
    x = cut(values(), 3)
    for unit, part in zip(x.layout.units, x.shards, strict=True):
        valid = torch.zeros(part.shape, dtype=torch.bool)
        start, stop = x.spec.bounds(unit)
        for _, a, b in unit.intervals(start, stop):
            valid[a:b] = True
        part[~valid] = float("nan")
    names = zerofn.leaf_norms(x)
    return zerofn.all_finite(x).item(), zerofn.global_norm(x), zerofn.vdot(x, x), names["1.w"]


@pytest.mark.parametrize("size", [1, 3])
def test_padding_is_never_read(ranks, size):
    for finite, norm, dot, leaf in ranks(size, padding_is_not_read):
        assert finite
        torch.testing.assert_close(norm.double(), wide(values()), rtol=1e-5, atol=0)
        torch.testing.assert_close(dot, norm**2)
        assert leaf.isfinite()


def ranks_with_nothing():
    """Small trees of wide dtypes: most ranks have padding only, and must still send what the others expect."""
    x = cut({"w": torch.full((3,), 2.0, dtype=torch.float64)}, 3)
    empty = cut({"e": torch.zeros(0)}, 3)
    return (
        zerofn.global_norm(x),
        zerofn.vdot(x, x),
        zerofn.all_finite(x),
        zerofn.global_norm(empty),
        zerofn.all_finite(empty),
        zerofn.all_finite(cut({"i": torch.arange(3), "m": torch.ones(2) > 0}, 3)),
        zerofn.global_norm(cut({"i": torch.arange(3)}, 3)),
    )


def test_ranks_that_hold_only_padding(ranks):
    for norm, dot, finite, empty, also, whole, ints in ranks(4, ranks_with_nothing):
        assert norm.dtype == torch.float64 and norm.item() == pytest.approx(12**0.5, rel=1e-15)
        assert dot.item() == 12 and finite and empty == 0 and also and whole
        assert ints.item() == pytest.approx(5**0.5)


def test_plain_trees():
    x = {"a": torch.tensor([3.0]), "b": [torch.tensor(4.0), torch.zeros(0)], "n": None}
    assert zerofn.global_norm(x).item() == 5
    assert {k: v.item() for k, v in zerofn.leaf_norms(x).items()} == {"a": 3, "b.0": 4, "b.1": 0}
    assert zerofn.vdot(x, x).item() == 25
    assert zerofn.all_finite(x).item() is True and zerofn.first_nonfinite(x) is None
    x["b"][0] = torch.tensor(float("nan"))
    assert zerofn.first_nonfinite(x) == "b.0"
    assert zerofn.global_norm({}).item() == 0 and zerofn.all_finite({}).item() is True


def test_trees_that_do_not_fit():
    x = cut(values(), 3)
    for other in (values(), cut({"w": torch.ones(3)}, 3), [1.0]):
        with pytest.raises(ValueError, match="vdot: the two trees differ in structure"):
            zerofn.vdot(x, other)


def test_capture_agrees_about_dtypes():
    for make in (values, mixed):
        x = cut(make(), 3)
        functions = [zerofn.global_norm, zerofn.all_finite, lambda t: zerofn.vdot(t, t)]
        for f in functions:
            graph = make_fx(lambda *p, f=f, x=x: f(type(x)(x.spec, p)), tracing_mode="fake")(*x.shards)
            (out,) = (n for n in graph.graph.nodes if n.op == "output")
            assert torch.equal(graph(*x.shards), f(x))
            assert out.args[0].meta["val"].dtype == f(x).dtype


# --- derivatives ------------------------------------------------------------------------------------------------


def weights():
    generator = torch.Generator().manual_seed(5)
    return {k: torch.randn(4, 5, generator=generator, dtype=torch.float64) for k in ("0.w", "1.w")}


def penalty(p, q):
    return zerofn.vdot(p, q) ** 2 + 3 * zerofn.global_norm(p)


def plain_penalty(p, q):
    flat, other = (torch.cat([x.reshape(-1) for x in tree.leaves(t)]) for t in (p, q))
    return (flat @ other) ** 2 + 3 * torch.linalg.vector_norm(flat)


def test_inside_a_loss_function():
    p, q = weights(), tree.tree_map(torch.cos, weights())
    expected = torch.func.grad(plain_penalty)(p, q)
    torch.testing.assert_close(torch.func.grad(penalty)(p, q), expected)
    torch.testing.assert_close(zerofn.value_and_grad(penalty)(p, q)[1], expected)
    zero = tree.tree_map(torch.zeros_like, p)
    assert all(g.eq(0).all() for g in torch.func.grad(zerofn.global_norm)(zero).values())


def derivatives(stage):
    p = cut(weights(), stage)
    q = tree.tree_map(torch.cos, p)
    first = torch.func.grad(penalty)(p, q)
    hvp = torch.func.jvp(lambda x: torch.func.grad(penalty)(x, q), (p,), (q,))[1]
    reverse = torch.func.grad(lambda x: zerofn.vdot(torch.func.grad(penalty)(x, q), q))(p)
    _, along = torch.func.jvp(lambda x: penalty(x, q), (p,), (q,))
    return [*(zerofn.unshard(x) for x in (first, hvp, reverse)), {"along": along}]


@pytest.mark.part(size=[3])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_by_the_pieces_of_shards(ranks, size):
    p, q = weights(), tree.tree_map(torch.cos, weights())
    gradient = torch.func.grad(plain_penalty)
    hvp = torch.func.jvp(lambda x: gradient(x, q), (p,), (q,))[1]
    along = torch.func.jvp(lambda x: plain_penalty(x, q), (p,), (q,))[1]
    for stage in STAGES:
        for found in ranks(size, derivatives, stage):
            torch.testing.assert_close(found, [gradient(p, q), hvp, hvp, {"along": along}])


def test_norms_of_leaves_have_none():
    with pytest.raises(RuntimeError, match="leaf_norms has no derivative.*zerofn.global_norm"):
        torch.func.grad(lambda p: zerofn.leaf_norms(p)["0.w"])(weights())
