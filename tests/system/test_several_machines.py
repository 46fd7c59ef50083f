"""Jobs on several machines: over a real sshd, each machine with addresses of its own."""

import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.support.same import assert_same_trees
from tests.system.machines import environ

TRAIN = """
import os, socket, sys
import torch, zerofn
from zerofn import optim

def loss_fn(params, batch):
    return (torch.tanh(batch @ params["a"]) @ params["b"]).square().mean()

def init_state():
    g = torch.Generator().manual_seed(0)
    params = {"a": torch.randn(5, 7, generator=g), "b": torch.randn(7, 3, generator=g)}
    return zerofn.TrainState.create(params=params, tx=optim.adamw(1e-2))

def train_step(state, batch):
    loss, grads = state.value_and_grad(loss_fn)(batch)
    return state.apply_gradients(grads), {"loss": loss}

def train(steps=5):
    x = torch.randn(steps, 8, 5, generator=torch.Generator().manual_seed(1))
    state, step = zerofn.shard(init_state, stage=3), zerofn.compile(train_step)
    rows = x.chunk(zerofn.world_size(), 1)[zerofn.rank()]
    for batch in rows:
        state, _ = step(state, batch)
    return zerofn.unshard(state).params

if __name__ == "__main__":
    params = train()
    where = f"{zerofn.rank()} of {zerofn.world_size()} on {socket.gethostname()} {os.environ.get('WORD')}"
    sys.stdout.write(f"rank {where}\\n")  # at once: torchrun's ranks share one unbuffered line
    sys.stdout.flush()
    if zerofn.rank() == 0:
        torch.save(params, sys.argv[1])
"""
WAITS = """
import sys, time, zerofn
zerofn.Mesh.of(None).axis()
sys.stdout.write("a rank waits\\n")
sys.stdout.flush()
time.sleep(300)
"""


@pytest.fixture
def job(machines, tmp_path):
    """A hostfile of two machines with two slots each, and two scripts."""
    (tmp_path / "hosts").write_text("# both\nnode-a slots=2\nnode-b slots=2\n")
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "waits.py").write_text(WAITS)
    return tmp_path


@pytest.fixture
def on_this_machine(ranks):
    """The parameters of the same training on four ranks here."""
    return ranks(4, trained)[0]


def trained():
    names = {"__name__": "train"}
    exec(TRAIN, names)
    return names["train"]()


def ends(process, seconds=60):
    """What a program has printed once it has ended; it is killed when it does not."""
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"still there after {seconds} s; it said:\n{process.communicate()[0]}") from None


def nothing_is_left(machines, seconds=30):
    end = time.monotonic() + seconds
    while left := {name: pids for name in machines.names if (pids := machines.processes(name))}:
        assert time.monotonic() < end, f"{seconds} s later there are {left}"
        time.sleep(0.1)


def until(process, line, times):
    """Read what a program prints until a text has come so often."""
    lines = []
    while sum(line in x for x in lines) < times:
        lines.append(process.stdout.readline())
        assert lines[-1], "".join(lines)


def test_a_hostfile_of_two_machines(machines, job, on_this_machine):
    launched = machines.launch("--hostfile", f"{job}/hosts", f"{job}/train.py", f"{job}/out.pt", WORD="passed on")
    said = ends(launched)
    assert launched.returncode == 0, said
    ours = sorted(x for x in said.splitlines() if ": rank" in x)
    assert ours == [f"node-{'ab'[k // 2]}: rank {k} of 4 on node-{'ab'[k // 2]} passed on" for k in range(4)], said
    assert_same_trees(torch.load(job / "out.pt"), on_this_machine)
    nothing_is_left(machines)


