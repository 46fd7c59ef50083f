"""Links of a given rate between ranks on one machine: network namespaces, cables and a switch. Needs root.

Each rank has a namespace of its own, as it has a host of its own in a cluster. Its cable leads to a switch in one more
namespace. Both ends of a cable send at the given rate at most, by tc's token bucket, so a rank sends and receives at
that rate. The namespaces are called after this process; those of processes that were killed go with the next run.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common.processes import BenchmarkError, free_port

INTERFACE, LOOPBACK = "eth0", "lo"
FIRST_PORT = 29500  # of a namespace's own
NETWORK = "10.76.0.{}"
# What a bucket may send at once: 2 ms of the rate, and at least two of the kernel's largest segments, which it would
# cut up otherwise.
BURST_KB_OF_GBIT, BURST_KB = 256, 128
CONGESTION = "cubic"  # Linux's own default, whatever this machine's is


def do(command: str) -> None:
    """Run a command of iproute2. Raises `BenchmarkError` with what it says."""
    try:
        done = subprocess.run(shlex.split(command), capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise BenchmarkError(f"{command}: {error.filename} is not there; it is in the package iproute2") from error
    if done.returncode:
        raise BenchmarkError(f"{command}: {(done.stderr or done.stdout).strip()}")


class Loopback:
    """Ranks of one host, without limits: what is measured where there are no namespaces."""

    interface, address = LOOPBACK, "127.0.0.1"

    def inside(self, rank: int, command: list[str]) -> list[str]:
        """Return the command that runs a command where a rank is."""
        return command


class Hosts:
    """A namespace for each rank, whose cables have no limit before `throttle`."""

    interface, address = INTERFACE, NETWORK.format(1)

    def __init__(self, world: int) -> None:
        self.names = [f"zerofn-{os.getpid()}-{rank}" for rank in range(world)]
        self.switch = f"zerofn-{os.getpid()}-switch"
        self._ends = [(name, INTERFACE) for name in self.names]
        self._ends += [(self.switch, f"port{rank}") for rank in range(world)]

    def make(self) -> None:
        """Make the namespaces and connect them."""
        do(f"ip netns add {self.switch}")
        do(f"ip -n {self.switch} link add switch type bridge")
        do(f"ip -n {self.switch} link set switch up")
        for rank, name in enumerate(self.names):
            do(f"ip netns add {name}")
            do(f"ip link add {INTERFACE} netns {name} type veth peer name port{rank} netns {self.switch}")
            do(f"ip -n {name} address add {NETWORK.format(rank + 1)}/24 dev {INTERFACE}")
            do(f"ip -n {self.switch} link set port{rank} master switch up")
            for each in (LOOPBACK, INTERFACE):
                do(f"ip -n {name} link set {each} up")
            route = f"{NETWORK.format(0)}/24 dev {INTERFACE} src {NETWORK.format(rank + 1)}"
            do(f"ip -n {name} route replace {route} proto kernel scope link congctl {CONGESTION}")

    def remove(self) -> None:
        """Delete what there is of the namespaces."""
        for name in (*self.names, self.switch):
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)

    def inside(self, rank: int, command: list[str]) -> list[str]:
        """Return the command that runs a command where a rank is, with that namespace's counters in /sys."""
        return ["ip", "netns", "exec", self.names[rank], *command]

    def throttle(self, mbits: int) -> None:
        """Limit what each rank sends, and what the switch sends to it, to so many Mbit/s."""
        burst = max(BURST_KB, BURST_KB_OF_GBIT * mbits // 1000)
        for name, interface in self._ends:
            how = f"tbf rate {mbits}mbit burst {burst}kb latency 100ms"
            do(f"tc -n {name} qdisc replace dev {interface} root {how}")


def commands(hosts: Hosts | Loopback, command: list[str], world: int, number: int = 0) -> list[list[str]]:
    """What starts the ranks of a program that asks `staying.joined` where it is. `number`: of the system."""
    port = free_port() if hosts.interface == LOOPBACK else FIRST_PORT + number
    command = [*command, "--world", str(world), "--port", str(port)]
    command += ["--address", hosts.address, "--interface", hosts.interface]
    return [hosts.inside(rank, [*command, "--rank", str(rank)]) for rank in range(world)]


def unavailable() -> str:
    """Return why there are no throttled links here, in a sentence; "" if there are."""
    hosts = Hosts(1)
    try:
        hosts.make()
        hosts.throttle(100)
    except BenchmarkError as error:
        return f"Throttled links are left out, since they need root and network namespaces: {error}."
    finally:
        hosts.remove()
    return ""


@contextlib.contextmanager
def throttled(world: int) -> Iterator[Hosts]:
    """Hosts that are gone at the end, also where SIGTERM brings it."""
    _remove_leftovers()
    hosts = Hosts(world)
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        hosts.make()
        yield hosts
    finally:
        hosts.remove()
        signal.signal(signal.SIGTERM, before)


def _exit(*_: object) -> None:
    raise SystemExit("ended by SIGTERM")


def _remove_leftovers() -> None:
    """Delete the namespaces of processes that are no more."""
    if not Path("/run/netns").is_dir():
        return
    for space in Path("/run/netns").iterdir():
        named = re.fullmatch(r"zerofn-(\d+)-\w+", space.name)
        if named and not Path(f"/proc/{named[1]}").exists():
            subprocess.run(["ip", "netns", "del", space.name], check=False)
