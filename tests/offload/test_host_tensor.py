"""Tiers beside a device that is not the host, captured without one: torch's `meta` device stands for it, so that
tensors of two places in one operation are an error; and the thread that updates on the host."""

import contextlib
import itertools
import threading
import time

import pytest
import torch
import torch._functorch.config

import zerofn
from tests.support import on_meta
from tests.support.on_meta import DEVICE, scheduled
from tests.support.small_steps import WIDTH
from zerofn import optim, tree
from zerofn.graph.node_kinds import ASIDE
from zerofn.graph.resident import queued
from zerofn.memory import pinned
from zerofn.memory.host_allocator import in_huge_pages
from zerofn.memory.pinned import PageLocked
from zerofn.offload.copy_engine import CopyEngine
from zerofn.offload.host_worker import BEHIND, HostWorker
from zerofn.util.process import instead

ops = torch.ops.zerofn
CLIPPED = optim.chain(optim.clip_by_global_norm(0.05), optim.adamw(1e-2, weight_decay=0.1))
SCHEDULED = optim.adamw(optim.warmup_cosine_decay_schedule(0.0, 1e-2, 3, 10))
TIERS = [
    None,
    *(
        {name: tier for name, tier in (("optimizer", a), ("params", b)) if tier}
        for a in ("cpu", "nvme", None)
        for b in ("cpu", "nvme", None)
        if a or b
    ),
]


@pytest.fixture(autouse=True)
def fakes_on_meta():
    with torch._functorch.config.patch(fake_tensor_allow_meta=True):
        yield


