"""Jobs of a real SLURM, on two machines with four ranks."""

import re
import subprocess
import sys
import time

import pytest
import torch

from tests.support.same import assert_same_trees
from tests.system.slurm import slurm_on
from tests.system.test_several_machines import TRAIN

TWO_OF_TWO = ("-N2", "--ntasks-per-node=2")
LASTS = (
    TRAIN
    + """
    # what follows is a run that lasts
    state, step = zerofn.shard(init_state, stage=3), zerofn.compile(train_step)
    checkpoints = zerofn.Checkpoints(sys.argv[2], every=1000)
    state = checkpoints.restore_or(state)
    x = torch.randn(60, 8, 5, generator=torch.Generator().manual_seed(1))
    for k in range(int(state.step), 60):
        sys.stdout.write(f"step {k} after {checkpoints.step}\\n")
        sys.stdout.flush()
        time.sleep(0.1 if len(sys.argv) > 3 else 0)
        state, _ = step(state, x[k].chunk(zerofn.world_size())[zerofn.rank()])
        checkpoints.after_step(state)
    checkpoints.close()
    params = zerofn.unshard(state).params
    if zerofn.rank() == 0:
        torch.save(params, sys.argv[1] + ".lasting")
"""
).replace("import os, socket, sys", "import os, socket, sys, time")
JOB = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2
#SBATCH --requeue --signal=USR1@120 --open-mode=append
{launch} lasts.py out.pt run slowly
[ $? = 75 ] && scontrol requeue $SLURM_JOB_ID
"""


@pytest.fixture(scope="module")
def slurm(machines, tmp_path_factory):
    with slurm_on(machines, tmp_path_factory.mktemp("slurm")) as found:
        yield found


@pytest.fixture(scope="module")
def on_this_machine(tmp_path_factory):
    """The parameters of both trainings on four ranks here."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "lasts.py").write_text(LASTS)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "lasts.py", "out.pt", "run"]
    subprocess.run([sys.executable, *command], cwd=folder, check=True, capture_output=True)
    return torch.load(folder / "out.pt"), torch.load(folder / "out.pt.lasting")


def test_srun(slurm, tmp_path, on_this_machine):
    (tmp_path / "train.py").write_text(TRAIN)
    said = slurm.do("srun", *TWO_OF_TWO, sys.executable, f"{tmp_path}/train.py", f"{tmp_path}/out.pt", WORD="passed on")
    ranks = sorted(x for x in said.splitlines() if x.startswith("rank"))
    assert ranks == [f"rank {k} of 4 on node-{'ab'[k // 2]} passed on" for k in range(4)]
    assert_same_trees(torch.load(tmp_path / "out.pt"), on_this_machine[0])


def test_launch_in_an_allocation(slurm, tmp_path, on_this_machine):
    (tmp_path / "train.py").write_text(TRAIN)
    command = [sys.executable, "-m", "zerofn.cli", "launch", f"{tmp_path}/train.py", f"{tmp_path}/out.pt"]
    said = slurm.do("salloc", *TWO_OF_TWO, *command)
    assert sorted(x for x in said.splitlines() if ": rank" in x) == [
        f"node-{'ab'[k // 2]}: rank {k} of 4 on node-{'ab'[k // 2]} None" for k in range(4)
    ]
    assert_same_trees(torch.load(tmp_path / "out.pt"), on_this_machine[0])


@pytest.mark.parametrize("launch", [f"srun {sys.executable}", f"{sys.executable} -m zerofn.cli launch"])
def test_a_job_that_is_to_end_saves_and_is_queued_again(slurm, tmp_path, on_this_machine, launch):
    (tmp_path / "lasts.py").write_text(LASTS)
    (tmp_path / "job.sh").write_text(JOB.format(launch=launch))
    job = slurm.do("sbatch", "--parsable", f"--chdir={tmp_path}", f"--output={tmp_path}/log", f"{tmp_path}/job.sh")
    job, log = job.strip(), tmp_path / "log"

    def until(found, seconds=60):
        end = time.monotonic() + seconds
        while not found():
            assert time.monotonic() < end, f"{log.read_text()[-2000:]}\n{slurm.do('squeue')}"
            time.sleep(0.1)

    until(lambda: log.exists() and "step 9 " in log.read_text())
    slurm.do("scancel", "--signal=USR1", job)
    until(lambda: "PENDING" in slurm.do("squeue", "-h", "-j", job, "-o", "%T"))
    saved = 1 + max(map(int, re.findall(r"step (\d+) after", log.read_text())))
    # SLURM would wait for two minutes. A machine refuses a job that is started in the second in which it was ended.
    time.sleep(2)
    slurm.do("scontrol", "update", f"JobId={job}", "StartTime=now")
    until(lambda: (tmp_path / "out.pt.lasting").exists())
    assert f"step {saved} after {saved}" in log.read_text() and 9 < saved < 59
    assert_same_trees(torch.load(tmp_path / "out.pt.lasting"), on_this_machine[1])
