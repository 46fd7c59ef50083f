"""DeepSpeed's patterns are its own classes' layouts, block for block."""

import json

import pytest
import torch

from tests.sparse.deepspeed_layouts import HEADS, RECORDED, cases, hash_of
from tests.sparse.dense import inputs, same_as_dense
from zerofn import sparse
from zerofn.sparse.deepspeed import _blocks
from zerofn.sparse.patterns import Sizes


def made(name, options, seed):
    drawn = {"seed": seed} if name in ("variable", "bigbird") else {}
    return getattr(sparse.deepspeed, name)(**options, **drawn)


def test_layouts_are_deepspeeds_own():
    recorded = json.loads(RECORDED.read_text())
    found = []
    for seed, (name, options, num) in enumerate(cases()):
        pattern = made(name, options, seed)
        sizes = Sizes(HEADS, num * pattern.block, num * pattern.block)
        blocks = _blocks(pattern, sizes).expand(HEADS, num, num)
        found.append({"name": name, "seed": seed, "attended": int(blocks.sum()), "hash": hash_of(blocks)})
    assert found == recorded


@pytest.mark.parametrize("number", range(14))
def test_tokens_are_attended_by_their_blocks(number):
    """Rows that are no multiple of a block, and blocks that are larger than a tile."""
    name, options, _ = list(cases())[number + 28]
    options = {**options, "block": (16, 64, 24, 70)[number % 4]}
    pattern, num = made(name, options, 3), options["block"] * 6 - 5
    sizes = Sizes(4, num, num)
    blocks = _blocks(pattern, sizes).repeat_interleave(pattern.block, 1).repeat_interleave(pattern.block, 2)
    mask = blocks[None, :, :num, :num]
    given = inputs(1, queries=num, width=8, values=8)
    same_as_dense(given, lambda q, k, v: sparse.attention(q, k, v, pattern), mask, 1e-12)
    i = torch.arange(num)
    same_as_dense(
        given, lambda q, k, v: sparse.attention(q, k, v, pattern & sparse.causal), mask & (i <= i[:, None]), 1e-12
    )


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda x: x.fixed(num_local_blocks=4, num_global_blocks=3), "does not divide num_local_blocks=4"),
        (lambda x: x.fixed(num_global_blocks=0), "num_global_blocks=0 does not divide"),
        (lambda x: x.fixed(attention="sideways"), "must be bidirectional or unidirectional"),
        (lambda x: x.fixed(attention="unidirectional", horizontal_global_attention=True), "attends to later tokens"),
        (lambda x: x.fixed(num_different_global_patterns=2), "from 1 to 1"),
        (lambda x: x.variable(local_window_blocks=[]), "local_window_blocks must be"),
        (lambda x: x.variable(global_block_indices=[3], global_block_end_indices=[3]), "and be larger than it"),
        (lambda x: x.bslongformer(global_block_indices=[-1]), "count blocks from 0"),
        (lambda x: x.bigbird(block=0), "block=0 must be 1 or more"),
        (lambda x: sparse.layout(x.bigbird(), 32), "num_sliding_window_blocks=3, but the row has only 2 blocks"),
        (lambda x: sparse.layout(x.fixed(), 32, 64), "as many queries as keys"),
    ],
)
def test_what_deepspeed_refuses_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make(sparse.deepspeed)


def test_a_pattern_that_is_the_same_for_all_heads_makes_a_layout_of_one_head():
    def heads(pattern):
        return sparse.layout(pattern, 230, heads=4).sizes.heads

    make = sparse.deepspeed
    assert [heads(x) for x in (make.bigbird(), make.fixed() | sparse.causal, make.bslongformer(block=70))] == [1, 1, 1]
    assert heads(make.bigbird(different_layout_per_head=True)) == 4