def mixed(gm):
    """Operations of one place that are given tensors of two. Torch raises for its own while they are run on fakes."""
    values, found = {}, []
    with next(n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder").fake_mode:
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                values[node] = node.meta["val"]
            elif node.op == "call_function":
                args, kwargs = (torch.fx.node.map_arg(x, values.__getitem__) for x in (node.args, node.kwargs))
                given = [x for x in tree.leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.dim()]
                if (
                    node.target not in (ops.put_.default, ops.write_drive_.default)
                    and len({x.device for x in given}) > 1
                ):
                    found.append(node)
                values[node] = node.target(*args, **kwargs)
    return found


@pytest.mark.part(precision=["fp16"], tiers=TIERS[2:3])
@pytest.mark.part(precision=["bf16"], tiers=TIERS[4:5], on_nonfinite=["skip"])
@pytest.mark.parametrize("tiers", TIERS, ids=str)
@pytest.mark.parametrize(
    ("precision", "tx", "on_nonfinite"),
    [
        ("bf16", CLIPPED, "skip"),
        ("bf16", SCHEDULED, "ignore"),
        ("fp32", optim.lamb(1e-2), "skip"),
        ("fp16", optim.adamw(1e-2, moments="8bit"), "skip"),
    ],
)
def test_every_operation_has_its_tensors_in_one_place(tmp_path, monkeypatch, tiers, precision, tx, on_nonfinite):
    for share in (0.0, 1.0) if tiers else (0.0,):
        assert mixed(scheduled(tmp_path, tiers, precision, tx, on_nonfinite, share, monkeypatch).gm) == []


def of_several_sizes(num_layers):
    """Half of the layers have parameters of 10 pages, the others of a part of a page; two lie in between."""
    sizes = [WIDTH, *[100] * (num_layers // 2), *[WIDTH] * (num_layers - num_layers // 2)]
    return torch.nn.Sequential(*[torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes)])


@pytest.mark.part(num_layers=[2])
@pytest.mark.parametrize("num_layers", [2, 7, 20])
@pytest.mark.parametrize("tx", [CLIPPED, SCHEDULED])
def test_what_waits_on_the_host_for_its_update_is_counted(tmp_path, monkeypatch, tx, num_layers):
    """Gradients and parameters, as many as queue for a thread that does nothing until it holds the next one back, in
    page-locked memory that is handed out again for the same size only.
    """
    monkeypatch.setattr(on_meta, "build", of_several_sizes)
    monkeypatch.setattr(pinned, "_locked", lambda nbytes, index: in_huge_pages(pinned._Mapped, nbytes))
    pool, device = PageLocked(), torch.device("cuda", 0)
    gm = scheduled(tmp_path, {"optimizer": "cpu"}, None, tx, "ignore", 1.0, monkeypatch, num_layers).gm
    jobs, there = [], {}  # there: last job -> memory
    for turn, node in itertools.product(range(3), gm.graph.nodes):
        if node.target is ops.bring.default and node.args[1].type == "cpu" and node.meta["val"].dim():
            while len(jobs) > BEHIND:
                there.pop(jobs.pop(0), None)
            last = list(next(iter(node.users)).users)[-1]  # who updates with it, or copies it back
            there.setdefault((turn, last), []).append(pool.take(node.meta["val"].nbytes, device))
        if node.meta.get(ASIDE):
            jobs.append((turn, node))
    assert sum(n * times for n, times in queued(gm).items()) == pool.nbytes > 0


def test_what_lies_on_a_drive_is_updated_on_the_host(tmp_path, monkeypatch):
    """Reads for updates stay on the host. A gradient that waits for the finite check goes to the drive at once, and the
    thread for updates waits until the device has sent it.
    """
    gm = scheduled(tmp_path, {"optimizer": "nvme"}, "bf16", CLIPPED, "skip", 0.0, monkeypatch).gm
    nodes = list(gm.graph.nodes)
    assert {n.args[4].type for n in nodes if n.target is ops.fetch.default} == {"cpu"}
    norm = [k for k, n in enumerate(nodes) if n.target is ops.part_numbers.default]
    offloaded = [
        k
        for k, n in enumerate(nodes)
        if n.target is ops.write_drive_.default and n.args[0].target is ops.drive_handle.default
    ]
    assert len(offloaded) == 2 and max(offloaded) < norm[-1]
    for write in map(nodes.__getitem__, offloaded):
        (copy,) = (x for x in write.args[1].users if x is not write)
        assert all(x.meta.get(ASIDE) for x in (write, copy, copy.args[1])) and not write.args[1].meta.get(ASIDE)
        assert copy.args[1].target is ops.wait.default and copy.args[1].args[0].target is ops.bring.default


def test_numbers_of_a_state_lie_with_its_parameters(monkeypatch):
    """Where the parameters say where a model computes, counters that were made on the host go there, too."""
    monkeypatch.setattr(zerofn.sharding.shard, "device_of", lambda state: DEVICE)
    plain = zerofn.TrainState.create(params={"w": torch.zeros(64)}, tx=optim.adamw(1e-2), extra=torch.ones(3))
    state = zerofn.shard(plain)
    assert state.opt_state.count.device.type == state.skipped.device.type == "meta"
    assert state.step.device.type == state.rng.device.type == state.extra.device.type == "cpu"


# --- the update thread -----------------------------------------------------------------------------------------------


def test_gradients_wait_for_a_thread_that_is_behind():
    worker, done = HostWorker(), []
    for k in range(BEHIND + 6):
        worker.submit(lambda k=k: (time.sleep(0.002), done.append(k)))
    worker.hold_back()
    assert done[:6] == list(range(6)) and len(worker.jobs) <= BEHIND
    worker.finish()
    assert done == list(range(BEHIND + 6))


def test_a_failure_aside_is_told_once_and_nothing_after_it_is_done():
    """Also of what waits for its turn when it is told: that has results of others as arguments, which never were."""
    worker, began, done = HostWorker(), threading.Event(), []

    def broken():
        began.wait()
        raise ValueError("no more memory")

    first = worker.submit(broken)
    later = [worker.submit(done.append, k) for k in range(3)]
    began.set()
    with pytest.raises(ValueError, match="no more memory"):
        worker.tell(first)
    assert all(x.done() for x in later) and not done
    worker.submit(done.append, 5)
    worker.finish()
    assert done == [5]


def test_the_host_does_not_write_what_is_still_being_copied():
    waited, x = [], torch.zeros(4)

    class Event:
        def synchronize(self):
            waited.append(x.clone())

    with instead(CopyEngine()) as copies, instead(HostWorker()) as worker:
        copies.leaving[x.data_ptr()] = Event()
        worker.submit(torch.Tensor.add_, x, 1)
        worker.finish()
    assert torch.equal(waited[0], torch.zeros(4)) and torch.equal(x, torch.ones(4))


def test_jobs_run_on_the_stream_of_their_caller(monkeypatch):
    """A new thread has the first device's default stream."""
    entered = []

    @contextlib.contextmanager
    def stream(x):
        entered.append((x, threading.current_thread().name))
        yield

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the caller's")
    monkeypatch.setattr(torch.cuda, "stream", stream)
    with instead(HostWorker()) as worker:
        assert worker.submit(sum, [1, 2]).result() == 3
    assert [x for x, _ in entered] == ["the caller's"] and entered[0][1].startswith("zerofn update")
