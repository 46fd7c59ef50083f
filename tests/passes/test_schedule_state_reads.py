"""One update's state is read while the one before runs, into places of which none is given away too early."""

import pytest
import torch

from tests.support.same import assert_same_trees
from tests.support.small_steps import batch_of, build, fake_ranks, scheduled, state_of, train_step_of, trained
from zerofn import Offload, optim
from zerofn.graph.alias import positions, roots, touches
from zerofn.graph.node_kinds import UPDATE, is_fetch, wait_of
from zerofn.offload.disk import pages

ops = torch.ops.zerofn
NORMED = optim.chain(optim.clip_by_global_norm(0.05), optim.adamw(1e-2))
TIERS = [{"optimizer": "nvme"}, {"optimizer": "nvme", "params": "nvme"}]
each_tier = pytest.mark.parametrize("tiers", TIERS, ids=lambda x: "+".join(x))


def graph_of(path, tiers, num_layers=6):
    with fake_ranks(2):
        state = state_of(build(num_layers), 3, NORMED, offload=Offload(**tiers, path=path))
        return scheduled(train_step_of(build(num_layers)), state, batch_of(), donating=True).gm


def reads(gm):
    """(start, place) of every read that has a place; the last list among its arguments is the place."""
    found = [n for n in gm.graph.nodes if is_fetch(n)]
    return [(n, next(x for x in n.args if isinstance(x, list | tuple) and len(x) == 2)) for n in found]


@each_tier
def test_the_next_state_is_read_while_an_update_runs(tmp_path, tiers):
    gm = graph_of(tmp_path, tiers)
    where = positions(gm.graph)
    updates = [n for n in gm.graph.nodes if n.target is ops.adamw_.default]
    of_update = {n: {wait_of(f) for f, _ in reads(gm) if f.meta.get(UPDATE)} & set(n.all_input_nodes) for n in updates}
    starts = [[where[next(f for f, _ in reads(gm) if wait_of(f) is w)] for w in of_update[n]] for n in updates]
    assert all(starts)
    for k in range(1, len(updates)):  # the next one's reads begin before this one runs
        assert max(starts[k]) < where[updates[k - 1]], k
    for k in range(2, len(updates)):  # and not before the last but one has run: three units are in memory
        assert min(starts[k]) > where[updates[k - 2]], k


@each_tier
def test_what_is_read_lies_apart_from_what_is_in_use(tmp_path, tiers):
    gm = graph_of(tmp_path, tiers)
    where, touched = positions(gm.graph), touches(gm.graph, roots(gm.graph))
    spans = []
    for start, (arena, place) in reads(gm):
        size, dtype = start.args[1:3]
        spans.append((where[start], where[touched[start][-1]], arena, place, place + pages(size * dtype.itemsize)))
    for k, (begin, end, arena, a, b) in enumerate(spans):
        for other_begin, other_end, other_arena, c, d in spans[:k]:
            together = begin <= other_end and other_begin <= end and arena == other_arena
            assert not (together and a < d and c < b), "two reads share bytes while both are in use"


def test_steps_have_the_bits_of_memory(tmp_path):
    _, expected = trained(6, 4, NORMED, 3)
    for tiers in TIERS:
        _, found = trained(6, 4, NORMED, 3, offload=Offload(**tiers, path=tmp_path))
        assert_same_trees(found, expected, str(tiers))
