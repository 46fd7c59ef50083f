"""Steps that put a value where another lay, or read an old one again, when the state lies on drives."""

import dataclasses
import os
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import apart, batch_of, build, loss_of, ops, state_of
from zerofn import Offload, tree
from zerofn.offload.disk import Store, aligned
from zerofn.offload.drive_tensor import handle_of

LAYERS = 8  # units enough that some are read again for each part of the step
MODULE = build(LAYERS)
TIERS = [{"optimizer": "nvme"}, {"params": "nvme"}, {"optimizer": "nvme", "params": "nvme"}]


def kept(state, new, batch):
    return dataclasses.replace(new, extra=state.params), {}


def copied(state, new, batch):
    return dataclasses.replace(new, extra=new.params), {}


def swapped(state, new, batch):
    return dataclasses.replace(new, params=state.extra, extra=new.params), {}


def averaged(state, new, batch):
    return dataclasses.replace(new, extra=tree.tree_map(lambda p, q: (p + q) / 2, state.params, new.params)), {}


def again(state, new, batch):
    old = zerofn.global_norm(state.params), loss_of(MODULE)(zerofn.gather(state.params), batch)
    return new, {"old": old, "new": zerofn.global_norm(new.params)}


def results(change, on_nonfinite, precision, offload):
    """All that some steps return, and the state after them."""

    @zerofn.compile
    def step(state, batch):
        loss, grads = state.value_and_grad(loss_of(MODULE))(batch)
        new, aux = change(state, state.apply_gradients(grads, on_nonfinite=on_nonfinite), batch)
        return new, {"loss": loss, **aux}

    extra = {name: 0.5 * p.detach() for name, p in MODULE.named_parameters()}
    state, out = state_of(MODULE, 3, precision=precision, offload=offload, extra=extra), []
    rank = dist.get_rank() if dist.is_initialized() else 0
    for k in range(3):
        batch = tree.tree_map(lambda x: x if precision is None else x.bfloat16(), batch_of(rank, seed=k))
        state, aux = step(state, batch)
        out.append(aux)
    return out, zerofn.unshard(state)


def the_bits_of_memory(path, change, on_nonfinite, precision):
    run = partial(results, change, on_nonfinite, precision)
    expected = run(None)
    for tiers in TIERS:
        what = f"{change.__name__}, {on_nonfinite=}, {precision=}, {tiers}"
        assert_same_trees(run(Offload(path=path, **tiers)), expected, what)


@pytest.mark.part(on_nonfinite=["skip"], change=[swapped])
@pytest.mark.parametrize(("on_nonfinite", "precision"), [("skip", "bf16"), ("ignore", "bf16"), ("ignore", None)])
@pytest.mark.parametrize("change", [kept, copied, swapped, averaged, again])
def test_what_goes_to_another_place_has_the_bits_of_memory(tmp_path, change, on_nonfinite, precision):
    the_bits_of_memory(tmp_path, change, on_nonfinite, precision)


@pytest.mark.whole
@pytest.mark.part(change=[kept])
@pytest.mark.parametrize("change", [kept, again])
def test_moved_values_on_two_ranks_have_the_bits_of_memory(ranks, tmp_path, change):
    ranks(2, the_bits_of_memory, tmp_path, change, "ignore", "bf16")


@pytest.mark.part(tiers=[{"optimizer": "cpu"}])
@pytest.mark.parametrize("tiers", [{"optimizer": "cpu"}, {"params": "cpu"}])
def test_what_the_step_reads_of_the_new_state_the_host_does_not_update_aside(monkeypatch, tiers):
    """The host stands for a device beside it, as in `test_policy`."""
    expected = results(again, "skip", "bf16", None)
    apart(monkeypatch, 1.0)
    assert_same_trees(results(again, "skip", "bf16", Offload(**tiers)), expected)


@pytest.mark.parametrize("change", [kept, swapped])
def test_a_split_master_stays_split_where_a_plain_value_comes(change):
    """Float32 in `extra` and two halves in `params`: each is kept as what lay there."""
    step = zerofn.compile(lambda state, batch: change(state, state.replace(step=state.step + 1), batch))
    extra = {name: 0.5 * p.detach() for name, p in MODULE.named_parameters()}
    state = state_of(MODULE, 3, precision="bf16", extra=extra)
    before, storages = zerofn.unshard(state), (state.params.storages, state.extra.storages)
    state, _ = step(state, batch_of())
    after = zerofn.unshard(state)
    assert (state.params.storages, state.extra.storages) == storages
    assert_same_trees(after.extra, before.params)
    expected = before.extra if change is swapped else before.params
    assert_same_trees(after.params, expected)


def test_what_lies_in_the_state_may_be_written_to_while_it_goes_to_the_drive(tmp_path, monkeypatch):
    write = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *args: (time.sleep(0.1), write(*args))[1])
    size = 2048
    with Store(tmp_path, 4 * size, name="test") as store:
        handle = handle_of(region := store.allocate(4 * size, "a shard"))
        x = aligned(4 * size).view(torch.float32).copy_(torch.arange(size))
        ops.write_drive_(handle, x)
        x.zero_()
        store.read(region, found := aligned(4 * size)).wait()
        assert torch.equal(found.view(torch.float32), torch.arange(size, dtype=torch.float32))
