"""SLURM on machines made of network namespaces: one controller here, one slurmd on each machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.system.machines import Machines, environ

CONFIG = """
ClusterName=test
SlurmctldHost=controller({here})
AuthType=auth/munge
AuthInfo=socket={folder}/munge
CredType=cred/munge
SlurmUser=root
SlurmctldPort=6817
SlurmdPort=6818
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=30
SchedulerParameters=batch_sched_delay=0
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """SLURM's commands, with our configuration."""

    def __init__(self, machines: Machines, folder: Path) -> None:
        self._machines, self._folder = machines, folder
        self._programs: list[subprocess.Popen[bytes]] = []

    def environ(self, **more: str) -> dict[str, str]:
        """Variables for SLURM's commands and for what they start."""
        return environ(SLURM_CONF=str(self._folder / "slurm.conf"), **more)

    def do(self, *command: str, timeout: float = 120, **more: str) -> str:
        """What a command has printed."""
        done = subprocess.run(
            command, env=self.environ(**more), timeout=timeout, check=False, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout}"
        return done.stdout

    def start(self) -> None:
        """Start all daemons, and wait until the machines are idle."""
        key = self._folder / "munge.key"
        key.write_bytes(os.urandom(128))
        for path, mode in ((key, 0o400), (self._folder, 0o755)):
            path.chmod(mode)
        nodes = "".join(
            f"NodeName={name} NodeAddr={self._machines.addresses[name]} CPUs=4 State=UNKNOWN\n"
            for name in self._machines.names
        )
        text = CONFIG.format(folder=self._folder, here=self._machines.here, nodes=nodes)
        (self._folder / "slurm.conf").write_text(text)
        (self._folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # none is used; v2 would look for systemd
        for name in ("state", *(f"spool-{x}" for x in self._machines.names)):
            (self._folder / name).mkdir()
        names = {x: f"--{x}={self._folder}/munge-{x}" for x in ("log-file", "pid-file", "seed-file")}
        self._run([
            "munged", "--foreground", "--force", f"--socket={self._folder}/munge", f"--key-file={key}", *names.values(),
        ])  # fmt: skip
        config = str(self._folder / "slurm.conf")
        self._run(["unshare", "--uts", "sh", "-c", f"hostname controller && exec slurmctld -D -i -f {config}"])
        for name in self._machines.names:
            self._run(self._machines.inside(name, str(shutil.which("slurmd")), "-D", "-N", name, "-f", config))
        end = time.monotonic() + 60
        while (said := self._states()).count("idle") < len(self._machines.names):
            assert time.monotonic() < end, f"after 60 s the machines are {said}; logs are in {self._folder}"
            time.sleep(0.2)

    def _run(self, command: list[str]) -> None:
        with (self._folder / "daemons.log").open("a") as log:
            self._programs.append(subprocess.Popen(command, stdout=log, stderr=log, env=self.environ()))

    def _states(self) -> str:
        found = subprocess.run(
            ["sinfo", "-h", "-N", "-o", "%N %t"], env=self.environ(), capture_output=True, text=True, check=False
        )
        return found.stdout + found.stderr

    def stop(self) -> None:
        """End all daemons."""
        for program in reversed(self._programs):
            program.terminate()
        for program in self._programs:
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(10)
            program.kill()
            program.wait()


@contextlib.contextmanager
def slurm_on(machines: Machines, folder: Path) -> Iterator[Slurm]:
    """SLURM while this is entered."""
    slurm = Slurm(machines, folder)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()
