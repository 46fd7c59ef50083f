"""The explicit example: written out, compiled and on full parameters, the numbers are the same."""

import re

import pytest

from tests.support.runs_of_examples import run, run_here

TINY = ["--steps", 4, "--iterations", 12, "--batch", 64, "--width", 48, "--layers", 2]


def numbers(pattern, printed):
    """What the pattern's groups caught, in order, as floats."""
    found = re.findall(pattern, printed)
    assert found, printed
    return [float(x) for groups in found for x in ([groups] if isinstance(groups, str) else groups)]


def check(printed):
    """-> the largest eigenvalue."""
    assert numbers(r"parameters differ by (\S+)", printed) == [0.0, 0.0]  # eager and compiled
    assert len(set(numbers(r"loss ([\d.]+)", printed))) == 1
    differences = numbers(r"relative difference to plain torch (\S+)", printed)
    assert len(differences) == 2 and max(differences) < 1e-5
    eager, compiled = numbers(r"power iteration: (\S+) eager, (\S+) compiled", printed)
    assert compiled == eager
    (eigenvalue,) = numbers(r"largest Hessian eigenvalue (\S+)", printed)
    (curvature,) = numbers(r"from three losses: (\S+)", printed)
    assert curvature == pytest.approx(eigenvalue, rel=0.05)
    return eigenvalue


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The largest eigenvalue as one process finds it."""
    return check(run_here("explicit.py", *TINY, folder=tmp_path_factory.mktemp("alone")))


def test_one_process_finds_the_curvature(alone):
    assert alone > 0


@pytest.mark.whole
@pytest.mark.parametrize("stage", [1, 3])
def test_every_stage_has_the_curvature_of_the_global_batch(alone, stage, tmp_path):
    printed = run("explicit.py", *TINY, "--stage", stage, folder=tmp_path, num_ranks=2)
    assert f"stage {stage}, rank 0 of 2" in printed
    assert check(printed) == pytest.approx(alone, rel=1e-3)
