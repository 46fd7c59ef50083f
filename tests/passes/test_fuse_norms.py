"""Each gradient is read once for its norm and for the finite check, as soon as it is complete."""

import pytest
import torch
import torch.distributed as dist

from tests.support.same import assert_same_trees
from tests.support.small_steps import batch_of, build, captured, fake_ranks, results, scatters, state_of, train_step_of
from zerofn import optim
from zerofn.graph.alias import positions
from zerofn.graph.node_kinds import wait_of
from zerofn.passes.canonicalize import canonicalize
from zerofn.passes.fuse_norms import fuse_norms
from zerofn.passes.raise_reduce_scatters import raise_reduce_scatters

ops = torch.ops.zerofn
NORMED = optim.chain(optim.clip_by_global_norm(0.05), optim.adamw(1e-2))
EARLY = (canonicalize, raise_reduce_scatters)


def graph_of(*schedule, tx=NORMED):
    with fake_ranks(2):
        return captured(train_step_of(build(4)), state_of(build(4), 3, tx), batch_of(), *schedule).gm


def reductions(gm, *targets):
    return [n for n in gm.graph.nodes if n.target in targets]


def test_norm_and_finite_check_read_a_gradient_once():
    before = graph_of(*EARLY)
    assert len(reductions(before, ops.part_norms.default, ops.part_extremes.default)) == 2
    after = graph_of(*EARLY, fuse_norms)
    assert not reductions(after, ops.part_norms.default, ops.part_extremes.default)
    assert len(reductions(after, ops.part_numbers.default)) == len(scatters(after)) == 4


def test_a_gradient_is_read_before_the_next_one_is_there():
    gm = graph_of(*EARLY, fuse_norms)
    where = positions(gm.graph)
    reads = [where[n] for n in reductions(gm, ops.part_numbers.default)]
    there = [where[wait_of(n)] for n in scatters(gm)]
    assert sorted([*reads, *there]) == [x for pair in zip(sorted(there), sorted(reads), strict=True) for x in pair]


def fused_or_not(overflow):
    step, batch = train_step_of(build(4)), batch_of(dist.get_rank())
    if overflow:
        batch["x"][0, 0] = float("inf")
    state = state_of(build(4), 3, NORMED)
    found, expected = (results(captured(step, state, batch, *EARLY, *p), state, batch) for p in ((fuse_norms,), ()))
    assert_same_trees(found, expected, f"{overflow=}", equal_nan=True)


@pytest.mark.parametrize("overflow", [False, True])
def test_values_stay(ranks, overflow):
    ranks(3, fused_or_not, overflow)
