"""Slices of leaves: which elements each rank has."""

import pytest
import torch

from zerofn.comm.mesh import Axis, Mesh
from zerofn.geometry.cuts import counts, equal, local_shape, sliced


def on(rank, size):
    """A mesh of one tensor axis, as one of its ranks sees it."""
    return Mesh((Axis("tensor", size, rank),))


def test_equal_slices():
    assert equal("tensor", 0, 6, 2).slices == (((0, 3),), ((3, 6),))
    assert equal("tensor", 0, 7, 3).slices == (((0, 3),), ((3, 6),), ((6, 7),))


def test_heads_stay_whole():
    assert equal("tensor", 0, 12, 2, unit=4).slices == (((0, 8),), ((8, 12),))
    with pytest.raises(ValueError, match="the size of dim 0, 10, is not a multiple of 4"):
        equal("tensor", 0, 10, 2, unit=4)


def test_several_matrices_in_one_leaf():
    cut = equal("tensor", 0, 12, 2, parts=3)
    assert cut.slices == (((0, 2), (4, 6), (8, 10)), ((2, 4), (6, 8), (10, 12)))
    x = torch.arange(12)
    assert sliced(x, [cut], on(1, 2)).tolist() == [2, 3, 6, 7, 10, 11]


def test_fewer_heads_than_ranks():
    cut = equal("tensor", 0, 8, 4, unit=4)
    assert cut.slices == (((0, 4),), ((0, 4),), ((4, 8),), ((4, 8),))
    assert [cut.first(rank) for rank in range(4)] == [0, 0, 2, 2]
    assert [counts([cut], on(rank, 4).slices) for rank in range(4)] == [True, False, True, False]
    assert [counts([], on(rank, 4).slices) for rank in range(4)] == [True, False, False, False]
    with pytest.raises(ValueError, match="dim 0 has only 2 heads for 3 ranks"):
        equal("tensor", 0, 8, 3, unit=4)


@pytest.mark.parametrize("options", [{}, {"parts": 3}, {"unit": 4}])
def test_a_dim_of_size_0_is_refused(options):
    with pytest.raises(ValueError, match="dim 1 has size 0. Leave it whole"):
        equal("tensor", 1, 0, 2, **options)


def test_shapes():
    cut = equal("tensor", 1, 7, 3)
    assert [local_shape((4, 7), [cut], on(rank, 3)) for rank in range(3)] == [(4, 3), (4, 3), (4, 1)]
