"""Which machines a job runs on: DeepSpeed's hostfile with its --include and --exclude, or SLURM's allocation."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

Hosts = dict[str, list[int]]  # name -> its slots, such as GPUs, by number

MAX_SLOTS = 4096  # of a machine, which has one for each GPU or processor
MAX_NODES = 65_536
_LINE = re.compile(r"(\S+)\s+slots=(\d+)\s*(?:#.*)?")
_LIST = "SLURM's list of nodes: "
_RULE = "expected a name and its slots, such as 'worker-1 slots=8'"


def hosts_of(path: str | os.PathLike[str]) -> Hosts:
    """Return the machines of a hostfile, in its order. Raises `ValueError`, which names the line, and
    `FileNotFoundError`.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"the hostfile {os.fspath(path)!r} does not exist.")
    found: Hosts = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(file.read_text().splitlines(), 1):
        text, where = line.strip(), f"{path}, line {number}"
        if not text or text.startswith("#"):
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            raise ValueError(f"{where}: {_RULE}; got {text!r}.")
        name, slots = match[1], _count(match[2])
        if not slots:
            raise ValueError(f"{where}: {name!r} has 0 slots. Delete the line, or write # before it.")
        if slots > MAX_SLOTS:
            raise ValueError(f"{where}: {name!r} has slots={match[2]}, but a machine may have at most {MAX_SLOTS:,}.")
        if name.startswith("-"):
            raise ValueError(
                f"{where}: {name!r} cannot be the name of a machine, because ssh would read it as an option."
            )
        if name in found:
            raise ValueError(f"{where}: {name!r} is listed twice, also in line {lines[name]}. Delete one of the lines.")
        found[name], lines[name] = list(range(slots)), number
    if not found:
        raise ValueError(f"{path} lists no machine: {_RULE}.")
    return found


def chosen(hosts: Hosts, include: str | None = None, exclude: str | None = None) -> Hosts:
    """Return the machines and slots that `--include` or `--exclude` leaves: NAME[:SLOT[,SLOT...]][@NAME...].

    A name without slots stands for all of them. Raises `ValueError` for both at once, a machine or a slot that is not
    there, and if nothing is left.

    >>> hosts = {"one": [0, 1, 2, 3], "two": [0, 1, 2, 3]}
    >>> chosen(hosts, include="one@two:0,2"), chosen(hosts, exclude="two:1@one")
    ({'one': [0, 1, 2, 3], 'two': [0, 2]}, {'two': [0, 2, 3]})
    """
    if include is not None and exclude is not None:
        raise ValueError("--include and --exclude: use only one of them.")
    if include is None and exclude is None:
        return hosts
    option, text = ("--include", include) if include is not None else ("--exclude", exclude)
    named: Hosts = {}
    for name, slots in _specs(str(option), str(text), hosts):
        named[name] = sorted({*named.get(name, ()), *slots})
    if option == "--include":
        return {name: named[name] for name in hosts if name in named}
    left = {name: [x for x in slots if x not in named.get(name, ())] for name, slots in hosts.items()}
    left = {name: slots for name, slots in left.items() if slots}
    if not left:
        raise ValueError(f"--exclude {text}: excludes all slots.")
    return left


def _specs(option: str, text: str, hosts: Hosts) -> Iterator[tuple[str, list[int]]]:
    for spec in text.split("@"):
        name, colon, slots = spec.partition(":")
        if name not in hosts:
            raise ValueError(f"{option} {text}: machine {name!r} is not in the hostfile, which has {', '.join(hosts)}.")
        if not colon:
            yield name, hosts[name]
            continue
        numbers = [_count(x) if re.fullmatch("[0-9]+", x) else -1 for x in slots.split(",")]
        for number, word in zip(numbers, slots.split(","), strict=True):
            if number not in hosts[name]:
                has = ", ".join(map(str, hosts[name]))
                raise ValueError(f"{option} {text}: {name!r} has no slot {word!r}; it has {has}.")
        yield name, numbers


def slurm_hosts(environ: Mapping[str, str]) -> Hosts:
    """Return the machines of SLURM's allocation, with a slot for each GPU, or task where there are none; empty outside
    of one.
    """
    nodes = environ.get("SLURM_JOB_NODELIST", "")
    if not nodes:
        return {}
    names = ("SLURM_GPUS_ON_NODE", "SLURM_NTASKS_PER_NODE")
    name = next((x for x in names if environ.get(x)), "")
    slots = environ[name] if name else "1"
    found = re.match("[0-9]+", slots)
    if found is None or not 0 < _count(found[0]) <= MAX_SLOTS:
        raise ValueError(f"{name}={slots!r}: expected a number from 1 to {MAX_SLOTS:,}.")
    return {node: list(range(_count(found[0]))) for node in node_names(nodes)}


def _count(digits: str) -> int:
    """Return a number; of one with too many digits, a large one.

    >>> _count("0017"), _count("9" * 9_999) > MAX_SLOTS
    (17, True)
    """
    return int(digits[-18:]) if not digits[:-18].strip("0") else 10**18


def node_names(nodes: str) -> list[str]:
    """Return all names of SLURM's list of nodes.

    >>> node_names("a100-[007-008,020],login1"), node_names("r[1-2]-n[5,7]")
    (['a100-007', 'a100-008', 'a100-020', 'login1'], ['r1-n5', 'r1-n7', 'r2-n5', 'r2-n7'])
    """
    names: list[str] = []
    for word in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        parts = re.split(r"\[([^\]]*)\]", word)  # text, a list of ranges, text, ...
        made = [""]
        for k, part in enumerate(parts):
            inside = list(_numbers(part, nodes)) if k % 2 else [part]
            if len(names) + len(made) * len(inside) > MAX_NODES:
                raise ValueError(f"{_LIST}{nodes!r} has more than {MAX_NODES:,} machines.")
            made = [a + b for a in made for b in inside]
        names += made
    if wrong := [x for x in names if x.startswith("-")]:
        raise ValueError(f"{_LIST}{wrong[0]!r} cannot be the name of a machine: it would be read as an option.")
    return names


def _numbers(ranges: str, nodes: str) -> Iterator[str]:
    for each in ranges.split(","):
        found = re.fullmatch("([0-9]+)(?:-([0-9]+))?", each)
        if found is None:
            raise ValueError(f"{_LIST}expected numbers such as [007-008,020], got [{ranges}] in {nodes!r}.")
        first, last = _count(found[1]), _count(found[2] or found[1])
        if last - first >= MAX_NODES:
            raise ValueError(f"{_LIST}{nodes!r} has more than {MAX_NODES:,} machines.")
        for number in range(first, last + 1):
            yield str(number).zfill(len(found[1]))