def test_two_agents_of_torchrun(machines, job, on_this_machine):
    meet = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node-a:29500"]
    command = [sys.executable, "-m", "torch.distributed.run", *meet, f"{job}/train.py", f"{job}/out.pt"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    agents = [subprocess.Popen(machines.inside(x, *command), env=environ(), **pipes) for x in machines.names]
    said = [ends(x) for x in agents]
    assert [x.returncode for x in agents] == [0, 0], said
    assert_same_trees(torch.load(job / "out.pt"), on_this_machine)


def test_an_interrupt_ends_every_process_on_every_machine(machines, job):
    launched = machines.launch("--hostfile", f"{job}/hosts", f"{job}/waits.py")
    until(launched, "waits", 4)
    assert all(machines.processes(x) for x in machines.names)
    launched.send_signal(signal.SIGINT)
    ends(launched)
    assert launched.returncode
    nothing_is_left(machines)


def test_a_launcher_that_is_killed_ends_them_too(machines, job):
    launched = machines.launch("--hostfile", f"{job}/hosts", f"{job}/waits.py")
    until(launched, "waits", 4)
    launched.kill()
    nothing_is_left(machines)
    ends(launched)


def test_a_machine_that_cannot_be_reached_is_named_and_nothing_starts(machines, job):
    (job / "hosts").write_text("node-a slots=1\nnode-gone slots=1\n")
    launched = machines.launch("--hostfile", f"{job}/hosts", f"{job}/train.py", f"{job}/out.pt")
    said = ends(launched)
    assert launched.returncode and "node-gone cannot be reached: ssh: connect to host" in said, said
    assert "Traceback" not in said and not (job / "out.pt").exists()
    nothing_is_left(machines)


def test_a_cable_that_is_pulled(machines, job):
    """ssh says so after three signs of life that do not come, 30 s; the machine itself then ends what it ran."""
    launched = machines.launch("--hostfile", f"{job}/hosts", f"{job}/waits.py")
    until(launched, "waits", 4)
    subprocess.run(["ip", "link", "set", machines.link("node-b"), "down"], check=True)
    try:
        said = ends(launched, 90)
        assert launched.returncode and "node-b" in said, said
    finally:
        subprocess.run(["ip", "link", "set", machines.link("node-b"), "up"], check=True)
    nothing_is_left(machines, 90)


def test_a_choice_of_slots(machines, job):
    words = ["--hostfile", f"{job}/hosts", "--include", "node-b:1", f"{job}/train.py", f"{job}/out.pt"]
    launched = machines.launch(*words)
    said = ends(launched)
    assert launched.returncode == 0 and "node-b: rank 0 of 1 on node-b" in said and "node-a:" not in said, said


MEASURES = """
import sys, time
import torch, zerofn
from zerofn import optim
from train import loss_fn, train_step

found = zerofn.this_machine()

def init_state():
    params = {"a": torch.ones(512, 1024), "b": torch.ones(1024, 512)}
    return zerofn.TrainState.create(params=params, tx=optim.sgd(1e-9))

state, step = zerofn.shard(init_state, stage=3), zerofn.compile(train_step, machine=found)
batch = torch.ones(4, 512)
took = step.lower(state, batch).timeline(found).seconds
state, _ = step(state, batch)
times = []
for _ in range(5):
    begin = time.perf_counter()
    state, _ = step(state, batch)
    times.append(time.perf_counter() - begin)
if zerofn.rank() == 0:
    sys.stdout.write(f"rate {found.link} latency {found.latency} predicted {took} measured {sorted(times)[2]}\\n")
"""


def test_a_slow_cable_is_measured_and_steps_over_it_are_predicted(machines, job):
    (job / "hosts").write_text("node-a slots=1\nnode-b slots=1\n")
    (job / "measures.py").write_text(MEASURES)
    with machines.limited(25e6):
        launched = machines.launch("--hostfile", f"{job}/hosts", f"{job}/measures.py")
        said = ends(launched)
    assert launched.returncode == 0, said
    words = next(x for x in said.splitlines() if ": rate" in x).split()[1:]
    found = dict(zip(words[::2], map(float, words[1::2]), strict=True))
    assert 0.9 * 25e6 < found["rate"] <= 25e6, found
    assert 0.8 < found["predicted"] / found["measured"] < 1.25, found
