"""Ranks from the variables of torchrun, mpirun and srun."""

import os
import subprocess
import sys

import pytest

from benchmarks.common.processes import free_port
from zerofn.job.environment import PlaceInJob, first_host, launch_of

HERE = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", **HERE}, ("torchrun", 1, 2, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1", **HERE}, ("torchrun", 0, 1, 0)),
        ({"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", **HERE}, ("Open MPI", 5, 8, 0)),
        ({"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "2", **HERE}, ("MPI (PMI)", 2, 4, 2)),
        ({**SRUN, **HERE}, ("srun", 3, 4, 1)),
        # mpirun starts one helper a machine by srun
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "2", "PMI_RANK": "9", "PMI_SIZE": "16", **HERE}, ("MPI (PMI)", 9, 16, 0)),
    ],
)
def test_each_launcher_is_known(environ, expected):
    found = launch_of(environ)
    assert found == PlaceInJob(*expected, ("10.0.0.1", 29500))


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WORLD_SIZE": "1"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # a script that sbatch runs once
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_a_process_that_was_started_alone(environ):
    assert launch_of(environ) is None


def test_srun_needs_no_address():
    first, other = launch_of(SRUN), launch_of({**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert first.address == other.address and first.address[0] == "gpu07" and 1024 < first.address[1] < 32768
    assert launch_of({**SRUN, "SLURM_STEP_ID": "1"}).address[1] != first.address[1]
    assert launch_of({**SRUN, "MASTER_PORT": "1234"}).address == ("gpu07", 1234)


def test_mpirun_without_an_address_is_refused():
    with pytest.raises(RuntimeError, match="started by Open MPI as one of 8 ranks, but MASTER_ADDR and MASTER_PORT"):
        launch_of({"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8"})
    with pytest.raises(RuntimeError, match="started as one of 2 ranks"):
        launch_of({"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("n[3-5,9]", "n3"),
        ("r[1,2]n[07-08],x", "r1n07"),
        ("gpu-a-001,gpu-b-[2-3]", "gpu-a-001"),
    ],
)
def test_the_first_host_of_a_list(nodes, expected):
    assert first_host(nodes) == expected


JOB = """
import torch, zerofn
from zerofn import collectives
state = zerofn.shard({"params": {"w": torch.arange(6.0)}}, stage=3)
print("sum", collectives.all_reduce(torch.ones(1)).item(), flush=True)
"""


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.part(launcher=["srun"])
@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_a_job_of_two_processes_is_one_training(launcher):
    port = free_port()
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MASTER_", "RANK", "WORLD_", "LOCAL_"))}
    clean |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    started = []
    for rank in map(str, range(2)):
        if launcher == "srun":
            own = {**SRUN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": rank, "SLURM_LOCALID": rank}
            own["SLURM_STEP_NODELIST"] = "localhost"
        else:
            own = {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        command = [sys.executable, "-c", JOB]
        started.append(subprocess.Popen(command, env=clean | own, stdout=subprocess.PIPE, text=True))
    assert [p.communicate(timeout=60)[0].split() for p in started] == [["sum", "2.0"]] * 2
