"""`Offload`: which parts of a state are stored where."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch

from ..dry_run.fake_machine import fake_machine, is_host
from ..util.arguments import known_fields
from ..util.errors import nearest
from ..util.sizes import counted

log = logging.getLogger("zerofn")
Tier = Literal["cpu", "nvme"]
Updater = Literal["auto", "cpu", "gpu", "split"]
TIERS: tuple[Tier | None, ...] = (None, *get_args(Tier))
UPDATES: tuple[Updater, ...] = get_args(Updater)
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@known_fields
@dataclass(frozen=True)
class Offload:
    """Tiers of memory for a state.

    `optimizer`, `params`: None (where the model computes), "cpu" (host memory) or "nvme" (files on drives). `path`: the
    folder or folders to stripe over, for "nvme"; by default the system's temporary folder. `fraction`: the share of the
    units' bytes to offload, starting with the last units by name, which most models use last. `update`: the processor
    that updates offloaded state: "cpu", "gpu" (state is streamed through it), "split" between both, or "auto", which
    chooses by measured rates.

    Raises `ValueError` or `TypeError` for unknown values.

    >>> Offload(optimizer="nvme", path="/mnt/drive").paths
    ['/mnt/drive']
    """

    optimizer: Tier | None = None
    params: Tier | None = None
    path: Paths | None = None
    fraction: float = 1.0
    update: Updater = "auto"

    def __post_init__(self) -> None:
        for name, known in (("optimizer", TIERS), ("params", TIERS), ("update", UPDATES)):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(
                    f"Offload({name}={value!r}) is not known; expected {', '.join(map(repr, known[:-1]))} or "
                    f"{known[-1]!r}."
                )
        if isinstance(self.fraction, bool) or not isinstance(self.fraction, int | float):
            raise TypeError(
                f"Offload(fraction={self.fraction!r}): expected a number, the share of the units' bytes "
                f"that is offloaded, got {type(self.fraction).__name__}."
            )
        if not 0 < self.fraction <= 1:
            raise ValueError(
                f"Offload(fraction={self.fraction!r}): the share of the units' bytes that is offloaded must be above 0 "
                "and at most 1. To offload nothing, write offload=None."
            )
        if self.path is None:
            return
        try:
            paths = self.paths
        except TypeError:
            raise TypeError(
                f"Offload(path={self.path!r}): expected a folder or a list of folders, got {type(self.path).__name__}."
            ) from None
        if not all(paths) or not paths or len({os.path.realpath(p) for p in paths}) < len(paths):
            raise ValueError(
                f"Offload(path={self.path!r}): expected one or more folders, each only once; '.' is the current folder."
            )
        if not self.on_disk:
            raise ValueError(
                f"Offload(path={self.path!r}) has no effect without 'nvme'. Leave path out, or write optimizer='nvme'."
            )

    @property
    def paths(self) -> list[str]:
        """The folders on drives."""
        if self.path is None:
            return [tempfile.gettempdir()]
        given = [self.path] if isinstance(self.path, str | os.PathLike) else self.path
        return [os.path.expanduser(os.fspath(p)) for p in given]

    @property
    def on_disk(self) -> bool:
        """Whether anything is stored on a drive."""
        return "nvme" in (self.optimizer, self.params)

    @property
    def of_optimizer(self) -> Offload:
        """This policy for a tree that holds only optimizer state."""
        return replace(self, params=self.optimizer, path=self.path if self.optimizer == "nvme" else None)


def asked_for(offload: Offload | str | None, copies: str) -> Offload:
    """Return the `Offload` that `shard` was asked for.

    "cpu" and "nvme" mean the optimizer's state, and the parameters unless a gathered copy exists beside their shards:
    `copies` says when one does, "at stages 1 and 2", and is empty if none does. Raises `ValueError` or `TypeError` for
    unknown values and for values without effect.
    """
    if offload is None:
        return Offload()
    if isinstance(offload, str):
        if offload not in TIERS:
            near = nearest(offload, ("cpu", "nvme"), 1, 0.0)
            raise ValueError(
                f"offload={offload!r} is not known; did you mean {near[0]!r}? Write 'cpu', 'nvme' or "
                "zerofn.Offload(optimizer=..., params=..., path=...)."
            )
        return Offload(optimizer=offload, params=None if copies else offload)
    if not isinstance(offload, Offload):
        raise TypeError(f"offload: expected None, 'cpu', 'nvme' or a zerofn.Offload, got {type(offload).__name__}.")
    if not (offload.optimizer or offload.params):
        raise ValueError(
            f"{offload} offloads nothing. Write optimizer='cpu', optimizer='nvme', or the same for params, or "
            "offload=None."
        )
    if offload.params and copies:
        raise ValueError(f"Offload(params=...) has no effect {copies}, or offload only the optimizer.")
    return offload


def on_device(offload: Offload, device: torch.device) -> Offload:
    """Return what has an effect where the model computes on a device. Raises `ValueError` if `update` has none."""
    if not (offload.optimizer or offload.params):
        return offload
    if is_host(device) and offload.update != "auto":
        raise ValueError(
            f"Offload(update={offload.update!r}) has no effect: the model computes on the CPU, and no other processor "
            "could run the update. Leave update out."
        )
    offload = _without_effect(offload, device)
    if fake_machine():
        return offload
    for path in offload.paths if offload.on_disk else ():
        if _in_memory(path):
            log.warning(
                "offload: %s is in memory itself (tmpfs), so offloading to it frees no memory. Write Offload(path=...) "
                "with a folder on a drive.",
                path,
            )
    if offload.on_disk and offload.path is None:
        log.info("offload: scratch files go to %s. For another folder, write Offload(path=...).", offload.paths[0])
    return offload


def _without_effect(offload: Offload, device: torch.device) -> Offload:
    """Return the part of `offload` that has an effect on this device. Warns of the rest: the same script may run on a
    cluster, where the model computes on GPUs.
    """
    kept = replace(
        offload,
        optimizer=None if lies_there(offload.optimizer, device) else offload.optimizer,
        params=None if lies_there(offload.params, device) else offload.params,
    )
    if kept != offload:
        warnings.warn(
            f"{offload}: 'cpu' has no effect, because the parameters are on the CPU and the state is in host memory "
            "already.",
            UserWarning,
            stacklevel=2,
        )
    return kept


def _in_memory(path: str) -> bool:
    """Return whether a folder's file system has no drive behind it."""
    real = Path(os.path.realpath(path))
    import psutil  # type: ignore[import-untyped]

    mounts = [x for x in psutil.disk_partitions(all=True) if real.is_relative_to(x.mountpoint)]
    return max(mounts, key=lambda x: len(x.mountpoint)).fstype in ("tmpfs", "ramfs") if mounts else False


