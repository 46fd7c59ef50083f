"""`zerofn launch`: a training on this machine, and on two that are played by a stand-in for ssh."""

import os
import subprocess
import sys

import pytest

from tests.launch.test_nodes import ssh  # noqa: F401  (a fixture)
from zerofn.launch.script import Launch, _hosts, agent, launch

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
import zerofn
zerofn.shard({"params": {"w": torch.ones(3)}})
total = zerofn.collectives.all_reduce(torch.tensor([float(dist.get_rank() + 1)]))
line = ["rank", dist.get_rank(), "of", dist.get_world_size(), "sum", float(total), *sys.argv[1:]]
sys.stdout.write(" ".join(map(str, line)) + "\\n")  # one write: ranks are run unbuffered, and share an output
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "train.py"


def run(*arguments):
    command = [sys.executable, "-m", "zerofn.cli", "launch", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_on_this_machine(script, tmp_path):
    done = run("--ranks", "2", "--logs", "logs", "train.py", "--lr", "3", "--", "-x")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank} of 2 sum 3.0 --lr 3 -- -x" in done.stdout
        (log,) = tmp_path.glob(f"logs/*/attempt_0/{rank}/stdout.log")
        assert log.read_text() == f"rank {rank} of 2 sum 3.0 --lr 3 -- -x\n"


@pytest.mark.whole
def test_on_two_machines(ssh, script, tmp_path):  # noqa: F811
    (tmp_path / "hostfile").write_text("127.0.0.1 slots=2\n127.0.0.2 slots=1\n")
    done = run("-H", "hostfile", "--port", "29477", "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {f"rank {rank} of 3 sum 6.0" for rank in range(3)} == {
        x.partition(": ")[2] for x in done.stdout.splitlines() if ": rank " in x
    }
    assert sum(x.startswith("127.0.0.2: rank") for x in done.stdout.splitlines()) == 1


@pytest.mark.whole
def test_a_script_that_fails(script):
    script.write_text("raise SystemExit(5)")
    assert run("train.py").returncode == 1


@pytest.mark.whole
def test_a_script_that_is_to_be_started_again(ssh, script, tmp_path):  # noqa: F811
    script.write_text(
        "import os, signal, time\n"
        "os.kill(os.getppid(), signal.SIGUSR1)\n"
        "time.sleep(30 * (os.environ['LOCAL_RANK'] == '1'))  # torch ends it once rank 0 has ended\n"
        "raise SystemExit(75)\n"
    )
    assert run("--ranks", "2", "train.py").returncode == 75
    (tmp_path / "hostfile").write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    script.write_text(
        "import os, time\n"
        "time.sleep(5 * (os.environ['GROUP_RANK'] == '1'))  # its agent is left without the first machine's\n"
        "raise SystemExit(75)\n"
    )
    assert run("-H", "hostfile", "--port", "29478", "train.py").returncode == 75


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (Launch("none.py"), "the script 'none.py' does not exist"),
        (Launch("train.py", ranks=0), "--ranks must be 1 or more, got 0"),
        (Launch("train.py", hostfile="none"), "the hostfile 'none' does not exist"),
        (Launch("train.py", include="a"), "--include and --exclude select machines of a hostfile"),
    ],
)
def test_what_cannot_be_is_a_sentence(script, asked, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        launch(asked)


def test_slots_that_are_chosen_are_gpus(script, tmp_path, monkeypatch):
    (tmp_path / "hostfile").write_text("a slots=4\nb slots=4\n")
    hosts, _ = _hosts(Launch("train.py", hostfile="hostfile", include="b:1,3"))
    assert hosts == {"b": [1, 3]}
    seen = {}
    monkeypatch.setattr("zerofn.launch.script.run_on", lambda orders, reach: seen.update(orders) or 0)
    assert launch(Launch("train.py", hostfile="hostfile", include="b:1,3", max_restarts=2)) == 0
    assert seen["b"]["environ"]["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert "--nproc-per-node 2 --max-restarts 2 --nnodes 1" in " ".join(seen["b"]["command"])


def test_slurms_allocation_is_used(script, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "2")
    hosts, reach = _hosts(Launch("train.py"))
    assert hosts == {"n1": [0, 1], "n2": [0, 1]} and reach("n1")[0] == "srun"
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    assert _hosts(Launch("train.py"))[0] == {}
    assert "--standalone" in agent(Launch("train.py"), 2, None) and os.environ["SLURM_JOB_NODELIST"]
