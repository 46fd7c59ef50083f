"""Meshes with everything else that a step can have: the same bits, or nearly the same numbers."""

import re

import pytest

import zerofn
from benchmarks.mesh.training import assert_same_training, plain, trained
from tests.support.same import assert_same_trees

WHOLE = pytest.mark.whole
MESHES = [({"tensor": 2}, "ulysses"), pytest.param({"context": 2}, "ring", marks=WHOLE)]
IN_PARTS, RING = {"in_parts": True}, {"method": "ring"}
WAYS = [
    pytest.param({"tensor": 2}, IN_PARTS, ["remat"], marks=pytest.mark.whole),
    pytest.param({"tensor": 2}, IN_PARTS, ["budget"], marks=WHOLE),
    ({"context": 2}, RING, ["remat", "drives"]),
    pytest.param({"tensor": 2}, {}, ["budget", "remat", "drives"], marks=WHOLE),
    pytest.param({"context": 2}, RING, ["budget"], marks=WHOLE),
]


def variants(sizes, how, ways, folder):
    """Trainings whose bits must not differ: (losses, parameters) each. The first is without any of `ways`."""

    def run(**options):
        return trained("llama", sizes, 3, **how, **options)[:2]

    def least():
        with pytest.raises(MemoryError) as told:
            run(compiles={"memory": 1})
        return int(re.search("at least ([0-9,]+) bytes", str(told.value))[1].replace(",", ""))

    on_drives = zerofn.Offload(optimizer="nvme", params="nvme", path=folder)
    run_of = {
        "remat": lambda: run(compiles={"remat": "full"}),
        "budget": lambda: run(compiles={"memory": least()}),
        "drives": lambda: run(shards={"offload": on_drives}),
    }
    return [run(), *(run_of[way]() for way in ways)]


@pytest.mark.whole
@pytest.mark.parametrize(("sizes", "how", "ways"), WAYS, ids=str)
def test_recomputation_budgets_and_drives_keep_the_bits(ranks, tmp_path, sizes, how, ways):
    for (losses, params), *others in ranks(2, variants, sizes, how, ways, tmp_path):
        assert len(others) == len(ways)
        for again, ours in others:
            assert again == losses
            assert_same_trees(ours, params)


def with_microbatches(sizes, method):
    return trained("llama", sizes, 2, method=method, num_microbatches=3)


@pytest.mark.whole
@pytest.mark.parametrize(("sizes", "method"), MESHES, ids=str)
def test_microbatches_are_the_whole_batch(ranks, sizes, method):
    assert_same_training(ranks(2, with_microbatches, sizes, method), plain("llama"))


def in_halves(sizes, method):
    return trained("llama", sizes, 2, method=method, shards={"precision": "bf16"})[0]


@pytest.mark.whole
@pytest.mark.parametrize(("sizes", "method"), MESHES, ids=str)
def test_losses_in_16_bits_are_near(ranks, sizes, method):
    losses, _ = plain("llama")
    for found in ranks(2, in_halves, sizes, method):
        assert found == pytest.approx(losses, rel=0.02)


def weighted(sizes, num_microbatches):
    return trained("llama", sizes, 2, method="ring", num_microbatches=num_microbatches, weighted=True)


@pytest.mark.part(num_microbatches=[3])
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_sums_and_weights_are_those_of_whole_sequences(ranks, num_microbatches):
    """A rank's gradients are of the other's tokens, too, whose number is another."""
    assert_same_training(ranks(2, weighted, {"context": 2}, num_microbatches), plain("llama"))
