"""How a shard is stored: by which codec, and in which tier each of its parts.

A step, an optimizer and a checkpoint see one public tensor a shard, in the master's dtype. What is stored may be
different: two halves, 8-bit blocks (the codecs of `ops.codecs`), a handle of a region on a drive. `compile` passes what
is stored to the step, decodes it at the start and encodes it at the end, and passes let update rules work on the stored
form directly.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .._torch_compat import current_trace
from ..offload.drive_tensor import DriveTensor
from ..offload.host_tensor import HostTensor
from ..ops.codecs import PLAIN, Codec

ops = torch.ops.zerofn
StoredPart = Tensor | DriveTensor | HostTensor
_AT_ONCE = 1 << 22  # elements: whole blocks of every codec


@dataclass(frozen=True)
class Placement:
    """Where the parts of a shard are stored.

    `tiers`: for each part None (where the model computes), "cpu" (host memory) or "nvme" (drives). `paths`: the
    folders on drives. `device`: where the model computes. `update`: see `Offload`.
    """

    tiers: tuple[str | None, ...]
    paths: tuple[str, ...]
    device: str
    update: str


@dataclass(frozen=True)
class StorageSpec:
    """How a shard is stored, as far as a captured step depends on it: codec, public dtype, placement."""

    codec: Codec
    dtype: torch.dtype
    placement: Placement | None = None  # None: everything is where the model computes

    @property
    def described(self) -> str:
        """Describe the storage, without what differs by rank."""
        tiers = [] if self.placement is None else [tier or "the model's device" for tier in self.placement.tiers]
        where = f", on {' and '.join(dict.fromkeys(tiers))}" if tiers else ""
        return f"as {str(self.dtype).removeprefix('torch.')}{self.codec.note}{where}"

    def lies_in(self, dtype: torch.dtype) -> bool:
        """Return whether its first part is what is gathered and used in `dtype`, so that it may be a view of the
        gathered copy.
        """
        return self.codec.sizes(self.dtype, 0)[0][0] == dtype

    def parts(self, size: int) -> list[tuple[torch.dtype, int, str | None]]:
        """(dtype, elements, tier) of the parts that store `size` elements."""
        found = self.codec.sizes(self.dtype, size)
        tiers = [None] * len(found) if self.placement is None else self.placement.tiers
        return [(*part, tier) for part, tier in zip(found, tiers, strict=True)]

    def of(self, tensors: Iterator[Tensor], size: int) -> Stored:
        """Return a shard of `size` elements stored in the next tensors: parts in memory, handles for parts on
        drives.
        """
        return Stored(self, tuple(self._part(next(tensors), *part) for part in self.parts(size)))

    def _part(self, x: Tensor, dtype: torch.dtype, size: int, tier: str | None) -> StoredPart:
        if tier is None or self.placement is None:
            return x
        device = torch.device(self.placement.device)
        return DriveTensor(x, dtype, size, device) if tier == "nvme" else HostTensor(x, device)

    def keep(self, x: Tensor, old: Stored | None = None) -> Stored:
        """Encode a public tensor as a shard of this storage. In a captured step, a part on a drive takes the place
        of `old`.
        """
        parts: list[StoredPart] = []
        for k, (fresh, (dtype, n, tier)) in enumerate(zip(self.codec.encode(x), self.parts(x.numel()), strict=True)):
            before = old.parts[k] if old is not None else fresh
            if not isinstance(before, Tensor):
                fresh = (ops.write_drive if tier == "nvme" else ops.put)(before.handle, fresh)
            parts.append(self._part(fresh, dtype, n, tier))
        return Stored(self, tuple(parts))

    @property
    def num_parts(self) -> int:
        """How many tensors store a shard."""
        return len(self.codec.parts)

    @property
    def note(self) -> str:
        """What to add to the dtype in a description of a shard."""
        tiers = () if self.placement is None else self.placement.tiers
        where = [text for tier, text in (("cpu", "in host memory"), ("nvme", "on a drive")) if tier in tiers]
        partly = "partly " if None in tiers else ""
        return self.codec.note + (f", {partly}{' and '.join(where)}" if where else "")


@dataclass(frozen=True, eq=False)
class Stored:
    """A shard as stored."""

    storage: StorageSpec
    parts: tuple[StoredPart, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The public dtype."""
        return self.storage.dtype

    @property
    def device(self) -> torch.device:
        """The device of the first part, which a forward pass reads."""
        placement = self.storage.placement
        first = self.parts[0]
        return first.device if isinstance(first, Tensor) else torch.device(placement.device if placement else "cpu")

    @property
    def size(self) -> int:
        """The number of elements."""
        first = self.parts[0]
        return first.numel() if isinstance(first, Tensor) else first.size

    @property
    def nbytes(self) -> int:
        """Bytes in memory, on the host or the device."""
        return sum(x.nbytes for x in self.parts if not isinstance(x, DriveTensor))

    @property
    def on_drives(self) -> int:
        """Bytes on drives."""
        return sum(x.nbytes for x in self.parts if isinstance(x, DriveTensor))

    @property
    def tensors(self) -> list[Tensor]:
        """The inputs of a captured step: parts in memory, and handles for those on a drive."""
        return [x if isinstance(x, Tensor) else x.handle for x in self.parts]

    def decode(self) -> Tensor:
        """Return the public tensor [size], in new memory unless the codec is plain.

        Raises `RuntimeError` for a shard on a drive, except in a step that is being captured.
        """
        return self.storage.codec.decode([x if isinstance(x, Tensor) else x.fetched() for x in self.parts])

    def load_and_decode(self) -> Tensor:
        """Return the public tensor [size] where the model computes; one that is on a drive is read."""
        if not self.on_drives or current_trace() is not None:
            return self.decode()
        return self.loaded().decode().to(self.device)

    def loaded(self) -> Stored:
        """Return the shard in host memory, if a part of it is offloaded; itself otherwise."""
        if self.storage.placement is None:
            return self
        return Stored(
            replace(self.storage, placement=None),
            tuple(x.cpu() if isinstance(x, Tensor) else x.load() for x in self.parts),
        )

    def save(self, values: Stored) -> None:
        """Write what was `loaded`, and then changed, to where it is stored."""
        for mine, fresh in zip(self.parts, values.tensors, strict=True):
            if not isinstance(mine, Tensor):
                mine.save(fresh)
            elif mine.data_ptr() != fresh.data_ptr():
                mine.copy_(fresh)

    def read(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of the public tensor."""
        first, parts = self.loaded()._around(start, stop)
        return self.storage.codec.decode(parts)[start - first : stop - first]

    def _around(self, start: int, stop: int) -> tuple[int, list[Tensor]]:
        """Return (the first element, the parts) of elements [start, stop), extended to whole blocks of the codec."""
        codec = self.storage.codec
        first, last = start // codec.grain * codec.grain, min(-(-stop // codec.grain) * codec.grain, self.size)
        grains = [part.grain for part in codec.parts]
        return first, [x[first // k : -(-last // k)] for x, k in zip(self.tensors, grains, strict=True)]

    def fill(self, start: int, stop: int, read: Callable[[Tensor], Any]) -> None:
        """Let `read` fill elements [start, stop), given a public tensor of that size. The shard must be in memory."""
        if self.storage.codec == PLAIN:
            read(self.tensors[0][start:stop])
        else:
            values = torch.empty(stop - start, dtype=self.dtype, device=self.device)
            read(values)
            self.write(start, values)

    def write(self, start: int, values: Tensor) -> None:
        """Store `values` [n] as elements [start, start + n), in memory.

        `_AT_ONCE` are encoded at a time, so that an embedding is not held once more in each form.
        """
        stop = start + values.numel()
        cuts = [start, *range(start - start % _AT_ONCE + _AT_ONCE, stop, _AT_ONCE), stop]
        for a, b in itertools.pairwise(cuts):
            self._write(a, values[a - start : b - start])

    def _write(self, start: int, values: Tensor) -> None:
        first, parts = self._around(start, start + values.numel())
        if self.storage.codec.grain > 1:  # neighbours in the same blocks are encoded again
            whole = self.storage.codec.decode(parts)
            whole[start - first : start - first + values.numel()] = values
            values = whole
        for part, fresh in zip(parts, self.storage.codec.encode(values.to(self.dtype)), strict=True):
            part.copy_(fresh)


def stored(x: Tensor | Stored) -> Stored:
    """Return a tensor as a plainly stored shard."""
    return x if isinstance(x, Stored) else Stored(StorageSpec(PLAIN, x.dtype), (x,))
