"""Compiled steps have the same bits at every stage, with every `remat` and within every budget; they are eager's to
rounding."""

import pytest
import torch

import zerofn
from tests.support.outlined_steps import trained
from tests.support.same import assert_same_trees
from tests.support.some import some_of

pytestmark = pytest.mark.slow  # Inductor compiles

# Losses are about 3; rows of bfloat16 have 8 bits.
NEAR = {None: 2e-6, "bf16": 2e-3}
WAYS = {
    "one gradient": {},
    "sums": {"num_microbatches": 2},
    "sums in each": {"num_microbatches": 2, "reduce": "microbatch"},
}


def alike(name, precision, way, stages, memory=True):
    """On a rank: all of them beside each other, and beside eager."""
    way = {**WAYS[way], "precision": precision}
    eager, plan, _ = trained(name, **way)
    expected, found, regions = trained(name, 0, backend="inductor", **way)
    assert regions
    for a, b in zip(zerofn.tree.leaves(expected), zerofn.tree.leaves(eager), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=NEAR[precision])
    for stage in stages:
        assert_same_trees(trained(name, stage, backend="inductor", **way)[0], expected, f"stage {stage}")
    for options in ({"remat": "full"}, {"remat": "auto"}, {"memory": least(name, way)}) if memory else ():
        assert_same_trees(trained(name, backend="inductor", **options, **way)[0], expected, str(options))


def least(name, way):
    """Nearly the least budget that a step at stage 3 can have."""
    return int(trained(name, remat="full", **way)[1].memory().total * 1.05)


@pytest.mark.part(name=["blocks"], way=["one gradient"], precision=[None], memory=[False])
@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("precision", NEAR)
@pytest.mark.parametrize("name", ["blocks", "llama", "gpt2", "t5"])
def test_bits_do_not_depend_on_stage_and_memory(name, precision, way, memory):
    alike(name, precision, way, () if memory else some_of(range(1, 4), 3), memory)


@pytest.mark.whole  # a minute; test_regions_are_the_same_at_every_stage compares their texts on ranks
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("precision", NEAR)
@pytest.mark.parametrize("name", ["blocks", "llama", "gpt2"])
def test_bits_on_ranks(ranks, name, precision, way):
    ranks(2, alike, name, precision, way, (1, 2, 3))
