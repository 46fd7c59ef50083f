"""What is on a drive is read for computing, and again for its update: in between it takes no memory."""

import pytest
import torch

from tests.support.same import assert_same_trees
from tests.support.small_steps import batch_of, build, captured, fake_ranks, state_of, train_step_of, trained
from zerofn import Offload, optim
from zerofn.graph.alias import positions
from zerofn.graph.nested import graphs_of
from zerofn.graph.node_kinds import UPDATE, is_fetch, wait_of
from zerofn.passes.split_state_reads import split_state_reads

ops = torch.ops.zerofn


def graph_of(path, *schedule, num_microbatches=1):
    with fake_ranks(2):
        state = state_of(build(4), 3, offload=Offload(params="nvme", path=path))
        return captured(train_step_of(build(4), num_microbatches), state, batch_of(), *schedule).gm


def fetches(gm):
    return [n for n in gm.graph.nodes if is_fetch(n)]


def test_each_unit_is_read_once_to_compute_and_once_to_update(tmp_path):
    assert len(fetches(graph_of(tmp_path))) == 4
    gm = graph_of(tmp_path, split_state_reads)
    where, found = positions(gm.graph), fetches(gm)
    update = [n for n in found if n.meta.get(UPDATE)]
    compute = [n for n in found if n not in update]
    assert len(update) == len(compute) == 4
    assert {n.all_input_nodes[0] for n in update} == {n.all_input_nodes[0] for n in compute}
    last_gather = max(where[n] for n in gm.graph.nodes if n.target is ops.all_gather.default)
    assert all(where[wait_of(n)] > last_gather for n in update)
    assert not any(u.target is ops.adamw.default for n in compute for u in wait_of(n).users)


def test_a_loop_reads_in_each_of_its_rounds(tmp_path):
    gm = graph_of(tmp_path, split_state_reads, num_microbatches=2)
    _, body = graphs_of(gm)
    assert len(fetches(body)) == 4 and all(n.meta.get(UPDATE) for n in fetches(gm))


def test_what_lies_in_memory_is_read_by_nobody():
    with fake_ranks(2):
        gm = captured(train_step_of(build(4)), state_of(build(4), 3), batch_of(), split_state_reads).gm
    assert fetches(gm) == []


@pytest.mark.part(num_microbatches=[2])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_steps_have_the_bits_of_memory(tmp_path, num_microbatches):
    away = Offload(params="nvme", path=tmp_path)
    (_, found), (_, expected) = (
        trained(4, 4, optim.adamw(1e-2), 2, num_microbatches=num_microbatches, offload=x) for x in (away, None)
    )
    assert_same_trees(found, expected)
