"""A machine's rates in a few numbers, known by name or measured by `zerofn profile`."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..util.errors import nearest
from ..util.sizes import in_words

GB, GIB, TB = 1e9, 1 << 30, 1e12


@dataclass(frozen=True, eq=False)
class Machine:
    """One type of node of a cluster. Units are bytes, bytes/s, operations/s and seconds, of one rank unless a field
    says otherwise. What the ranks of a node share is given for the node.

    `flops`: of matrix products, by dtype, as trained models reach them; less than data sheets promise.
    `measured_on`: the hardware that `zerofn profile` measured, empty for a machine known by name.
    """

    name: str
    device: str  # "cuda" or "cpu"
    ranks: int  # devices of a node
    memory: float  # of a device
    memory_rate: float  # of a device's memory, read and written
    flops: dict[str, float]
    link: float  # between two ranks of a node, one direction
    network: float  # of a rank to other nodes, one direction
    host_link: float = 0.0  # between a device and the host, one direction
    host_memory: float = 0.0  # of a node
    host_rate: float = 0.0  # of a node's host memory
    disk: float = 0.0  # of a node, as are its rates
    disk_read: float = 0.0
    disk_write: float = 0.0
    launch: float = 5e-6  # at least, for one operation
    latency: float = 20e-6  # of a transfer between ranks
    busy: float = 0.0  # seconds of computation that a byte of a transfer costs: gloo copies with the same cores
    slowest: float = 1.0  # the slowest rank's time over the average, for equal work
    measured_on: str = ""

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"Machine(device={self.device!r}): expected 'cpu' or 'cuda'.")
        if "float32" not in self.flops:
            raise ValueError(
                f"Machine(flops={self.flops!r}): expected operations a second by dtype, 'float32' among "
                "them: {'float32': 2e13, 'bfloat16': 1e14}."
            )
        for name, least in (("ranks", 1), ("memory", 1), ("memory_rate", 1), ("link", 0), ("network", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value < least:
                raise ValueError(f"Machine({name}={value!r}): expected a number, {least} or more.")

    def __repr__(self) -> str:
        memory = {"": (self.memory, self.memory_rate), "host ": (self.host_memory, self.host_rate)}
        device, host = (f"{what}{in_words(n)} at {in_words(rate, 'B/s')}" for what, (n, rate) in memory.items())
        links = {"between ranks": self.link, "between nodes": self.network, "host to device": self.host_link}
        drives = {"read at": self.disk_read, "written at": self.disk_write}
        told = [
            f"{self.ranks} x {self.device}, {device} each",
            ", ".join(f"{dtype} {in_words(x, 'FLOP/s')}" for dtype, x in self.flops.items()),
            ", ".join(f"{what} {in_words(x, 'B/s')}" for what, x in links.items() if x),
            host if self.host_memory else "",
            ", ".join([f"drives {in_words(self.disk)}", *(f"{k} {in_words(x, 'B/s')}" for k, x in drives.items())])
            if self.disk
            else "",
            f"measured on {self.measured_on}" if self.measured_on else "",
        ]
        return f"{self.name}: {'; '.join(filter(None, told))}"

    def to_json(self) -> str:
        """Return all fields as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Machine:
        """Return the machine that `to_json` wrote."""
        return Machine(**json.loads(text))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, atomically."""
        target = Path(path)
        if not target.parent.is_dir():
            raise ValueError(f"there is no folder {os.fspath(target.parent)!r} for {target.name}.")
        scratch = target.with_name(f".{target.name}.{os.getpid()}")
        scratch.write_text(self.to_json())
        scratch.replace(target)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Machine:
        """Read a machine that `save` wrote. Raises `ValueError` for another file."""
        try:
            return Machine.from_json(Path(path).read_text())
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{os.fspath(path)} is no machine's profile ({error}); write one with "
                f"`zerofn profile {os.fspath(path)}`."
            ) from None

    def rate_of(self, dtype: torch.dtype) -> float:
        """Return operations per second of matrix products in a dtype; in an unknown one, those of float32."""
        name = str(dtype).removeprefix("torch.")
        return self.flops.get(name) or self.flops["float32"]

    def rank_link(self, world: int) -> float:
        """Return bytes per second, in one direction, of each of `world` ranks when all send to all."""
        return self.link if world <= self.ranks else min(self.link, self.network)

    def known(self, rate: str) -> float:
        """Return `host_link`, `host_rate`, `disk_read` or `disk_write`. Raises `ValueError` if it is unknown."""
        if not getattr(self, rate):
            how = "`zerofn profile FILE --folder DIR`" if rate.startswith("disk") else "`zerofn profile FILE` there"
            raise ValueError(
                f"machine {self.name!r}: {rate!r} (bytes a second), on which this step's time depends, is "
                f"not known: measure it with {how}, or write zerofn.Machine(..., {rate}=...)."
            )
        return float(getattr(self, rate))

    def check_ranks(self, world: int) -> None:
        """Raise `ValueError` if the rate between that many ranks is unknown."""
        if world > 1 and not self.link:
            raise ValueError(
                f"machine {self.name!r} was measured by one rank, so how fast ranks send to each other is "
                "not known: write `zerofn profile FILE --ranks 2`, or take one rank."
            )

    @property
    def is_here(self) -> bool:
        """Whether it was measured on this machine."""
        return self.measured_on == this_hardware()

    def check_here(self) -> None:
        """Raise `ValueError` unless it was measured on this machine."""
        if not self.is_here:
            what = f"was measured on {self.measured_on}" if self.measured_on else f"is {self.name}, known by name"
            raise ValueError(
                f"this machine is {this_hardware()}, and the profile {what}: it cannot tell how long a "
                "step takes here. Write one here with `zerofn profile FILE`; for a step elsewhere write "
                "zerofn.plan(..., machine=...)."
            )


def hops(world: int) -> int:
    """Return the rounds until each of `world` ranks has the data of all, if the number of ranks that have it doubles
    each round.
    """
    return math.ceil(math.log2(max(2, world)))


def this_hardware() -> str:
    """Identify this process's hardware: a profile of other hardware does not apply."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"{os.cpu_count()} x {_processor()}, {torch.get_num_threads()} thread(s) a rank"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpu(
    name: str,
    ranks: int,
    memory: float,
    memory_rate: float,
    half: float,
    single: float,
    link: float,
    network: float,
    host_link: float,
    **more: Any,
) -> Machine:
    flops = {"bfloat16": half, "float16": half, "float32": single, "float64": single / 2}
    return Machine(name, "cuda", ranks, memory, memory_rate, flops, link, network, host_link, **more)


