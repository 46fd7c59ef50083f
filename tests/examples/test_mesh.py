"""The example of meshes: the loss is that of one process, and the table says what each axis sends."""

import functools
import re

import pytest

from tests.support.runs_of_examples import run

TINY = ["--steps", 4, "--length", 32, "--width", 32, "--batch", 4, "--layers", 1]


def loss(printed):
    return float(re.search(r"^loss ([\d.]+)$", printed, re.M)[1])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A model's name -> its loss on one rank."""

    @functools.cache
    def run_once(model):
        return loss(run("mesh.py", *TINY, "--model", model, folder=tmp_path_factory.mktemp("alone")))

    return run_once


@pytest.mark.parametrize(
    ("num_ranks", "model", "mesh", "options"),
    [
        (2, "llama", "tensor=2", ["--stage", 2]),
        pytest.param(2, "mixtral", "data=1,expert=2", [], marks=pytest.mark.whole),
        pytest.param(8, "llama", "data=2,tensor=2,context=2", ["--method", "ring"], marks=pytest.mark.whole),
        pytest.param(4, "mixtral", "expert=2,tensor=2", ["--stage", 1], marks=pytest.mark.whole),
    ],
)
def test_the_loss_is_that_of_one_process(tmp_path, alone, num_ranks, model, mesh, options):
    more = ["--model", model, "--mesh", mesh, *options]
    printed = run("mesh.py", *TINY, *more, folder=tmp_path, num_ranks=num_ranks)
    assert loss(printed) == pytest.approx(alone(model), rel=1e-4)
    for axis in mesh.split(","):
        name, size = axis.split("=")
        assert int(size) == 1 or name in printed.partition("MB of a rank's")[0]
