"""What two slices of a leaf share, compared with indexing of the whole leaf."""

import random

import pytest
import torch

from zerofn.geometry.cuts import Cut, equal
from zerofn.geometry.overlaps import makes_up, overlap, shape_in


def part(x, region):
    """The slice of a whole tensor."""
    for dim, intervals in region:
        x = torch.cat([x.narrow(dim, a, b - a) for a, b in intervals], dim)
    return x


def moved(shape, source, target, start, stop):
    """Elements [start, stop) of the target from the source's, -1 where it lacks them, and how many were moved."""
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    theirs, out = part(whole, source).reshape(-1), torch.full((stop - start,), -1)
    count = 0
    for runs in overlap(shape, source, target, start, stop):
        for k in range(runs.count):
            a, b = runs.at + k * runs.stride, runs.start + k * runs.step
            assert 0 <= a <= a + runs.length <= len(out) and 0 <= b <= b + runs.length <= len(theirs)
            out[a : a + runs.length] = theirs[b : b + runs.length]
            count += runs.length
    expected = part(whole, target).reshape(-1)[start:stop]
    return out, expected, torch.isin(expected, theirs), count


def drawn(draw, shape):
    """A random region of some dims, in one, two or no interval."""
    region = []
    for dim, n in enumerate(shape):
        if draw.random() < 0.5:
            ends = sorted(draw.choices(range(n + 1), k=draw.choice([2, 4])))
            region.append((dim, tuple((a, b) for a, b in zip(ends[::2], ends[1::2], strict=True))))
    return tuple(region)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_moved_is_what_indexing_gives(seed):
    draw = random.Random(seed)
    for _ in range(150):
        shape = tuple(draw.randint(1, 6) for _ in range(draw.randint(0, 4)))
        source, target = drawn(draw, shape), drawn(draw, shape)
        size = torch.Size(shape_in(shape, target)).numel()
        start, stop = sorted((draw.randint(0, size), draw.randint(0, size)))
        out, expected, there, count = moved(shape, source, target, start, stop)
        assert torch.equal(out, torch.where(there, expected, -1)), (shape, source, target, start, stop)
        assert count == int(there.sum())  # nothing is moved twice


def test_rows_are_one_run_and_columns_one_of_several():
    rows, columns = ((0, ((4, 8),)),), ((1, ((4, 8),)),)
    assert [x[:] for x in overlap((8, 8), (), rows, 0, 32)] == [(32, 0, 32, 1, 0, 0)]
    assert [x[:] for x in overlap((8, 8), (), columns, 0, 32)] == [(4, 0, 4, 8, 8, 4)]
    assert [x[:] for x in overlap((8, 8), columns, columns, 3, 9)] == [(3, 0, 6, 1, 0, 0)]
    assert list(overlap((8, 8), ((1, ((0, 4),)),), columns, 0, 32)) == []


def test_slices_make_up_the_whole():
    for num in (1, 2, 3, 4):
        assert makes_up(equal("tensor", 0, 12, num)) and makes_up(equal("tensor", 1, 12, num, parts=3))
    assert makes_up(equal("tensor", 0, 8, 4, unit=4)) and makes_up(equal("tensor", 0, 9, 4))
    for slices in [((0, 2),), ((0, 3),)], [((0, 2),), ((3, 4),)], [((0, 2),), ((2, 3),)], [((0, 2),), ((2, 5),)]:
        assert not makes_up(Cut("tensor", 0, 4, tuple(slices))), slices
