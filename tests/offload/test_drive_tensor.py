"""Old values that are asked for late, returned or kept: what is on a drive has the bits of what lies in memory."""

import contextlib
import dataclasses
import threading

import pytest
import torch
from torch.func import functional_call

import zerofn
from tests.support.same import assert_same_trees
from tests.support.small_steps import (
    WIDTH,
    Normed,
    batch_of,
    build,
    captures_of,
    fake_ranks,
    loss_of,
    scheduled,
    state_of,
    train_step_of,
    unit_of,
)
from zerofn import Offload, optim, tree
from zerofn.comm.transport import wait_
from zerofn.graph.node_kinds import UPDATE, is_fetch
from zerofn.job.in_flight import pending
from zerofn.memory.arena import Arena
from zerofn.offload import drive_tensor
from zerofn.offload.disk import pages, scratch_space
from zerofn.offload.drive_tensor import DriveTensor
from zerofn.offload.host_worker import HostWorker
from zerofn.sharding.allocate import HELD, Filler
from zerofn.util.process import instead

TIERS = [{"params": "nvme"}, {"params": "nvme", "optimizer": "nvme"}]


def with_extra(module, **options):
    """A state whose `extra` is laid out as its parameters are."""
    extra = {name: p.detach().clone() for name, p in module.named_parameters()}
    return state_of(module, 3, optim.adamw(1e-2), extra=extra, **options)


def three_steps(state, step):
    """What they return, cloned at once and as it is at the end, and the state."""
    run, given, copied = zerofn.compile(step), [], []
    for k in range(3):
        state, aux = run(state, batch_of(seed=k))
        given.append(aux)
        copied.append(tree.tree_map(torch.clone, aux))
    return tree.leaves(copied), tree.leaves(given), tree.leaves(zerofn.unshard(state))


def same_as_in_memory(path, tiers, step, make):
    ours = three_steps(make(offload=Offload(path=path, **tiers)), step)
    theirs = three_steps(make(), step)
    assert all(len(a) == len(b) and all(map(torch.equal, a, b)) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.part(tiers=TIERS[1:2], on_nonfinite=["skip"])
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("on_nonfinite", ["skip", "ignore"])
def test_old_values_that_are_read_after_the_update(tmp_path, tiers, on_nonfinite):
    """The write of a unit waits for all who read what was there."""
    module = build(8)

    def step(state, batch):
        loss, grads = state.value_and_grad(loss_of(module))(batch)
        old = zerofn.gather(state.params)
        norms = torch.stack([x.square().sum() * (1 + loss) for x in old.values()])
        return state.apply_gradients(grads, on_nonfinite=on_nonfinite), {"norms": norms}

    same_as_in_memory(tmp_path, tiers, step, lambda **options: state_of(module, 3, **options))


@pytest.mark.quick(tiers=TIERS[1:2])
@pytest.mark.parametrize("tiers", TIERS)
def test_old_values_that_are_returned(tmp_path, tiers):
    """They lie in memory of their own: the arena that drives read to is used again by the next step."""
    module = build(6)

    def step(state, batch):
        loss, grads = state.value_and_grad(loss_of(module))(batch)
        return state.apply_gradients(grads), {"old": zerofn.gather(state.params), "loss": loss}

    same_as_in_memory(tmp_path, tiers, step, lambda **options: state_of(module, 3, **options))


@pytest.mark.parametrize("what", [lambda state, _: state.params.shards, lambda state, _: zerofn.gather(state.params)])
def test_what_an_evaluation_returns_stays(tmp_path, what):
    module = build(6)
    state, read = state_of(module, 3, offload=Offload(params="nvme", path=tmp_path)), zerofn.compile(what)
    found = tree.leaves(read(state, {}))
    copied = [x.clone() for x in found]
    state, _ = zerofn.compile(train_step_of(module))(state, batch_of())
    after = tree.leaves(read(state, {}))
    assert all(map(torch.equal, found, copied)) and not all(map(torch.equal, found, after))


@pytest.mark.part(tiers=TIERS[1:2], on_nonfinite=["skip"], kept=["swapped"])
@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("on_nonfinite", ["skip", "ignore"])
@pytest.mark.parametrize("kept", ["old", "new", "swapped"])
def test_an_entry_that_becomes_another(tmp_path, tiers, on_nonfinite, kept):
    """Each has its own place on the drive, whichever comes first in the state."""
    module = build(4)

    def step(state, batch):
        _, grads = state.value_and_grad(loss_of(module))(batch)
        new = state.apply_gradients(grads, on_nonfinite=on_nonfinite)
        if kept == "swapped":
            return state.replace(params=state.extra, extra=state.params), {}
        return dataclasses.replace(new, extra=(state if kept == "old" else new).params), {}

    same_as_in_memory(tmp_path, tiers, step, lambda **options: with_extra(module, **options))


@pytest.mark.part(stage=[3])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("on_nonfinite", ["skip", "ignore"])
def test_a_loop_over_microbatches_with_running_values(tmp_path, stage, on_nonfinite):
    """Their mean is made at the end of the step, long after the first state was read for its update."""
    module = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), Normed(), torch.nn.Linear(WIDTH, WIDTH))
    params, running = dict(module.named_parameters()), dict(module.named_buffers())

    def loss_fn(params, batch):
        values = {name: x.clone() for name, x in running.items()}
        out = functional_call(module, (params, values), (batch["x"],))
        return (out - batch["y"]).square().mean(), values

    def step(state, batch):
        (_, values), grads = zerofn.accumulate(state.value_and_grad(loss_fn, has_aux=True), 2)(batch)
        new = {name: x[-1] if x.is_floating_point() else state.extra[name] for name, x in values.items()}
        return state.apply_gradients(grads, on_nonfinite=on_nonfinite, extra=new), {}

    with fake_ranks(2):
        plain = zerofn.TrainState.create(params=params, tx=optim.adamw(1e-2), extra=running)
        state = zerofn.shard(plain, stage, unit=unit_of, offload=Offload(optimizer="nvme", path=tmp_path))
        nodes = list(scheduled(step, state, batch_of(rows=8), donating=True).gm.graph.nodes)
    rules = [k for k, n in enumerate(nodes) if n.target is torch.ops.zerofn.adamw_.default]
    reads = [k for k, n in enumerate(nodes) if is_fetch(n) and n.meta.get(UPDATE)]
    assert len(reads) >= 2 * len(rules) and reads[0] < rules[0] and reads[-1] < rules[-1]


