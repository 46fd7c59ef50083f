"""How often a step blocks the host until the device has come so far: never, without drives.

A real step is run on torch's `meta` device, which has no values: who asks for one (`.item()`, an `if`, a size that
depends on data) fails. Copies to and from the host are events, and who waits for one on the host is counted.
"""

import threading

import pytest
import torch
import torch._functorch.config

import zerofn
from tests.support.captured_steps import masked_batch, masked_step
from tests.support.on_meta import DEVICE, scheduled
from tests.support.small_steps import apart, build, state_of
from tests.support.tiered_steps import TIERS, TX
from zerofn import optim, tree
from zerofn.graph.node_kinds import ASIDE
from zerofn.offload import copy_engine, host_tensor
from zerofn.offload.host_worker import HostWorker, worker
from zerofn.runtime.buffers import Buffers
from zerofn.runtime.executor import Executor
from zerofn.util.process import instead

HOST = {"optimizer": "cpu"}
ALL_ON_HOST = {"optimizer": "cpu", "params": "cpu"}


@pytest.fixture(autouse=True)
def fakes_on_meta():
    with torch._functorch.config.patch(fake_tensor_allow_meta=True):
        yield


class Event:
    """A copy; `waited`: the threads that have blocked until it was done."""

    waited: list = []

    def synchronize(self):
        self.waited.append(threading.current_thread())


class Stream:
    def wait_event(self, event):
        pass


@pytest.fixture
def blocked(monkeypatch):
    """The threads that wait for a device whose copies are events."""
    for module in (copy_engine, host_tensor):
        monkeypatch.setattr(module, "has_streams", lambda device: device == DEVICE)
    monkeypatch.setattr(copy_engine.CopyEngine, "copy", lambda self, out, x, device, waited=False: Event())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(host_tensor, "like", lambda x, device: torch.ones_like(x, device="cpu"))
    monkeypatch.setattr(Event, "waited", [])
    with instead(HostWorker()), instead(copy_engine.CopyEngine()):
        yield Event.waited
        worker().finish()


def run(program, num_steps):
    gm, buffers = program.gm, Buffers(program)
    buffers.bind(gm)
    step = Executor(gm)
    given = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    state = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in given]
    Event.waited.clear()  # capture may
    for _ in range(num_steps):
        step.run(list(state))


@pytest.mark.part(tiers=[None], share=[0.0], precision=["bf16"], num_microbatches=[2])
@pytest.mark.part(tiers=[ALL_ON_HOST], share=[1.0])
@pytest.mark.parametrize("tiers", [None, HOST, ALL_ON_HOST], ids=str)
@pytest.mark.parametrize(
    ("precision", "tx", "on_nonfinite", "num_microbatches"),
    [
        (None, TX, "ignore", 1),
        ("bf16", TX, "skip", 2),
        ("fp16", optim.adamw(1e-2), "skip", 1),
        ("bf16", optim.lamb(1e-2), "skip", 1),
    ],
)
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_nothing_blocks(tmp_path, monkeypatch, blocked, tiers, precision, tx, on_nonfinite, num_microbatches, share):
    program = scheduled(tmp_path, tiers, precision, tx, on_nonfinite, share, monkeypatch, 3, num_microbatches)
    run(program, 3)
    me = threading.current_thread()
    assert me not in blocked
    worker().finish()
    aside = any(n.meta.get(ASIDE) for n in program.gm.graph.nodes)  # the thread for updates waits for gradients
    assert any(x is not me for x in blocked) == aside
    assert aside or not tiers or not share or tx is not TX


@pytest.mark.parametrize("tier", ["device", "host", "host, parameters"])
def test_a_call_does_not_finish_the_updates_of_the_one_before(tmp_path, monkeypatch, tier):
    """Though whoever looks at the state does."""
    apart(monkeypatch, 1.0)
    finished, finish = [], HostWorker.finish
    monkeypatch.setattr(
        HostWorker, "finish", lambda worker: finished.append(threading.current_thread()) or finish(worker)
    )
    step, state = zerofn.compile(masked_step(build(3), 1)), state_of(build(3), 3, TX, offload=TIERS[tier](tmp_path))
    for k in range(4):
        state, _ = step(state, masked_batch(k, 8))
        assert k == 0 or not finished
        finished.clear()
    tree.leaves(state)
    assert finished


def test_a_value_that_is_asked_for_is_found(tmp_path, monkeypatch, blocked):
    program = scheduled(tmp_path, None, None, TX, "skip", 0.0, monkeypatch)
    (finite,) = (n for n in program.gm.graph.nodes if n.target is torch.ops.aten.all.default)
    with program.gm.graph.inserting_after(finite):
        program.gm.graph.call_function(bool, (finite,))
    with pytest.raises(RuntimeError, match="meta"):
        run(program, 1)
