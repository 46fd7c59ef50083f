"""Gradients that wait for the finite check, or for their norm, wait on the drive where their state lies."""

import pytest
import torch

from tests.support.same import assert_same_trees
from tests.support.small_steps import ROWS, batch_of, build, fake_ranks, loss_of, scheduled, state_of, trained
from zerofn import Offload, optim
from zerofn.graph.alias import positions
from zerofn.graph.node_kinds import argument, start_of

ops = torch.ops.zerofn
NORMED = optim.chain(optim.clip_by_global_norm(0.05), optim.adamw(1e-2))
NUM_LAYERS, IN_MEMORY = 6, 2


def graph_of(offload, tx=NORMED, on_nonfinite="skip"):
    module = build(NUM_LAYERS)

    def train_step(state, batch):
        loss, grads = state.value_and_grad(loss_of(module))(batch)
        return state.apply_gradients(grads, on_nonfinite=on_nonfinite), loss

    with fake_ranks(2):
        return scheduled(train_step, state_of(module, 3, tx, offload=offload), batch_of(), donating=True).gm


def rules(gm):
    return [n for n in gm.graph.nodes if n.target is ops.adamw_.default]


def read_again(gm):
    """The updates whose gradient is read from a drive, and the handles of its places there."""
    starts = {rule: start_of(argument(rule, "g")) for rule in rules(gm)}
    return {rule: start.args[0] for rule, start in starts.items() if start and start.target is ops.fetch.default}


@pytest.mark.part(tiers=[{"optimizer": "nvme", "params": "nvme"}])
@pytest.mark.parametrize("tiers", [{"optimizer": "nvme"}, {"optimizer": "nvme", "params": "nvme"}])
def test_all_but_the_first_updates_gradients_wait_on_the_drive(tmp_path, tiers):
    gm = graph_of(Offload(**tiers, path=tmp_path))
    assert list(read_again(gm)) == rules(gm)[IN_MEMORY:] and len(rules(gm)) == NUM_LAYERS


def test_a_gradient_is_written_before_the_check_is_complete(tmp_path):
    gm = graph_of(Offload(optimizer="nvme", path=tmp_path))
    where, handles = positions(gm.graph), set(read_again(gm).values())
    writes = [n for n in gm.graph.nodes if n.target is ops.write_drive_.default and n.args[0] in handles]
    assert len(writes) == len(handles) == NUM_LAYERS - IN_MEMORY
    assert max(where[n] for n in writes) < where[rules(gm)[0]]


def test_gradients_that_wait_for_no_check_stay(tmp_path):
    assert not read_again(graph_of(Offload(optimizer="nvme", path=tmp_path), optim.adamw(1e-2), "ignore"))


def test_what_belongs_to_state_in_memory_stays():
    assert not read_again(graph_of(None))


@pytest.mark.part(precision=["bf16"])
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_steps_have_the_bits_of_memory(tmp_path, precision):
    away = Offload(optimizer="nvme", path=tmp_path)
    (_, found), (_, expected) = (
        trained(NUM_LAYERS, ROWS, NORMED, 3, precision=precision, offload=x) for x in (away, None)
    )
    assert_same_trees(found, expected)
