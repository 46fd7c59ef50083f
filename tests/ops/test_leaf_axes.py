"""Parts of leaves that know their dims, against sums and products over the whole leaf."""

import itertools

import pytest
import torch

from zerofn.ops import leaf_axes  # noqa: F401  (defines the operations)

ops = torch.ops.zerofn
SHAPES = [(7,), (5, 3), (1, 6), (3, 4, 5), (2, 1, 3, 2)]
CASES = [(s, kept) for s in SHAPES for kept in itertools.product((False, True), repeat=len(s))]


def cuts(numel):
    """Of one part, of three, of one element each."""
    return [[0, numel], [0, numel // 3, numel // 3 + 1, numel], list(range(numel + 1))]


@pytest.mark.parametrize(("shape", "kept"), CASES)
def test_parts_make_the_whole(shape, kept):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    over = [d for d, keep in enumerate(kept) if not keep]
    sums = x.square().sum(over, keepdim=True) if over else x.square()
    factors = torch.randn(sums.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    flat = torch.cat([torch.full((4,), 9.0, dtype=torch.float64), x.reshape(-1), torch.ones(2, dtype=torch.float64)])
    for edges in cuts(x.numel()):
        first, stop = edges[:-1], [b + 4 for b in edges[1:]]
        n = len(first)
        start = [a + 4 for a in first]
        dims = ([x.dim()] * n, list(shape) * n, list(kept) * n)
        found = ops.squares_along([flat], [0] * n, start, stop, first, [1] * n, [2] * n, *dims, 2, 3 + sums.numel())
        assert not found[0].any() and not found[1, :2].any() and not found[1, -1].any()
        torch.testing.assert_close(found[1, 2:-1], sums.reshape(-1))
        numbers = torch.cat([torch.zeros(2, dtype=torch.float64), factors.reshape(-1)])
        scaled = ops.scale_along(flat, start, stop, first, [2] * n, *dims, numbers)
        torch.testing.assert_close(scaled[4:-2].view(shape), x * factors)
        assert torch.equal(scaled[:4], flat[:4]) and torch.equal(scaled[-2:], flat[-2:])


def test_a_shard_is_taken_of_leaves():
    a, b = torch.arange(6.0).view(2, 3), torch.arange(10.0, 14.0)
    whole = torch.tensor([0, 0, 1, 2, 3, 4, 5, 0, 10, 11, 12, 13, 0])[1:]
    for start, stop in [(0, 12), (2, 9), (6, 7), (8, 12)]:
        found = ops.take_shard([a, b], [0 + 0, 7], start, stop, torch.float64)
        expected = whole[start:stop].double()
        assert torch.equal(found, expected), (start, stop)
    assert torch.equal(ops.take_shard([None, b], [0, 7], 0, 7, torch.float32), torch.zeros(7))
