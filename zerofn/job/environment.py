"""Which rank this process is, by the variables of what started it: torchrun (accelerate uses its names), Open MPI,
MPICH or Intel MPI, or SLURM's srun.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import NamedTuple

# (launcher, variables of rank, number of ranks and rank on this machine). mpirun starts its helpers by srun, so srun's
# variables come last; SLURM_NTASKS would not do: a script that sbatch runs once has it, too.
_LAUNCHERS = (
    ("torchrun", ("RANK", "WORLD_SIZE", "LOCAL_RANK")),
    ("Open MPI", ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")),
    ("MPI (PMI)", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")),
    ("srun", ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")),
)
_PORTS = range(16384, 32768)  # below those that Linux draws from for connections


class PlaceInJob(NamedTuple):
    """This process's place in a job. `address`: (host, port) where rank 0 listens, or the launcher's agent if that
    holds the job's store.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    address: tuple[str, int]
    agent_holds_store: bool = False


def launch_of(environ: Mapping[str, str]) -> PlaceInJob | None:
    """Return what the environment says; None for a process that was started alone.

    Raises `RuntimeError` for one of several ranks whose environment does not say where rank 0 listens.
    """
    for launcher, names in _LAUNCHERS:
        if names[1] not in environ:
            continue
        rank, size, local = (int(environ.get(name, "0")) for name in names)
        if size == 1 and (launcher != "torchrun" or "MASTER_ADDR" not in environ):
            return None
        agent = launcher == "torchrun" and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return PlaceInJob(launcher, rank, size, local, _address(launcher, size, environ), agent)
    return None


def _address(launcher: str, size: int, environ: Mapping[str, str]) -> tuple[str, int]:
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        return environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if nodes and int(environ.get("SLURM_STEP_NUM_TASKS", "0")) == size:
        return environ.get("MASTER_ADDR", first_host(nodes)), int(environ.get("MASTER_PORT", _port_of_job(environ)))
    started = "" if launcher == "torchrun" else f" by {launcher}"
    raise RuntimeError(
        f"This process was started{started} as one of {size} ranks, but MASTER_ADDR and MASTER_PORT are not set, so "
        "this process cannot find rank 0. Set both on every rank, to the name of rank 0's machine and a free port on "
        "it, such as `mpirun -x MASTER_ADDR=$(hostname) -x MASTER_PORT=29500 ...`. Or start the script with torchrun."
    )


def _port_of_job(environ: Mapping[str, str]) -> int:
    """Return a port for a step of a job, the same on all its ranks and most likely another for every other step."""
    job = f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
    return _PORTS[zlib.crc32(job.encode()) % len(_PORTS)]


def first_host(nodes: str) -> str:
    """Return the first name of SLURM's list of nodes.

    >>> first_host("a100-[007-012,020],login1"), first_host("rack[1,3]-node[05-08].hpc"), first_host("one")
    ('a100-007', 'rack1-node05.hpc', 'one')
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group() if first else nodes)
