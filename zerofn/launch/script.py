"""`zerofn launch`: a script on the ranks of this machine, or of several, by torch's elastic agent."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .hosts import Hosts, chosen, hosts_of, slurm_hosts
from .nodes import over_slurm, over_ssh, passed_on, run_on

HOSTFILE = "/job/hostfile"  # where DeepSpeed looks


@dataclass(frozen=True)
class Launch:
    """What to run, and where.

    `script`: a path, or with `module` a module's name. `ranks`: processes on each machine; None for one to a slot, or
    to a GPU of this machine, and 1 without GPUs. `hostfile`, `include`, `exclude`: as DeepSpeed's. `port`: where the
    agents of several machines meet, on the first one. `logs`: a folder in which every rank's output is kept apart.
    """

    script: str
    arguments: Sequence[str] = ()
    module: bool = False
    ranks: int | None = None
    hostfile: str | None = None
    include: str | None = None
    exclude: str | None = None
    max_restarts: int = 0
    port: int = 29400
    ssh_port: int | None = None
    logs: str | None = None


def launch(asked: Launch) -> int:
    """Run the ranks, and return 0 once all have ended well, or EX_TEMPFAIL (75) if they are to be started again.

    Raises `ValueError` and `FileNotFoundError` before anything starts, and `LaunchError` for a machine that cannot be
    reached or fails.
    """
    if asked.ranks is not None and asked.ranks < 1:
        raise ValueError(f"--ranks must be 1 or more, got {asked.ranks}.")
    if not asked.module and not Path(asked.script).is_file():
        raise FileNotFoundError(f"the script {asked.script!r} does not exist.")
    hosts, reach = _hosts(asked)
    if not hosts:
        ranks = asked.ranks or gpus() or 1
        os.execv(sys.executable, [*agent(asked, ranks, asked.logs), *_target(asked)])  # signals go to the agent itself
    first = next(iter(hosts))
    job = f"zerofn-{uuid.uuid4().hex[:12]}"
    meeting = ["--nnodes", str(len(hosts)), "--rdzv-backend", "c10d", "--rdzv-id", job]
    environ = passed_on(dict(os.environ), (Path.cwd(), Path.home()))
    orders: dict[str, dict[str, Any]] = {}
    for host, slots in hosts.items():
        logs = None if asked.logs is None else os.path.join(asked.logs, host)
        where = [*meeting, "--rdzv-endpoint", f"{first}:{asked.port}", "--local-addr", host]
        orders[host] = {
            "command": [*agent(asked, asked.ranks or len(slots), logs, where), *_target(asked)],
            "cwd": os.getcwd(),
            "environ": environ | _visible(slots, asked),
            "script": "" if asked.module else asked.script,
            "port": asked.port if host == first else 0,
        }
    return run_on(orders, reach)


def _hosts(asked: Launch) -> tuple[Hosts, Any]:
    """Return (machines, how to reach one); no machines for this one alone."""
    file = asked.hostfile or (HOSTFILE if os.path.exists(HOSTFILE) else None)
    if file is not None:
        return chosen(hosts_of(file), asked.include, asked.exclude), lambda host: over_ssh(host, asked.ssh_port)
    hosts = slurm_hosts(os.environ)
    if len(hosts) > 1:
        return chosen(hosts, asked.include, asked.exclude), over_slurm
    if asked.include is not None or asked.exclude is not None:
        raise ValueError("--include and --exclude select machines of a hostfile. Add --hostfile FILE.")
    return {}, None


def _visible(slots: Sequence[int], asked: Launch) -> dict[str, str]:
    """Some of a machine's GPUs, where the hostfile's slots were chosen from."""
    if asked.include is None and asked.exclude is None:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, slots))}


def agent(asked: Launch, ranks: int, logs: str | None, meeting: Sequence[str] = ("--standalone",)) -> list[str]:
    """Return the command of torch's agent, without what it runs."""
    kept = [] if logs is None else ["--log-dir", logs, "--tee", "3"]
    return [
        *(sys.executable, "-m", "zerofn.launch.agent", "--nproc-per-node", str(ranks)),
        *("--max-restarts", str(asked.max_restarts)),
        *meeting,
        *kept,
    ]


def _target(asked: Launch) -> list[str]:
    return [*(["-m"] if asked.module else []), asked.script, *asked.arguments]


def gpus() -> int:
    """Return how many GPUs this machine has."""
    import torch

    return int(torch.cuda.device_count())
