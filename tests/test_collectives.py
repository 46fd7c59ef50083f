"""Collectives against numpy on all ranks' values; their derivatives against plain torch."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from zerofn import collectives as c
from zerofn._torch_compat import make_fx
from zerofn.comm.mesh import Mesh

SIZES = (1, 2, 3, 4)


def values(rank, shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(11 + rank)
    return torch.randn(shape, generator=generator, dtype=dtype)


def rotation(size):
    """A permutation that is not its own inverse where one exists."""
    return [(r + 1) % size for r in range(size)]


# name -> (shape of one rank's argument, the collective, the same in numpy on all ranks' arguments)
def cases(size):
    turn = rotation(size)
    return {
        "all_gather": ((3, 2), c.all_gather, lambda xs: [np.concatenate(xs)] * size),
        "all_gather dim 1": ((3, 2), lambda x: c.all_gather(x, dim=1), lambda xs: [np.concatenate(xs, 1)] * size),
        "reduce_scatter": ((2 * size, 3), c.reduce_scatter, lambda xs: np.split(sum(xs), size)),
        "reduce_scatter dim -1": (
            (3, 2 * size),
            lambda x: c.reduce_scatter(x, dim=-1),
            lambda xs: np.split(sum(xs), size, -1),
        ),
        "all_reduce": ((2, 3), c.all_reduce, lambda xs: [sum(xs)] * size),
        "all_reduce of a scalar": ((), c.all_reduce, lambda xs: [sum(xs)] * size),
        "all_to_all": ((size, 2, 3), c.all_to_all, lambda xs: list(np.stack(xs).swapaxes(0, 1))),
        "permute": ((2, 3), lambda x: c.permute(x, turn), lambda xs: [xs[turn[r]] for r in range(size)]),
        "broadcast": ((5, 3), c.broadcast, lambda xs: [xs[0]] * size),
        "broadcast of a scalar": ((), lambda x: c.broadcast(x, source=size - 1), lambda xs: [xs[-1]] * size),
    }


NAMES = list(cases(2))


def apply(name):
    rank, size = dist.get_rank(), dist.get_world_size()
    shape, collective, _ = cases(size)[name]
    x = values(rank, shape)
    kept = x.clone()
    out = collective(x)
    assert torch.equal(x, kept)
    return x, out


def each(function, names):
    return {name: function(name) for name in names}


@pytest.mark.parametrize("size", SIZES)
def test_values(ranks, size):
    everything = ranks(size, each, apply, NAMES)
    for name in NAMES:
        found = [results[name] for results in everything]
        expected = cases(size)[name][2]([x.numpy() for x, _ in found])
        for (_, out), want in zip(found, expected, strict=True):
            assert out.shape == want.shape, name
            np.testing.assert_allclose(out.numpy(), want, rtol=1e-14, err_msg=name)
        if name.startswith("all_reduce"):  # the same bits everywhere
            assert all(torch.equal(found[0][1], out) for _, out in found)


def transposed(name):
    """x, g, map(x) and the transpose at g, under each of torch's ways to take it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shape, f, _ = cases(size)[name]
    x = values(rank, shape).requires_grad_()
    y = f(x)
    g = values(rank + 50, y.shape)
    (by_autograd,) = torch.autograd.grad(y, x, g)
    _, pull = torch.func.vjp(f, x.detach())
    by_grad = torch.func.grad(lambda x: (f(x) * g).sum())(x.detach())
    assert torch.equal(by_autograd, pull(g)[0]) and torch.equal(by_autograd, by_grad)
    t = values(rank + 90, x.shape)
    out, push = torch.func.jvp(f, (x.detach(),), (t,))
    assert torch.equal(out, y) and torch.equal(push, f(t))
    return x.detach(), g, y.detach(), by_autograd


