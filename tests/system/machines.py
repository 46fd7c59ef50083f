"""Machines made of network namespaces: each has an address, a host name and an sshd; the files are this machine's."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

SSHD = """
Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
StrictModes no
PidFile none
UsePAM no
PermitRootLogin prohibit-password
"""
SSH = """
Host *
  User root
  IdentityFile {folder}/user_key
  UserKnownHostsFile /dev/null
  StrictHostKeyChecking no
  LogLevel ERROR
"""


def do(command: str) -> str:
    """What a command prints; raises with what it said if it fails."""
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def environ(**more: str) -> dict[str, str]:
    """Variables as a person has them, without those of this test session and of a job around it."""
    ours = ("GLOO_", "TORCHELASTIC", "SLURM_")
    return {k: v for k, v in os.environ.items() if not k.startswith(ours)} | {"PYTHONPATH": os.getcwd(), **more}


class Machines:
    """Machines by name, at a bridge of this one; `gone` are names whose addresses nobody has.

    Interfaces and namespaces are named after this process, so that two of these do not meet. What was there when it
    is left is ended.
    """

    def __init__(self, names: Iterable[str], gone: Iterable[str], folder: Path) -> None:
        number = os.getpid() % 40_000
        self.folder, self._id = folder, f"zf{number}"
        net = f"10.{77 + number % 100}.{number // 200}"
        self.names = list(names)
        self.addresses = {name: f"{net}.{k + 2}" for k, name in enumerate([*self.names, *gone])}
        self._bridge, self.here = f"{self._id}b", f"{net}.1"
        self._sshds: list[subprocess.Popen[bytes]] = []

    def space(self, name: str) -> str:
        """The network namespace of a machine."""
        return f"{self._id}-{name}"

    def link(self, name: str) -> str:
        """This machine's end of a machine's cable."""
        return f"{self._id}v{self.names.index(name)}"

    def __enter__(self) -> Machines:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        for key in ("host_key", "user_key"):
            do(f"ssh-keygen -q -t ed25519 -N '' -f {self.folder / key}")
        (self.folder / "sshd_config").write_text(SSHD.format(folder=self.folder))
        known = "".join(f"Host {name}\n  HostName {address}\n" for name, address in self.addresses.items())
        (self.folder / "ssh_config").write_text(known + SSH.format(folder=self.folder))
        program = self.folder / "bin" / "ssh"  # the real one, with our keys
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {self.folder}/ssh_config "$@"\n')
        program.chmod(0o755)
        Path("/run/sshd").mkdir(exist_ok=True)
        do(f"ip link add {self._bridge} type bridge")
        do(f"ip address add {self.here}/24 dev {self._bridge}")
        do(f"ip link set {self._bridge} up")
        hosts = "".join(f"{address} {name}\n" for name, address in self.addresses.items())
        for name in self.names:
            space, link = self.space(name), self.link(name)
            do(f"ip netns add {space}")
            there = Path("/etc/netns", space)
            there.mkdir(parents=True)
            (there / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
            do(f"ip link add {link} type veth peer name eth0 netns {space}")
            do(f"ip link set {link} master {self._bridge} up")
            do(f"ip -n {space} address add {self.addresses[name]}/24 dev eth0")
            for each in ("lo", "eth0"):
                do(f"ip -n {space} link set {each} up")
            sshd = [shutil.which("sshd"), "-D", "-e", "-f", str(self.folder / "sshd_config")]
            self._sshds.append(subprocess.Popen(self.inside(name, *sshd), stderr=subprocess.DEVNULL))
        for name in self.names:
            end = time.monotonic() + 20
            while subprocess.run([str(program), name, "true"], check=False).returncode:
                assert time.monotonic() < end, f"{name} has no sshd after 20 s"
                time.sleep(0.1)

    @contextlib.contextmanager
    def limited(self, rate: float) -> Iterator[None]:
        """While this is entered, each machine sends at most `rate` bytes a second."""
        shape = f"root tbf rate {rate * 8 / 1e6:g}mbit burst 64kb latency 100ms"
        spaces = [self.space(name) for name in self.names]
        try:
            for space in spaces:
                do(f"tc -n {space} qdisc add dev eth0 {shape}")
            yield
        finally:
            for space in spaces:
                subprocess.run(["tc", "-n", space, "qdisc", "del", "dev", "eth0", "root"], check=False)

    def inside(self, name: str, *command: str) -> list[str]:
        """A command on a machine, without ssh, under the machine's host name."""
        under = f"hostname {name} && exec {shlex.join(command)}"
        return ["ip", "netns", "exec", self.space(name), "unshare", "--uts", "sh", "-c", under]

    def processes(self, name: str) -> list[int]:
        """The processes on a machine, but for its sshd."""
        own = {str(p.pid) for p in self._sshds}
        found = set(do(f"ip netns pids {self.space(name)}").split())
        return sorted(map(int, found - own))

    def launch(self, *words: str, **more: str) -> subprocess.Popen[str]:
        """Start `zerofn launch` here, as a person does who has keys for these machines."""
        variables = environ(PATH=f"{self.folder / 'bin'}:{os.environ['PATH']}", **more)
        command = [sys.executable, "-m", "zerofn.cli", "launch", *words]
        pipe: Any = subprocess.PIPE
        return subprocess.Popen(command, env=variables, stdout=pipe, stderr=subprocess.STDOUT, text=True)

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            space = self.space(name)
            for pid in subprocess.run(["ip", "netns", "pids", space], capture_output=True, check=False).stdout.split():
                subprocess.run(["kill", "-9", pid], check=False)
            subprocess.run(["ip", "netns", "delete", space], stderr=subprocess.DEVNULL, check=False)
            shutil.rmtree(Path("/etc/netns", space), ignore_errors=True)
        for sshd in self._sshds:
            sshd.wait()
        subprocess.run(["ip", "link", "delete", self._bridge], stderr=subprocess.DEVNULL, check=False)
