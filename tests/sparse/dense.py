"""Attention with a mask of all pairs of tokens, in plain torch."""

import torch


def attended(q, k, v, mask, scale=None):
    """(values, logsumexp); rows without a key give zeros. `mask`: booleans that broadcast to [B, H, L, S]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    hidden = ~mask.expand(scores.shape)
    scores = scores.masked_fill(hidden, -1e9)
    top = scores.amax(-1, keepdim=True).detach()
    weights = (scores - top).exp().masked_fill(hidden, 0.0)
    sums = weights.sum(-1, keepdim=True)
    empty = sums == 0
    lse = (top + sums.masked_fill(empty, 1.0).log()).masked_fill(empty, float("-inf"))
    return weights / sums.masked_fill(empty, 1.0) @ v, lse[..., 0]


def inputs(batch=2, heads=4, groups=2, queries=150, keys=None, width=20, values=12, dtype=torch.float64, seed=0):
    """q, k, v, and a gradient of the result."""
    generator = torch.Generator().manual_seed(seed)
    keys = queries if keys is None else keys
    shapes = [(heads, queries, width), (groups, keys, width), (groups, keys, values), (heads, queries, values)]
    made = [torch.randn(batch, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return *(x.requires_grad_() for x in made[:3]), made[3]


def same_as_dense(given, attend, mask, tolerance, **options):
    """Assert that values and gradients of `attend(q, k, v)` are those of the mask."""
    *qkv, grad = given
    found, expected = attend(*qkv), attended(*(x.double() for x in qkv), mask, **options)[0]
    grads = torch.autograd.grad(found, qkv, grad), torch.autograd.grad(expected, qkv, grad.double())
    pairs = zip(("out", "q", "k", "v"), (found, *grads[0]), (expected, *grads[1]), strict=True)
    for name, x, y in pairs:
        assert x.dtype == qkv[0].dtype
        torch.testing.assert_close(x.double(), y.double(), rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