def check_memory(offload: Offload, kept: Mapping[str, int], num_ranks: int) -> None:
    """Raise `MemoryError`, with a table of what would fit, if this machine's ranks need more host memory than it has.

    `kept`: bytes a rank, by name and tier, such as "optimizer on cpu".
    """
    needed, free = sum(n for what, n in kept.items() if what.endswith(" on cpu")) * num_ranks, free_memory()
    if needed <= free:
        return
    total = {what: sum(n for k, n in kept.items() if k.startswith(what)) for what in ("parameters", "optimizer")}
    rows = {
        "as asked": needed,
        "Offload(optimizer='nvme')": total["parameters"] * num_ranks,
        "Offload(optimizer='nvme', params='nvme')": 0,
    }
    lines = [
        f"  {name:<42} {nbytes / 1e9:8.2f} GB  {'fits' if nbytes <= free else 'does not fit'}"
        for name, nbytes in rows.items()
    ]
    raise MemoryError(
        "\n".join(
            [
                f"{offload} needs {needed / 1e9:.2f} GB of host memory for {counted(num_ranks, 'rank')} of this "
                f"machine, and {free / 1e9:.2f} GB are free. Nothing was allocated. At most, without buffers:",
                *lines,
                "optim.adamw(..., moments='8bit') needs a quarter of that for its moments.",
            ]
        )
    )


def free_memory() -> int:
    """Bytes of host memory that this process may still take, its control group's limit included."""
    import psutil

    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # no control groups, or no limit
        group = Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2].lstrip("/")
        folder = Path("/sys/fs/cgroup") / group
        limit, used = ((folder / name).read_text() for name in ("memory.max", "memory.current"))
        free = min(free, int(limit) - int(used))
    return free


def total_memory() -> int:
    """Bytes of host memory that this machine has."""
    import psutil

    return int(psutil.virtual_memory().total)


def lies_there(tier: str | None, device: torch.device) -> bool:
    """Whether a tier is the memory that the model computes in."""
    return tier == "cpu" and is_host(device)


def of_units(offload: Offload, sizes: Sequence[int]) -> list[Offload]:
    """What holds for each unit, given their bytes in the order of first use: the last ones make up the fraction."""
    wanted, taken, out = offload.fraction * sum(sizes), 0, []
    for size in reversed(sizes):
        out.append(offload if taken < wanted else replace(offload, optimizer=None, params=None, path=None))
        taken += size
    return out[::-1]
