"""Leaves on stages of a pipeline: steps that are not cut are those of plain torch in float64."""

from functools import partial

import pytest
import torch

from benchmarks.mesh.training import assert_same_training, plain, trained

CASES = [
    ("llama", {"pipe": 2}, 3, {"num_microbatches": 3}),
    ("gpt2", {"pipe": 2, "tensor": 2}, 1, {}),  # the embedding is tied: it lies on both stages
    pytest.param("llama", {"pipe": 2}, 0, {}, marks=pytest.mark.whole),
    pytest.param("llama", {"pipe": 2, "replicate": 2}, 3, {"shards": {"hpz": False}}, marks=pytest.mark.whole),
    pytest.param("llama", {"pipe": 2, "context": 2}, 2, {}, marks=pytest.mark.whole),
    pytest.param("t5", {"pipe": 3}, 2, {"num_microbatches": 3}, marks=pytest.mark.whole),
    pytest.param("mixtral", {"pipe": 2, "expert": 2}, 3, {}, marks=pytest.mark.whole),
    pytest.param("bert", {"pipe": 2, "data": 2}, 2, {"num_microbatches": 2}, marks=pytest.mark.whole),
    pytest.param(
        "llama, 2 key heads", {"pipe": 2, "data": 2, "tensor": 2}, 3, {"num_microbatches": 2}, marks=pytest.mark.whole
    ),
]


@pytest.mark.parametrize(("name", "sizes", "stage", "options"), CASES, ids=str)
def test_models_are_those_of_plain_torch(ranks, name, sizes, stage, options):
    found = ranks(torch.tensor(list(sizes.values())).prod().item(), partial(trained, **options), name, sizes, stage)
    assert_same_training(found, plain(name))


def test_eager_steps_have_the_bits_of_captured_ones(ranks):
    eager, captured = (ranks(2, trained, "llama", {"pipe": 2}, 3, x) for x in (False, True))
    for (a, x, _), (b, y, _) in zip(eager, captured, strict=True):
        assert a == b and all(torch.equal(x[k], y[k]) for k in x)
    held = [each[2] for each in captured]
    assert sum(held) < 2 * trained_alone()  # a rank has its own stage's leaves


def trained_alone():
    return trained("llama", {"data": 1}, 3)[2]
