"""Signs of life, and messages that survive the rank that holds the store."""

import os
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from benchmarks.checkpoint import chaos
from benchmarks.common.processes import free_port
from tests.support.library import ROOT
from zerofn.job import agreement, heartbeat
from zerofn.job.failures import store_of_job

pytestmark = pytest.mark.slow  # programs in processes of their own

JOB = """
import os, sys, time, torch, zerofn
from zerofn import optim

how = sys.argv[1]

def train_step(state, batch):
    grads, loss = torch.func.grad_and_value(lambda p: (zerofn.gather(p)["w"] * batch).square().mean())(state.params)
    return state.apply_gradients(grads), loss

def loader():
    for k in range(100):
        if k == 3 and how == "frozen" and os.environ["RANK"] == sys.argv[2]:
            os.kill(os.getpid(), 19)
        if k == 3 and how != "frozen" and os.environ["RANK"] == "0":
            if how == "killed":
                os.kill(os.getpid(), 9)
            raise ValueError("shard 17 of the data is unreadable")
        yield torch.ones(7)

init = lambda: zerofn.TrainState.create(params={"w": torch.ones(7)}, tx=optim.adamw(1e-2))
state, step = zerofn.shard(init, stage=3), zerofn.compile(train_step)
for k, batch in enumerate(loader()):
    if how == "agreeing":
        zerofn.job.agreement.agree("batch", "x")
    state, _ = step(state, batch)
    if how == "frozen" and sys.argv[3] and k == 0:
        if os.environ["RANK"] == sys.argv[2]:
            zerofn.checkpoint.tensor_file._write = lambda *_: time.sleep(60)
        zerofn.save(sys.argv[3], state, wait=False)
"""


def run(how, size=2, which=0, saves="", **more):
    """Ranks without a launcher that would hold the store; what each has printed but a frozen one."""
    port, jobs = str(free_port()), []
    for rank in range(size):
        environ = {
            **os.environ,
            **more,
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_RANK": str(rank),
            "OMP_NUM_THREADS": "1",
        }
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-c", JOB, how, str(which), str(saves)]
        jobs.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    heard = [job for r, job in enumerate(jobs) if how != "frozen" or r != which]
    try:
        return [job.communicate(timeout=60)[1] for job in heard]
    finally:
        for job in jobs:
            job.kill()
            job.communicate()


@pytest.mark.parametrize("how", ["training", "agreeing"])
@pytest.mark.whole
def test_what_rank_0_said_is_heard_though_the_store_ends_with_it(how):
    first, second = run(how)
    assert "ValueError: shard 17 of the data is unreadable" in first
    assert "another rank failed. rank 0: ValueError: shard 17 of the data is unreadable" in second


@pytest.mark.whole  # test_pipelines.py ends rank 0, too, beside the store
def test_rank_0_that_is_killed():
    _, second = run("killed")
    assert "stopped, because another rank has ended" in second
    assert "RuntimeError: stopped" in second  # a thread of torch's may print its stack after it


SILENT = [
    "the job's store did not answer for 2 s: rank 0, which holds it, or the launcher is frozen, has ended",
    "rank 1 gave no sign of life for 2 s. It is frozen, was killed, or its machine is gone.",
]


@pytest.mark.whole
@pytest.mark.parametrize("which, saves", [(0, False), (1, True)])
def test_a_rank_that_is_frozen_in_a_step(tmp_path, which, saves):
    """Its connections are open, so only its silence tells; a thread that saves may be the first to find it."""
    start = time.monotonic()
    for text in run("frozen", 3, which, tmp_path / "a" if saves else "", ZEROFN_PATIENCE="2"):
        assert "RuntimeError: stopped, because another rank failed. " in text
        assert SILENT[which] in text and "terminate called" not in text
    assert time.monotonic() - start < 40


AGREEING = """
import os, torch, zerofn
from zerofn.job import agreement

zerofn.shard({"params": {"w": torch.ones(7)}})
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), 19)
    agreement.agree("a step", "x")
agreement.agree("the second attempt", "")
"""


@pytest.mark.whole
def test_torchrun_does_not_wait_for_a_frozen_rank_that_others_wait_for_in_an_agreement(tmp_path):
    (tmp_path / "job.py").write_text(AGREEING)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    command += ["--max-restarts", "1", "--monitor-interval", "0.1", str(tmp_path / "job.py")]
    environ = chaos.environment() | {"ZEROFN_PATIENCE": "2"}
    start = time.monotonic()
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "rank 1 gave no sign of life for 2 s" in done.stderr, done.stderr[-2000:]
    assert "is killed." in done.stderr
    assert time.monotonic() - start < 28  # torchrun itself waits for 30 s before it kills a rank


def beating():
    agreement.agree("here", "")
    beats = heartbeat.heartbeat()
    found = [[x.name for x in threading.enumerate()].count("zerofn-heartbeat")]
    sign = heartbeat.Sign(store_of_job(), 1 - dist.get_rank())
    time.sleep(1.2 * heartbeat.SECONDS)
    sign.look()
    found.append(sign.silent < heartbeat.SECONDS)
    with beats.at_work("writing"), beats.at_work("flushing"):
        agreement.agree("both write", "")
        sign.look()
        found.append(sign.doing)
        agreement.agree("both have looked", "")
    agreement.agree("both are done", "")
    sign.look()
    found.append(sign.doing)
    dist.destroy_process_group()
    end = time.monotonic() + 3 * heartbeat.SECONDS
    while time.monotonic() < end and any(x.name == "zerofn-heartbeat" for x in threading.enumerate()):
        time.sleep(0.05)
    return [*found, [x.name for x in threading.enumerate()].count("zerofn-heartbeat")]


def test_a_thread_beats_as_long_as_its_group_is_there(ranks):
    assert ranks(2, beating) == [[1, True, "flushing", "", 0]] * 2
    ranks.stop()


def test_one_process_has_none():
    heartbeat.heartbeat().start()
    with heartbeat.heartbeat().at_work("alone"):
        assert not any(x.name == "zerofn-heartbeat" for x in threading.enumerate())
    heartbeat.wait_until_heard(1.0)