@pytest.mark.part(size=[3])
@pytest.mark.parametrize("size", SIZES)
def test_transposes(ranks, size):
    """<map(x), g> = <x, transpose(g)>, summed over ranks."""
    everything = ranks(size, each, transposed, NAMES)
    for name in NAMES:
        found = [results[name] for results in everything]
        forward = sum((g * y).sum() for _, g, y, _ in found)
        backward = sum((x * t).sum() for x, _, _, t in found)
        torch.testing.assert_close(forward, backward, rtol=1e-12, atol=0)


def higher_orders(name):
    rank, size = dist.get_rank(), dist.get_world_size()
    shape, f, _ = cases(size)[name]
    x, v = values(rank, shape), values(rank + 7, shape)

    def loss(x):
        return f(x.sin()).pow(3).sum()

    def twice(x):
        leaf = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
        return g.detach(), torch.autograd.grad((g * v).sum(), leaf)[0]

    gradient, by_autograd = twice(x)
    assert torch.equal(torch.func.grad(loss)(x), gradient)
    forward_over_reverse = torch.func.jvp(torch.func.grad(loss), (x,), (v,))[1]
    reverse_over_reverse = torch.func.grad(lambda x: (torch.func.grad(loss)(x) * v).sum())(x)
    _, pull = torch.func.vjp(torch.func.grad(loss), x)
    captured = make_fx(torch.func.grad(loss), tracing_mode="fake")(x)
    assert torch.equal(captured(x), gradient)
    assert any("zerofn.wait" in str(n.target) for n in captured.graph.nodes) == (size > 1)
    return x, v, gradient, [by_autograd, forward_over_reverse, reverse_over_reverse, pull(v)[0]]


def plain_loss(name, size):
    """The sum over ranks of the same losses, of all ranks' arguments at once, in torch alone."""
    gathered = {
        "all_gather": lambda xs: [torch.cat(xs)] * size,
        "all_reduce": lambda xs: [sum(xs)] * size,
        "reduce_scatter": lambda xs: list(sum(xs).chunk(size)),
        "all_to_all": lambda xs: list(torch.stack(xs).transpose(0, 1)),
        "permute": lambda xs: [xs[s] for s in rotation(size)],
        "broadcast": lambda xs: [xs[0]] * size,
    }[name]
    return lambda *xs: sum(y.pow(3).sum() for y in gathered([x.sin() for x in xs]))


@pytest.mark.part(size=[3])
@pytest.mark.parametrize("size", (1, 2, 3))
def test_higher_orders_and_capture(ranks, size):
    names = ["all_gather", "all_reduce", "reduce_scatter", "all_to_all", "permute", "broadcast"]
    everything = ranks(size, each, higher_orders, names)
    for name in names:
        found = [results[name] for results in everything]
        xs, vs = tuple(f[0] for f in found), tuple(f[1] for f in found)
        loss = plain_loss(name, size)
        gradients = torch.autograd.functional.jacobian(loss, xs)
        _, products = torch.autograd.functional.hvp(loss, xs, vs)
        for (_, _, gradient, hvps), want, product in zip(found, gradients, products, strict=True):
            torch.testing.assert_close(gradient, want, rtol=1e-12, atol=1e-12)
            for hvp in hvps:
                torch.testing.assert_close(hvp, product, rtol=1e-12, atol=1e-12)


def mapped(name):
    rank, size = dist.get_rank(), dist.get_world_size()
    shape, f, _ = cases(size)[name]
    xs = values(rank, (5, *shape))
    last = xs.movedim(0, -1)
    one_by_one = torch.stack([f(x) for x in xs])
    assert torch.equal(torch.vmap(f)(xs), one_by_one)
    assert torch.equal(torch.vmap(f, in_dims=-1, out_dims=-1)(last), one_by_one.movedim(0, -1))
    grads = torch.vmap(torch.func.grad(lambda x: f(x).pow(2).sum()))(xs)
    assert torch.equal(grads, torch.stack([torch.func.grad(lambda x: f(x).pow(2).sum())(x) for x in xs]))
    twice = torch.vmap(torch.vmap(f))(xs.expand(2, *xs.shape))
    assert torch.equal(twice, one_by_one.expand(2, *one_by_one.shape))