# Sustained in training, below the peak: 400 of an H100's 989 TFLOP/s in bfloat16, 155 of an A100's 312, and so on.
_KNOWN = [
    _gpu(
        "H100-8",
        8,
        80 * GIB,
        3.35 * TB,
        400e12,
        200e12,
        370 * GB,
        50 * GB,
        55 * GB,
        host_memory=2 * TB,
        host_rate=500 * GB,
        disk=28 * TB,
        disk_read=48 * GB,
        disk_write=26 * GB,
    ),
    _gpu(
        "A100-8",
        8,
        80 * GIB,
        2.0 * TB,
        155e12,
        75e12,
        240 * GB,
        25 * GB,
        26 * GB,
        host_memory=2 * TB,
        host_rate=330 * GB,
        disk=15 * TB,
        disk_read=25 * GB,
        disk_write=12 * GB,
    ),
    _gpu(
        "A100-40-8",
        8,
        40 * GIB,
        1.55 * TB,
        155e12,
        75e12,
        240 * GB,
        12.5 * GB,
        26 * GB,
        host_memory=1.1 * TB,
        host_rate=330 * GB,
        disk=8 * TB,
        disk_read=16 * GB,
        disk_write=8 * GB,
    ),
    _gpu(
        "V100-16",
        16,
        32 * GIB,
        0.9 * TB,
        50e12,
        12e12,
        120 * GB,
        12.5 * GB,
        12 * GB,
        host_memory=1.5 * TB,
        host_rate=200 * GB,
        disk=28 * TB,
        disk_read=28 * GB,
        disk_write=20 * GB,
    ),
    _gpu(
        "V100",
        1,
        32 * GIB,
        0.9 * TB,
        50e12,
        12e12,
        12 * GB,
        12 * GB,
        12 * GB,
        host_memory=1.5 * TB,
        host_rate=160 * GB,
        disk=4 * TB,
        disk_read=3.5 * GB,
        disk_write=3 * GB,
    ),
    _gpu(
        "GH200",
        1,
        96 * GIB,
        4.0 * TB,
        500e12,
        250e12,
        370 * GB,
        50 * GB,
        370 * GB,
        host_memory=480 * GB,
        host_rate=450 * GB,
        disk=4 * TB,
        disk_read=7 * GB,
        disk_write=6 * GB,
    ),
    _gpu(
        "4090",
        1,
        24 * GIB,
        1.0 * TB,
        130e12,
        65e12,
        20 * GB,
        1 * GB,
        26 * GB,
        host_memory=64 * GB,
        host_rate=40 * GB,
        disk=2 * TB,
        disk_read=7 * GB,
        disk_write=6 * GB,
    ),
    _gpu(
        "3090",
        1,
        24 * GIB,
        0.94 * TB,
        60e12,
        30e12,
        20 * GB,
        1 * GB,
        26 * GB,
        host_memory=128 * GB,
        host_rate=40 * GB,
        disk=2 * TB,
        disk_read=3.5 * GB,
        disk_write=3 * GB,
    ),
    _gpu(
        "TitanRTX-2",
        2,
        24 * GIB,
        0.67 * TB,
        50e12,
        12e12,
        40 * GB,
        1 * GB,
        12 * GB,
        host_memory=128 * GB,
        host_rate=40 * GB,
        disk=2 * TB,
        disk_read=3.5 * GB,
        disk_write=3 * GB,
    ),
    _gpu(
        "3080",
        1,
        10 * GIB,
        0.76 * TB,
        60e12,
        30e12,
        20 * GB,
        1 * GB,
        26 * GB,
        host_memory=32 * GIB,
        host_rate=40 * GB,
        disk=2 * TB,
        disk_read=3.5 * GB,
        disk_write=3 * GB,
    ),
]
KNOWN = {machine.name: machine for machine in _KNOWN}
KNOWN["3090-2"] = dataclasses.replace(KNOWN["3090"], name="3090-2", ranks=2)


