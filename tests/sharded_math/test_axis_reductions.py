"""Sums along dims of leaves, and rules on whole leaves, on shards as on plain trees."""

import pytest
import torch

import zerofn
from tests.support import optim_trees as trees
from zerofn.sharded_math.axis_reductions import axis_scale, axis_squares, groups_of, logical_leaves
from zerofn.sharded_math.whole_leaves import map_whole


def groups(values):
    shapes = [leaf.shape for leaf in logical_leaves(values)]
    return groups_of(shapes, [[tuple(j == d for j in range(len(s))) for d in range(max(1, len(s)))] for s in shapes])


def _at_ranks():
    values = trees.params()
    plain = axis_squares(values, groups(values))
    for group, x in [(g, zerofn.tree.leaves(values)[g.leaf]) for g in groups(values)]:
        over = [d for d, keep in enumerate(group.kept) if not keep]
        torch.testing.assert_close(group.of(plain), x.square().sum(over) if over else x.square())
    turned = {k: x.flip(0) * x.sum() if x.dim() else 2 * x for k, x in values.items()}
    first = None
    for stage in range(4):
        sharded = zerofn.shard({"params": values}, stage=stage, unit=trees.unit_of)["params"]
        found = axis_squares(sharded, groups(sharded))
        torch.testing.assert_close(found, plain, rtol=1e-12, atol=0)
        first = found if first is None else first
        assert torch.equal(found, first), stage
        scaled = axis_scale(sharded, groups(sharded), plain)
        trees.assert_close(zerofn.gather(scaled), axis_scale(values, groups(values), plain), stage)
        whole = map_whole(lambda x: x.flip(0) * x.sum() if x.dim() else 2 * x, sharded)
        trees.assert_equal(zerofn.gather(whole), turned, stage)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_shards_are_the_plain_tree(ranks, size):
    ranks(size, _at_ranks)
