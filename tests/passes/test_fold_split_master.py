"""In bfloat16 a split master's upper half is sent and computed with as it lies, with no joining and rounding."""

import pytest
import torch
import torch.distributed as dist

from tests.support.same import assert_same_trees
from tests.support.small_steps import batch_of, build, captured, gathers, lowered, results, state_of, train_step_of
from zerofn.graph.nested import graphs_of
from zerofn.passes.canonicalize import canonicalize
from zerofn.passes.fold_split_master import fold_split_master

ops = torch.ops.zerofn


def roundings(gm):
    return [n for each in graphs_of(gm) for n in each.graph.nodes if n.target is ops.high.default]


def rounded(gm):
    """What is rounded to bfloat16 only to be the upper half again."""
    return [n for n in roundings(gm) if n.all_input_nodes[0].target is ops.join.default]


@pytest.mark.part(num_microbatches=[1])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_no_joined_number_is_rounded(num_microbatches):
    options = {"precision": "bf16", "num_microbatches": num_microbatches}
    assert roundings(lowered(**options))  # what capture leaves
    folded = lowered(fold_split_master, canonicalize, **options)
    assert not rounded(folded)
    if num_microbatches == 1:
        assert [g.all_input_nodes[0].op for g in gathers(folded)] == ["placeholder"] * 6


def test_other_precisions_stay_as_they_are():
    before, after = lowered(canonicalize), lowered(fold_split_master, canonicalize)
    assert [n.target for n in before.graph.nodes] == [n.target for n in after.graph.nodes]


def folded_or_not(num_microbatches):
    step, batch = train_step_of(build(4), num_microbatches), batch_of(dist.get_rank())
    state = state_of(build(4), 3, precision="bf16")
    found, expected = (results(captured(step, state, batch, *p), state, batch) for p in ((fold_split_master,), ()))
    assert_same_trees(found, expected, f"{num_microbatches} microbatches")


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_values_stay(ranks, num_microbatches):
    ranks(2, folded_or_not, num_microbatches)