def test_steps_share_the_memory_that_drives_read_to_and_the_places_where_gradients_wait(tmp_path):
    """For another shape of the batch, and for another step, no second arena and no more space on the drive."""
    module = build(6)
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))
    state = state_of(module, 3, tx, offload=Offload(optimizer="nvme", params="nvme", path=tmp_path))
    steps = [zerofn.compile(train_step_of(module)) for _ in range(2)]
    batch = batch_of()
    for step in steps:
        for few in (batch, {k: x[:3] for k, x in batch.items()}):
            state, _ = step(state, few)
    made = [entry.buffers for step in steps for entry in captures_of(step)]
    assert len(made) == 4
    assert len({id(x.regions) for x in made}) == 1 and len(made[0].regions)
    drives = [x for x in made[0].arenas if x.device is None]
    assert len(drives) == 1 and all(drives[0] in x.arenas for x in made)


def test_units_are_not_held_until_all_their_leaves_are_there(tmp_path, monkeypatch):
    """Constants are made first, of all layers: what is held meanwhile does not grow with their number."""
    held = []
    write = Filler.write
    monkeypatch.setattr(Filler, "write", lambda self, *args: (write(self, *args), held.append(len(self._held))))

    def init():
        layers = [m for _ in range(6) for m in (torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WIDTH))]
        params = {f"{k // 2}.{k % 2}.{n}": p for k, m in enumerate(layers) for n, p in m.named_parameters()}
        return zerofn.TrainState.create(params=params, tx=optim.adamw(1e-2))

    def state(**options):
        torch.manual_seed(0)
        return zerofn.shard(init, precision="bf16", unit=unit_of, **options)

    ours, theirs = state(offload=Offload(params="nvme", path=tmp_path)), state()
    assert 0 < max(held) <= HELD
    assert_same_trees(zerofn.unshard(ours), zerofn.unshard(theirs))
    assert " on drives" in repr(state(offload=Offload(optimizer="nvme", path=tmp_path)))


def test_what_was_read_is_written_from_where_it_is(tmp_path, monkeypatch):
    """Other values, which fill no pages, are copied. Either way a region has what was written last."""
    store, size, made = scratch_space((str(tmp_path),), pages(4 * 3000)), 3000, []
    region = store.allocate(4 * size, "x")
    x = DriveTensor(drive_tensor.handle_of(region), torch.float32, size)
    aligned = drive_tensor.aligned
    monkeypatch.setattr(drive_tensor, "aligned", lambda nbytes: (made.append(nbytes), aligned(nbytes))[1])
    held = x.load()
    assert not held.any()
    x.save(held.copy_(torch.arange(size)))
    assert made == [4 * size] and torch.equal(x.load(), torch.arange(size).float())
    in_pages = aligned(8 * size).view(torch.int64)
    for other in (torch.randn(size), torch.randn(2 * size)[::2], in_pages[:size].random_(9)):
        made.clear()
        x.save(other)
        assert made == [4 * size] and torch.equal(x.load(), other.float())
    store.close()


@pytest.mark.parametrize("fails", [False, True])
def test_who_needs_what_the_thread_for_updates_writes_waits(tmp_path, fails):
    """The next read of the drive, and the next who gets the memory that is written from."""
    size, began = 3000, threading.Event()
    arena, store = Arena(pages(4 * size)), scratch_space((str(tmp_path),), pages(4 * size))
    handle = drive_tensor.handle_of(region := store.allocate(4 * size, "gradient"))

    def arrives(x):
        began.wait()
        if fails:
            raise ValueError("no gradient")
        return x.fill_(7)

    with instead(HostWorker()) as worker:
        x = drive_tensor.drive_buffer(size, torch.float32, [arena.number, 0])
        worker.submit(arrives, x)
        drive_tensor.aside_write_drive_(handle, x)
        threading.Timer(0.05, began.set).start()
        with pytest.raises(ValueError, match="no gradient") if fails else contextlib.nullcontext():
            arena.part(0, 64).fill_(0)  # once it was written
            assert began.is_set()
            found = wait_(drive_tensor.fetch(handle, size, torch.float32, [], torch.device("cpu")))
        pending().wait_for_all()
    assert fails or found.eq(7).all()
    assert region.store is store
