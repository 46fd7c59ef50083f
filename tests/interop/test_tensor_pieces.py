"""Tensors in pieces, against the same tensor in one."""

import pytest
import torch

from zerofn.interop.tensor_pieces import Pieces, cut, first, numel


@pytest.mark.parametrize("sizes", [(24,), (5, 0, 7, 12), (1,) * 24])
def test_every_interval_is_that_of_the_whole(sizes):
    whole = torch.arange(24.0)
    pieces = Pieces((4, 6), tuple(whole.split(sizes)))
    for start in range(24):
        for count in range(1, 25 - start):
            into = torch.full((count,), -1.0, dtype=torch.float64)
            pieces.read(start, into)
            assert torch.equal(into, whole[start : start + count].double())
    with pytest.raises(ValueError, match=r"2 elements of a tensor of shape \(4, 6\) are missing"):
        pieces.read(23, torch.empty(3))


def test_cuts():
    flats = [torch.arange(5), torch.arange(5, 9), torch.arange(9, 12)]
    for start in range(12):
        for count in range(13 - start):
            found = cut(flats, start, count)
            assert [int(x) for part in found for x in part] == list(range(start, start + count))
    assert [x.tolist() for x in first(flats, 6)] == [[0, 1, 2, 3, 4], [5]]
    assert numel((3, 4)) == 12 and numel(()) == 1