@pytest.mark.part(size=[3])
@pytest.mark.parametrize("size", (1, 2, 3))
def test_vmap(ranks, size):
    ranks(size, each, mapped, NAMES)


def refuse():
    size = dist.get_world_size()
    bad = {
        "a multiple": lambda: c.reduce_scatter(torch.zeros(size + 1)),
        "at least one dim": lambda: c.all_gather(torch.zeros(())),
        "one row per rank": lambda: c.all_to_all(torch.zeros(size + 1, 2)),
        "each of the 2 ranks": lambda: c.permute(torch.zeros(1), [0, 0]),
        "from 0 to 1, got 2": lambda: c.broadcast(torch.zeros(1), source=2),
        "no axis 'expert'": lambda: c.all_reduce(torch.zeros(1), "expert"),
    }
    for words, call in bad.items():
        with pytest.raises(ValueError, match=words):
            call()
    return c.all_reduce(torch.ones(2), Mesh.of(None).axis()).tolist()


def test_bad_arguments_raise_before_anything_is_sent(ranks):
    assert ranks(2, refuse) == [[2.0, 2.0]] * 2


def empties():
    """Tensors of several dims without elements: the shapes they come back in."""
    size = dist.get_world_size()
    found = {
        "gather": c.all_gather(torch.zeros(3, 0)),
        "gather last": c.all_gather(torch.zeros(0, 3), dim=1),
        "scatter": c.reduce_scatter(torch.zeros(2 * size, 0)),
        "scatter last": c.reduce_scatter(torch.zeros(0, 4, size), dim=-1),
        "reduce": c.all_reduce(torch.zeros(0, 2)),
        "exchange": c.all_to_all(torch.zeros(size, 0, 2)),
        "permute": c.permute(torch.zeros(2, 0), rotation(size)),
        "broadcast": c.broadcast(torch.zeros(2, 0)),
    }
    (gradient,) = torch.autograd.grad(c.all_gather(x := torch.zeros(3, 0, requires_grad=True)).sum(), x)
    return {k: tuple(v.shape) for k, v in found.items()}, tuple(gradient.shape)


@pytest.mark.parametrize("size", (1, 2, 3))
def test_tensors_without_elements_keep_their_dims(ranks, size):
    for shapes, gradient in ranks(size, empties):
        assert shapes == {
            "gather": (3 * size, 0),
            "gather last": (0, 3 * size),
            "scatter": (2, 0),
            "scatter last": (0, 4, 1),
            "reduce": (0, 2),
            "exchange": (size, 0, 2),
            "permute": (2, 0),
            "broadcast": (2, 0),
        }
        assert gradient == (3, 0)


def odd_tensors():
    size, rank = dist.get_world_size(), dist.get_rank()
    empty = c.all_gather(torch.zeros(0))
    strided = torch.arange(12.0).view(3, 4).t() + rank
    ints = c.all_reduce(torch.arange(3) * (rank + 1))
    halves = c.all_gather(torch.full((2,), rank, dtype=torch.bfloat16))
    turned = c.permute(strided, rotation(size))
    assert torch.equal(c.broadcast(torch.arange(3) > rank), torch.arange(3) > 0)
    assert torch.equal(c.broadcast(torch.tensor([-0.0, float("nan"), rank])).isnan(), torch.arange(3) == 1)
    return empty.shape, c.all_reduce(strided), ints, halves, turned - (rotation(size)[rank] - rank) - strided


@pytest.mark.parametrize("size", (1, 3))
def test_empty_strided_and_other_dtypes(ranks, size):
    for empty, strided, ints, halves, turned in ranks(size, odd_tensors):
        assert empty == (0,)
        assert torch.equal(strided, torch.arange(12.0).view(3, 4).t() * size + sum(range(size)))
        assert torch.equal(ints, torch.arange(3) * sum(range(1, size + 1)))
        assert torch.equal(halves.float(), torch.arange(size).repeat_interleave(2).float())
        assert not turned.any()
