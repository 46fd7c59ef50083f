"""Steps in a runtime in which everything is as late as it may be, and memory that nobody owns is overwritten."""

import contextlib

import pytest

from tests.support.captured_steps import rank
from tests.support.late_runtime import late
from tests.support.same import assert_same_trees
from tests.support.tiered_steps import CASES, DEFECTS, broken, steps
from zerofn.util.errors import DiskError


def both(folder, *cases):
    for case in cases:
        found = [steps(**case, folder=folder, inside=inside) for inside in (late, contextlib.nullcontext)]
        assert_same_trees(*found, f"{case}, rank {rank()}", equal_nan=True)


@pytest.mark.part(case=CASES[8:21:8])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_rank(tmp_path, case):
    both(tmp_path, case)


@pytest.mark.whole
@pytest.mark.parametrize(("num_ranks", "cases"), [(2, CASES[2::16]), (2, CASES[10::16]), (3, CASES[3::8])], ids=str)
def test_several_ranks(ranks, tmp_path, num_ranks, cases):
    ranks(num_ranks, both, tmp_path, *cases)


@pytest.mark.parametrize("defect", DEFECTS)
def test_defects_are_found(tmp_path, defect):
    right = steps(3, DEFECTS[defect][-1], tmp_path)
    with broken(defect) as tier, pytest.raises((AssertionError, DiskError)):  # a checksum may tell it, too
        assert_same_trees(steps(3, tier, tmp_path, inside=late), right, equal_nan=True)
