"""Under torchrun's elastic agents: when a machine is gone the others go on, from the last step that was saved."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from benchmarks.checkpoint import chaos
from benchmarks.common.processes import free_port
from zerofn.checkpoint import steps

UNTIL = 1000


def agent(folder, port, host):
    """A machine of one rank that takes part in a job of one or two."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    command += [
        "--rdzv-conf",
        f"is_host={int(host)},last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=2",
    ]
    command += ["--max-restarts", "5", "--monitor-interval", "0.1", "--local-addr", "127.0.0.1"]
    command += ["-m", "benchmarks.checkpoint.training", str(folder), "--until", str(UNTIL)]
    with (folder / f"printed-{int(host)}.txt").open("w") as out:
        return subprocess.Popen(command, env=chaos.environment(), stdout=out, stderr=subprocess.STDOUT)


def ranks_at(folder, step):
    return json.loads((steps.path_of(folder / "checkpoints", step) / "manifest.json").read_text())["world_size"]


def saved_by_two(folder):
    found = steps.complete_steps(folder / "checkpoints")
    return bool(found) and ranks_at(folder, found[-1]) == 2


@pytest.mark.whole
def test_a_machine_that_is_gone(tmp_path):
    port = free_port()
    agents = [agent(tmp_path, port, host) for host in (True, False)]
    try:
        end = time.monotonic() + 90
        while not saved_by_two(tmp_path) and time.monotonic() < end:
            time.sleep(0.05)
        assert saved_by_two(tmp_path), (tmp_path / "printed-1.txt").read_text()[-2000:]
        for pid in (agents[1].pid, *chaos.children(agents[1].pid)):
            os.kill(pid, signal.SIGKILL)
        killed = time.time()
        assert agents[0].wait(120) == 0, (tmp_path / "printed-1.txt").read_text()[-2000:]
    finally:
        for each in agents:
            for pid in (each.pid, *chaos.children(each.pid)):
                chaos.send(pid, signal.SIGKILL)
            each.wait()
    lines = [chaos.Line(x) for x in (tmp_path / "log-0.txt").read_text().splitlines()]
    last_of_two = max(x.step for x in lines if x.when < killed)
    first_of_one = next(x for x in lines if x.when > killed and x.pid != lines[0].pid)
    assert first_of_one.when - killed < chaos.LIMIT and last_of_two - first_of_one.step < 3 * 25
    assert ranks_at(tmp_path, UNTIL) == 1
    whole = chaos.undisturbed(tmp_path / "undisturbed", UNTIL)
    ours = chaos.tensors(tmp_path, UNTIL)
    assert ours.keys() == whole.keys() and all(torch.equal(ours[name], whole[name]) for name in ours)
