"""The example of meshes: the loss is that of one process, and the table says what each axis sends."""

import functools
import re

import pytest

from tests.support.runs_of_examples import run, run_here

TINY = ["--steps", 4, "--length", 32, "--width", 32, "--batch", 4, "--layers", 1]


def loss(printed):
    return float(re.search(r"^loss ([\d.]+)$", printed, re.M)[1])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A model's name -> its loss on one rank."""

    @functools.cache
    def run_once(model):
        return loss(run_here("mesh.py", *TINY, "--model", model, folder=tmp_path_factory.mktemp("alone")))

    return run_once


def check(printed, alone, model, mesh):
    assert loss(printed) == pytest.approx(alone(model), rel=1e-4)
    for axis in mesh.split(","):
        name, size = axis.split("=")
        assert int(size) == 1 or name in printed.partition("MB of a rank's")[0]


def test_the_loss_is_that_of_one_process(tmp_path, alone, ranks):
    options = ("--model", "llama", "--mesh", "tensor=2", "--stage", 2)
    printed, nothing = ranks(2, functools.partial(run_here, folder=tmp_path), "mesh.py", *TINY, *options)
    check(printed, alone, "llama", "tensor=2")
    assert nothing == ""


@pytest.mark.whole
@pytest.mark.parametrize(
    ("num_ranks", "model", "mesh", "options"),
    [
        (2, "mixtral", "data=1,expert=2", []),
        (8, "llama", "data=2,tensor=2,context=2", ["--method", "ring"]),
        (4, "mixtral", "expert=2,tensor=2", ["--stage", 1]),
    ],
)
def test_under_torchrun(tmp_path, alone, num_ranks, model, mesh, options):
    more = ["--model", model, "--mesh", mesh, *options]
    check(run("mesh.py", *TINY, *more, folder=tmp_path, num_ranks=num_ranks), alone, model, mesh)
