"""The example of meshes: the loss is that of one process, and the table says what each axis sends."""

import re

import pytest

from tests.support.runs_of_examples import run

TINY = ["--steps", 4, "--length", 32, "--width", 32, "--batch", 4, "--layers", 1]


def loss(printed):
    return float(re.search(r"^loss ([\d.]+)$", printed, re.M)[1])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return loss(run("mesh.py", *TINY, folder=tmp_path_factory.mktemp("alone")))


@pytest.mark.parametrize(
    ("num_ranks", "mesh", "options"),
    [
        (2, "tensor=2", ["--stage", 2]),
        pytest.param(8, "data=2,tensor=2,context=2", ["--method", "ring"], marks=pytest.mark.whole),
    ],
)
def test_the_loss_is_that_of_one_process(tmp_path, alone, num_ranks, mesh, options):
    printed = run("mesh.py", *TINY, "--mesh", mesh, *options, folder=tmp_path, num_ranks=num_ranks)
    assert loss(printed) == pytest.approx(alone, rel=1e-4)
    for axis in mesh.split(","):
        assert axis.split("=")[0] in printed.partition("MB of a rank's")[0]
