"""Codecs: how a tensor that a step sees is stored. Each is declared here, once.

A codec declares which tensors store a public one (its parts), the operations that decode and encode them, and its name
in messages. A moment format declares the codecs of an optimizer's moments, and the kernels that take them as stored.
All others read these declarations: allocation, capture, update rules, passes, checkpoints, offload.

To add a codec, write its two operations in a file of their own, import that file and declare the codec here, and test
it beside `tests/optim/test_moment_formats.py`. `fp8` is an example.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._torch_compat import OpOverload
from . import formats as _formats  # noqa: F401  (defines zerofn::split, join, encode and decode)
from . import fp8 as _fp8  # noqa: F401  (defines zerofn::fp8_encode and fp8_decode)
from .formats import HALF, LOW
from .kernel_args import BLOCK

Parts = Sequence[Tensor]  # what stores one tensor: itself, or a codec's parts


@dataclass(frozen=True)
class StoredPart:
    """One of the tensors that store a public one.

    `suffix`: the end of its name in errors. `dtype`: None for the public tensor's. `grain`: the number of public
    elements for each of its elements.
    """

    suffix: str = ""
    dtype: torch.dtype | None = None
    grain: int = 1


@dataclass(frozen=True)
class Codec:
    """How a flat tensor is stored.

    The first part has an element for each public one. `holds`: the dtype of public tensors that it can store, None
    for any. `decodes` names `zerofn::decodes(*parts, *arguments) -> public`, `encodes` names
    `zerofn::encodes(public, *arguments, random) -> parts`, rounded to nearest. Encoding a decoded tensor must give
    the same public numbers again, whatever `random` is. `note`: words after the dtype in messages.
    """

    name: str
    parts: tuple[StoredPart, ...] = (StoredPart(),)
    holds: torch.dtype | None = None
    decodes: str = ""
    encodes: str = ""
    arguments: tuple[bool, ...] = ()
    note: str = ""

    @property
    def grain(self) -> int:
        """The number of elements that are stored together: a shard is read and written in multiples of it."""
        return max(part.grain for part in self.parts)

    @property
    def operations(self) -> tuple[OpOverload, OpOverload]:
        """(what decodes, what encodes); none for `PLAIN`."""
        decodes, encodes = (getattr(torch.ops.zerofn, name).default for name in (self.decodes, self.encodes))
        return decodes, encodes

    def sizes(self, dtype: torch.dtype, size: int) -> list[tuple[torch.dtype, int]]:
        """(dtype, elements) of each part of a public tensor of `size` elements in `dtype`."""
        return [(part.dtype or dtype, -(-size // part.grain)) for part in self.parts]

    def stores(self, tensors: Parts) -> bool:
        """Return whether these can be its parts, by number and dtypes."""
        wanted = [part.dtype for part in self.parts]
        return len(tensors) == len(wanted) and all(
            dtype in (None, x.dtype) for x, dtype in zip(tensors, wanted, strict=True)
        )

    def decode(self, parts: Parts) -> Tensor:
        """Return the public tensor, in new memory except under `PLAIN`."""
        return self.operations[0](*parts, *self.arguments) if self.decodes else parts[0]

    def encode(self, x: Tensor, random: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the parts that store `x`, rounded to nearest; or up or down by `random`, if the codec's operation
        takes it.

        `random`: int64 of the size of `x`, with 32 bits for each element.
        """
        if not self.encodes:
            return (x,)
        given = () if random is None else (random,)
        return tuple(self.operations[1](x, *self.arguments, *given))


def _blocks(name: str, signed: bool) -> Codec:
    """float32 in 8-bit blocks, with one scale for 256: 1 + 4/256 bytes an element. See `ops/csrc/formats.h`."""
    parts = (StoredPart(".codes", torch.uint8), StoredPart(".scales", torch.float32, BLOCK))
    return Codec(name, parts, torch.float32, "decode", "encode", (signed,), " in 8-bit blocks")


def _float8(name: str, signed: bool) -> Codec:
    """float32 in float8, with one scale for 256: 1 + 4/256 bytes an element. See [Note: float8 moments] in `fp8`."""
    parts = (StoredPart(".codes", torch.uint8), StoredPart(".scales", torch.float32, BLOCK))
    return Codec(name, parts, torch.float32, "fp8_decode", "fp8_encode", (signed,), " in float8 blocks")


PLAIN = Codec("plain")
# Every bit of float32, in 2 + 2 bytes. See [Note: split master] in `formats`.
SPLIT = Codec(
    "split", (StoredPart(".hi", HALF), StoredPart(".lo", LOW)), torch.float32, "join", "split", note=" in two halves"
)
SIGNED, UNSIGNED = _blocks("signed blocks", True), _blocks("unsigned blocks", False)
E4M3, E5M2 = _float8("e4m3 blocks", True), _float8("e5m2 blocks", False)
CODECS = (PLAIN, SPLIT, SIGNED, UNSIGNED, E4M3, E5M2)
MASTERS = (PLAIN, SPLIT)  # what parameters are stored by, and update rules take as it is

# What reads parts -> what makes them.
DECODES = dict(codec.operations for codec in CODECS if codec.decodes)


@dataclass(frozen=True)
class MomentFormat:
    """How an optimizer's moments are stored.

    `first`, `second`: the codecs of the first moment, of any sign, and of the second, which is never negative.
    `dtype`: the public one, None for the parameters'. `kernels`: whether they take the parts as stored, and round
    stochastically; otherwise torch's operations decode, update and encode.
    """

    first: Codec = PLAIN
    second: Codec = PLAIN
    dtype: torch.dtype | None = None
    kernels: bool = False

    @property
    def codecs(self) -> tuple[Codec, Codec]:
        """Return the codec of each moment, in the order in which update rules take them."""
        return self.first, self.second

    @property
    def encoded(self) -> bool:
        """Whether moments have a codec other than `PLAIN`."""
        return PLAIN not in self.codecs


MOMENTS = {
    None: MomentFormat(kernels=True),
    "bf16": MomentFormat(dtype=torch.bfloat16, kernels=True),
    "8bit": MomentFormat(SIGNED, UNSIGNED, kernels=True),
    "fp8": MomentFormat(E4M3, E5M2),
}


def master_of(p: Parts) -> Codec:
    """Return the codec of a parameter's storage. Raises `TypeError` for one that update rules do not take."""
    found = next((codec for codec in MASTERS if codec.stores(p)), None)
    if found is None:
        known = " or ".join(codec.name for codec in MASTERS)
        raise TypeError(f"a parameter is stored {known}, got tensors of {[x.dtype for x in p]}.")
    return found
