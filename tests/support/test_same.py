import pytest
import torch

from tests.support.same import assert_same_trees


def test_equal_trees_are_the_same():
    for value in ({"a": torch.ones(2), "b": (1, "x")}, [], torch.tensor(3), torch.empty(0)):
        assert_same_trees(value, value)


def test_what_differs_is_named():
    ours, theirs = ({"a": torch.ones(2), "b": [torch.zeros(2, 3), 1]} for _ in range(2))
    ours["b"][0][1, 2] = 5
    with pytest.raises(AssertionError, match=r"stage 3: leaf 'b.0': 1 of 6 elements differ.*\[1, 2\]: 5.0, not 0.0"):
        assert_same_trees(ours, theirs, "stage 3")


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ({"a": 1}, {"b": 1}, r"\['a'\] are not expected, \['b'\] are missing"),
        ([1, 2], [1], r"\['1'\] are not expected, \[\] are missing"),
        (torch.ones(2), torch.ones(2).double(), r"torch.float32 \[2\], not torch.float64 \[2\]"),
        (torch.ones(2), torch.ones(2, 1), r"\[2\], not torch.float32 \[2, 1\]"),
        ([2], [3], "leaf '0': 2, not 3"),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), "nan, not nan"),
    ],
)
def test_kinds_of_difference(ours, theirs, said):
    with pytest.raises(AssertionError, match=said):
        assert_same_trees(ours, theirs)


def test_nan_can_count_as_equal():
    x = torch.tensor([float("nan"), 1.0])
    assert_same_trees(x, x.clone(), equal_nan=True)
    with pytest.raises(AssertionError, match=r"1 of 2 elements differ, the first at \[1\]"):
        assert_same_trees(x, x + 1, equal_nan=True)


def differing(_):
    assert_same_trees({"w": torch.tensor(torch.distributed.get_rank())}, {"w": torch.tensor(0)}, "stage 1")


def test_a_rank_says_which_it_is(ranks):
    with pytest.raises(AssertionError, match=r"rank 1 of 2: stage 1: leaf 'w'.*: 1, not 0"):
        ranks(2, differing, None)
