"""Attention over cut sequences beside attention over whole ones, in float64."""

from functools import partial

import pytest
import torch
from torch.func import grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from zerofn.comm.mesh import Axis, Mesh
from zerofn.parallel import attention

# Heads of queries, of keys; sizes of q and k, and of v.
SHAPES = [(12, 12, 4, 4), (12, 3, 4, 2), (12, 4, 3, 5)]


def whole(heads, groups, width, of_values, dtype=torch.float64):
    draw = torch.Generator().manual_seed(heads + groups)
    shapes = [(2, heads, 24, width), (2, groups, 24, width), (2, groups, 24, of_values)]
    return [torch.randn(shape, generator=draw, dtype=dtype) for shape in shapes]


def expected(q, k, v, causal, window=24):
    """By the formula, a row at a time."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    rows = []
    for t in range(q.shape[2]):
        seen = slice(max(0, t + 1 - window) if causal else 0, t + 1 if causal else None)
        weights = torch.einsum("bhd,bhnd->bhn", q[:, :, t], k[:, :, seen]) * q.shape[-1] ** -0.5
        rows.append(torch.einsum("bhn,bhne->bhe", weights.softmax(-1), v[:, :, seen]))
    return torch.stack(rows, 2)


def chunks(x, mesh, dim=2):
    """This rank's part of whole sequences."""
    axis = mesh.axis("context")
    parts = x.chunk(2 * axis.size, dim)
    return torch.cat([parts[axis.rank], parts[2 * axis.size - 1 - axis.rank]], dim)


def derivatives(attend, q, k, v):
    """The value, gradients, and a Hessian-vector product of a loss."""

    def loss(q, k, v):
        return attend(q, k, v).sin().sum()

    first = grad(loss, (0, 1, 2))
    return attend(q, k, v), first(q, k, v), jvp(first, (q, k, v), (q.cos(), k.sin(), v.cos()))[1]


def on_ranks(shape, causal, method):
    mesh = Mesh.make(context=-1)
    q, k, v = (chunks(x, mesh) for x in whole(*shape))
    attend = partial(attention, axis=mesh.axis("context"), method=method, causal=causal)
    with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
        return derivatives(attend, q, k, v)


@pytest.mark.part(num_ranks=[3], shape=SHAPES[1:])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("method", ["ulysses", "ring"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_derivatives_are_those_of_whole_sequences(ranks, num_ranks, method, shape):
    for causal in (True, False):
        value, first, second = derivatives(partial(expected, causal=causal), *whole(*shape))
        for rank, (mine, ours, product) in enumerate(ranks(num_ranks, on_ranks, shape, causal, method)):
            part = Mesh((Axis("context", num_ranks, rank),))
            same = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-13)
            same(mine, chunks(value, part))
            for a, b in zip(ours, first, strict=True):
                same(a, chunks(b, part))
            for a, b in zip(product, second, strict=True):
                same(a, chunks(b, part))


def windowed(shape):
    mesh = Mesh.make(context=-1)
    mask = torch.ones(24, 24, dtype=torch.bool).tril().triu(-4)
    q, k, v = (chunks(x, mesh).requires_grad_() for x in whole(*shape))
    out = attention(q, k, v, axis=mesh.axis("context"), mask=mask[None])
    return out.detach(), torch.autograd.grad(out.sin().sum(), (q, k, v))


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_mask_is_of_whole_sequences(ranks, num_ranks, shape):
    leaves = [x.requires_grad_() for x in whole(*shape)]
    value = expected(*leaves, True, window=5)
    grads = torch.autograd.grad(value.sin().sum(), leaves)
    for rank, (mine, ours) in enumerate(ranks(num_ranks, windowed, shape)):
        part = Mesh((Axis("context", num_ranks, rank),))
        for a, b in zip((mine, *ours), (value.detach(), *grads), strict=True):
            torch.testing.assert_close(a, chunks(b, part), rtol=1e-12, atol=1e-13)


def per_sample(method):
    mesh = Mesh.make(context=2)
    q, k, v = (chunks(x, mesh) for x in whole(12, 12, 4, 4))

    def loss(q, k, v):
        return attention(q[None], k[None], v[None], axis=mesh.axis("context"), method=method).sin().sum()

    with sdpa_kernel(SDPBackend.MATH):  # the others have no rule for vmap
        return vmap(grad(loss))(q, k, v), grad(lambda q: vmap(loss)(q, k, v).sum())(q)


@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_per_sample_gradients(ranks, method):
    for rows, whole_batch in ranks(2, per_sample, method):
        torch.testing.assert_close(rows, whole_batch, rtol=1e-12, atol=1e-13)


def in_bfloat16(method):
    mesh = Mesh.make(context=2)
    q, k, v = (chunks(x, mesh) for x in whole(12, 12, 4, 4, torch.bfloat16))
    out = attention(q, k, v, axis=mesh.axis("context"), method=method)
    exact = chunks(expected(*(x.double() for x in whole(12, 12, 4, 4, torch.bfloat16)), True), mesh)
    return out.dtype, (out - exact).abs().max().item()


@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_sums_are_wide_in_16_bits(ranks, method):
    for dtype, error in ranks(2, in_bfloat16, method):
        assert dtype == torch.bfloat16 and error < 0.02


def refusals():
    axis = Mesh.make(data=2).axis("data")
    x = torch.ones(1, 3, 4, 2)
    bad = [
        ({"method": "ulyses"}, x, x, "method='ulyses' is not known; write 'ulysses' or 'ring'"),
        ({}, x, x, "cannot divide 3 heads equally. Write method='ring'"),
        ({"method": "ring"}, x, x[:, :2], "number of key heads; got 3 and 2"),
        ({"method": "ring"}, x[:, :, :3], x[:, :, :3], "two chunks of one size"),
        ({"method": "ring", "mask": torch.ones(8, 8) > 0}, x, x, "'ring' does not support a mask. Write"),
        ({"mask": torch.ones(4, 4) > 0}, x[:, :2], x[:, :2], r"\[\.\.\., 1, 8, 8\], .*got torch.bool \[4, 4\]"),
        ({"mask": torch.ones(2, 8, 8) > 0}, x[:, :2], x[:, :2], r"got torch.bool \[2, 8, 8\]"),
        ({"mask": torch.ones(8, 8)}, x[:, :2], x[:, :2], "expected a mask of booleans"),
    ]
    for options, q, k, message in bad:
        with pytest.raises(ValueError, match=message):
            attention(q, k, k, axis=axis, **options)


def test_mistakes_are_sentences(ranks):
    ranks(2, refusals)
