"""A machine's rates in a few numbers, known by name or measured by `zerofn profile`."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from ..dry_run.fake_machine import FakeMachine
from ..util.arguments import check_fields, checked, known_fields
from ..util.errors import nearest
from ..util.sizes import counted, in_words

GB, GIB, TB = 1e9, 1 << 30, 1e12


@known_fields
@dataclass(frozen=True, eq=False)
class Machine:
    """One type of node of a cluster. Units are bytes, bytes/s, operations/s and seconds, for one rank unless a field
    says otherwise. Resources that the ranks of a node share are stated for the node.

    - `device`: "cuda" or "cpu". `ranks`: devices of a node. `nodes`: how many nodes there are; 0: as many as ranks
      need.
    - `memory`: of a device. `memory_rate`: of a device's memory, read and written.
    - `flops`: rates of matrix products by dtype, as training reaches them; data sheets promise more.
    - `link`: between two ranks of a node, one direction. `network`: of a rank to other nodes, one direction.
    - `host_link`: between a device and the host, one direction. `host_memory`, `host_rate`: of a node's host memory.
    - `disk`, `disk_read`, `disk_write`: of a node's drives: size and rates.
    - `launch`: the least seconds that one operation takes. `latency`: of a transfer between ranks.
    - `busy`: seconds of computation that a byte of a transfer costs: gloo copies with the same cores.
    - `slowest`: the slowest rank's time over the average, for equal work.
    - `measured_on`: the hardware that `zerofn profile` measured, empty for a machine known by name.

    >>> rates = {"memory_rate": 2e10, "flops": {"float32": 1e11}, "link": 5e9, "network": 0}
    >>> Machine("two processes", "cpu", ranks=2, memory=16e9, **rates).rate_of(torch.float32)
    100000000000.0
    """

    name: str
    device: str
    ranks: int
    memory: float
    memory_rate: float
    flops: dict[str, float]
    link: float
    network: float
    host_link: float = 0.0
    host_memory: float = 0.0
    host_rate: float = 0.0
    disk: float = 0.0
    disk_read: float = 0.0
    disk_write: float = 0.0
    launch: float = 5e-6
    latency: float = 20e-6
    busy: float = 0.0
    slowest: float = 1.0
    measured_on: str = ""
    nodes: int = 0

    def __post_init__(self) -> None:
        rates = ("host_link", "host_memory", "host_rate", "disk", "disk_read", "disk_write", "launch", "latency")
        check_fields(self, "name", "flops", *rates, "busy", "slowest", "measured_on")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"Machine(device={self.device!r}): expected 'cpu' or 'cuda'.")
        if "float32" not in self.flops:
            raise ValueError(
                f"Machine(flops={self.flops!r}): expected operations a second by dtype, 'float32' among "
                "them: {'float32': 2e13, 'bfloat16': 1e14}."
            )
        for name, least in (("ranks", 1), ("memory", 1), ("memory_rate", 1), ("link", 0), ("network", 0), ("nodes", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
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
    @checked()
    def from_json(text: str) -> Machine:
        """Return the machine that `to_json` wrote."""
        try:
            return Machine(**json.loads(text))
        except json.JSONDecodeError as error:
            raise ValueError(
                f"Machine.from_json: text must be the output of to_json, but is not JSON: {error}."
            ) from None

    @checked()
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the machine to a file as JSON, atomically."""
        target = Path(path)
        if not target.parent.is_dir():
            raise ValueError(f"the folder {os.fspath(target.parent)!r} for {target.name} does not exist.")
        scratch = target.with_name(f".{target.name}.{os.getpid()}")
        scratch.write_text(self.to_json())
        scratch.replace(target)

    @staticmethod
    @checked()
    def load(path: str | os.PathLike[str]) -> Machine:
        """Read a machine that `save` wrote. Raises `ValueError` for any other file."""
        try:
            return Machine.from_json(Path(path).read_text())
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{os.fspath(path)} is not the profile of a machine ({error}). Write one with `zerofn profile "
                f"{os.fspath(path)}`."
            ) from None

    def rate_of(self, dtype: torch.dtype) -> float:
        """Return operations per second of matrix products in a dtype; in an unknown one, those of float32."""
        name = str(dtype).removeprefix("torch.")
        return self.flops.get(name) or self.flops["float32"]

    def fake(self) -> FakeMachine:
        """Return a fake machine of this kind, in which steps are captured for it."""
        return FakeMachine(self.device != "cpu", self.host_rate / self.ranks, self.host_link)

    def rank_link(self, world: int) -> float:
        """Return bytes per second, in one direction, of each of `world` ranks when all send to all."""
        return self.link if world <= self.ranks else min(self.link, self.network)

    def known(self, rate: str) -> float:
        """Return `host_link`, `host_rate`, `disk_read` or `disk_write`. Raises `ValueError` if it is unknown."""
        if not getattr(self, rate):
            how = "`zerofn profile FILE --folder DIR`" if rate.startswith("disk") else "`zerofn profile FILE` there"
            raise ValueError(
                f"machine {self.name!r}: {rate!r} (bytes a second) is not known, but this step's time depends on it. "
                f"Measure it with {how}, or write zerofn.Machine(..., {rate}=...)."
            )
        return float(getattr(self, rate))

    def check_ranks(self, world: int) -> None:
        """Raise `ValueError` if the rate between that many ranks is unknown."""
        if world > 1 and not self.link:
            raise ValueError(
                f"machine {self.name!r} was measured by one rank, so the speed of transfers between ranks is not "
                "known. Type `zerofn profile FILE --ranks 2`, or use one rank."
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
                "step takes here. Measure this machine with `zerofn profile FILE`; to plan for another machine, write "
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
    return f"{os.cpu_count()} x {_processor()}, {counted(torch.get_num_threads(), 'thread')} a rank"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


# Sustained in training, below the peak: 400 of an H100's 989 TFLOP/s in bfloat16, 155 of an A100's 312; where
# nothing was published, 0.4 of the data sheet's peak. With a star there is no bfloat16, only float16; with a plus there
# is float8, whose products took 0.54 of the time of bfloat16 ones on an H200.
# Memory, its rate, the link and the host link are of a device; host memory, host rate and drives of a node.
_GPUS = """
name        ranks  memory  rate  half  float32  link  network  host_link  host_memory  host_rate  disk  read  write
                      GiB  GB/s  Tflop   Tflop  GB/s     GB/s       GB/s           GB       GB/s    TB  GB/s   GB/s
B200-8          8     179  8000   900+     450   740       50         55         4000        600    60    80     50
H200-8          8     140  4800   400+     200   370       50         55         2000        500    28    48     26
H200            1     140  4800   400+     200    50       50         55          256        250     4     7      6
H100-8          8      80  3350   400+     200   370       50         55         2000        500    28    48     26
H100            1      80  3350   400+     200    50       50         55          256        250     4     7      6
MI300X-8        8     192  5300   450      100   350       50         55         2000        500    28    48     26
A100-8          8      80  2000   155       75   240       25         26         2000        330    15    25     12
A100-40-8       8      40  1550   155       75   240     12.5         26         1100        330     8    16      8
A100            1      80  2000   155       75    25       25         26          256        160     4     7      6
L40S            1      45   864   145+      70    25       25         26          256        160     4     7      6
A10             1    22.5   600    50       25    25      1.2         26           64         40     2   3.5      3
T4              1      15   320    25*       3    12      1.2         12           64         40     2   3.5      3
V100-16        16      32   900    50*      12   120     12.5         12         1500        200    28    28     20
V100            1      32   900    50*      12    12       12         12         1500        160     4   3.5      3
GH200           1      96  4000   500+     250   370       50        370          480        450     4     7      6
5090            1      32  1790    85+      40    50        1         50           64         60     2    12     10
4090            1      24  1000   130+      65    20        1         26           64         40     2     7      6
3090            1      24   940    60       30    20        1         26          128         40     2   3.5      3
3090-2          2      24   940    60       30    20        1         26          128         40     2   3.5      3
TitanRTX-2      2      24   670    50*      12    40        1         12          128         40     2   3.5      3
3080            1      10   760    45       30    20        1         26 34.359738368         40     2   3.5      3
"""


def _gpu(line: str) -> Machine:
    """Return the machine of a line of `_GPUS`."""
    name, *numbers = line.split()
    ranks, memory, rate, half, single, link, network, host_link, host_memory, host_rate, disk, read, write = (
        float(x.rstrip("*+")) for x in numbers
    )
    flops = {"bfloat16": half, "float16": half, "float32": single, "float64": single / 2}
    if numbers[3].endswith("*"):
        del flops["bfloat16"]
    if numbers[3].endswith("+"):
        flops["float8_e4m3fn"] = half / 0.54
    return Machine(
        name,
        "cuda",
        int(ranks),
        memory * GIB,
        rate * GB,
        {dtype: x * 1e12 for dtype, x in flops.items()},
        link * GB,
        network * GB,
        host_link * GB,
        host_memory=host_memory * GB,
        host_rate=host_rate * GB,
        disk=disk * TB,
        disk_read=read * GB,
        disk_write=write * GB,
    )


KNOWN = {machine.name: machine for machine in map(_gpu, _GPUS.strip().splitlines()[2:])}


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


@checked()
def machine_of(given: Machine | str | os.PathLike[str]) -> Machine:
    """Return a `Machine`: as given, by name, or from a file that `zerofn profile` wrote; several nodes of either are
    "8 x H100-8".

    Raises `ValueError` for an unknown name.

    >>> machine_of("8 x H100-8").nodes
    8
    """
    if isinstance(given, Machine):
        return given
    if (several := re.fullmatch(r"(\d+) ?x ?(\S.*)", os.fspath(given))) and not Path(given).is_file():
        number, one = int(several[1]), machine_of(several[2])
        if not number:
            raise ValueError(f"machine {os.fspath(given)!r} has no nodes. Write '2 x {several[2]}' for two.")
        return dataclasses.replace(one, name=f"{number} x {one.name}", nodes=number)
    if os.fspath(given) in KNOWN:
        return KNOWN[os.fspath(given)]
    if Path(given).is_file():
        return Machine.load(given)
    if os.fspath(given).endswith(".json"):
        raise ValueError(
            f"the file {os.fspath(given)!r} does not exist; `zerofn profile {os.fspath(given)}` writes it."
        )
    near = nearest(os.fspath(given), list(KNOWN), 1, 0.6)
    raise ValueError(
        f"machine {os.fspath(given)!r} is not known{f'; did you mean {near[0]!r}?' if near else '.'} "
        f"Known machines are {', '.join(KNOWN)}. You can also pass a file that `zerofn profile FILE` has written, or a "
        "zerofn.Machine(...)."
    )