# The default: a host with some cores, whose ranks communicate through memory.
_HOST = Machine(
    "host",
    "cpu",
    1,
    64 * GB,
    10 * GB,
    {"float32": 60e9},
    1.5 * GB,
    1.5 * GB,
    10 * GB,
    latency=50e-6,
    disk_read=2 * GB,
    disk_write=1 * GB,
)


def usual(accelerated: bool) -> Machine:
    """Return the machine that passes assume if none is given: all ranks compare costs with the same one."""
    return KNOWN["A100-8"] if accelerated else _HOST


def machine_of(given: Machine | str | os.PathLike[str]) -> Machine:
    """Return a `Machine`: as given, by name, or from a file that `zerofn profile` wrote.

    Raises `ValueError` for an unknown name.
    """
    if isinstance(given, Machine):
        return given
    if os.fspath(given) in KNOWN:
        return KNOWN[os.fspath(given)]
    if Path(given).is_file():
        return Machine.load(given)
    if os.fspath(given).endswith(".json"):
        raise ValueError(f"there is no file {os.fspath(given)!r}; `zerofn profile {os.fspath(given)}` writes it.")
    near = nearest(os.fspath(given), list(KNOWN), 1, 0.6)
    raise ValueError(
        f"machine {os.fspath(given)!r} is not known{f'; did you mean {near[0]!r}?' if near else '.'} "
        f"There are {', '.join(KNOWN)}, files that `zerofn profile FILE` writes, and "
        "zerofn.Machine(...)."
    )
