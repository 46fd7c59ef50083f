"""`Fp8`: which linear layers multiply in float8, and on which devices that is possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

import numpy as np
import torch

from ..ops.fp8_products import ALIGNED
from ..util.arguments import check_fields, known_fields, told

_FIRST = (8, 9)  # NVIDIA's first compute capability with float8 products


@dataclass(frozen=True)
class _Chosen:
    """`Fp8.where` of one state: the names that it selects."""

    names: frozenset[str] = field(repr=False)

    def __call__(self, name: str) -> bool:
        return name in self.names


@known_fields
@dataclass(frozen=True)
class Fp8:
    """Which linear layers multiply in float8: `Precision(fp8=Fp8(where))`, or `precision="fp8"` for the default.

    The default selects every linear layer whose two sizes are multiples of 16, except LM heads: layers with as many
    outputs as the longest embedding table has rows, the size of the vocabulary. Logits need more than 8 bits.

    `where(name)` returns True or False and replaces the default, also for LM heads. `shard` calls it once for each
    matrix of the parameters, and the state stores the answers, which do not change during training. A selected layer
    must have sizes that are multiples of 16. For a matrix by which no linear layer multiplies, the answer has no effect
    on products.

    Other layers, attention, norms, embeddings and sums compute in `Precision.compute`. `step.lower(...).float8` lists
    for each weight whether its products are float8, and why.

    `gather`: these weights are also gathered in float8: e4m3 in blocks of 256 elements with one scale each, about half
    of bfloat16's bytes. At every stage, the step then computes with the rounded weights. It needs `where`, and applies
    to every matrix that `where` selects and whose sizes are multiples of 16.

    Raises `TypeError` if `where` is not a function of one argument, and in `shard` if it does not return True or False;
    `ValueError` for `gather` without `where`.

    >>> rule = Fp8(lambda name: "head" not in name)
    """

    where: Callable[[str], bool] | None = None
    gather: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.gather and self.where is None:
            raise ValueError(
                "Fp8(gather=True) needs the argument `where`: weights are rounded before they are gathered, when no "
                'step has shown which of them belong to linear layers. Write Fp8(lambda name: "layers." in name, '
                "gather=True)."
            )

    def asked(self, names: Iterable[str]) -> Fp8:
        """Return this rule with the answers of `where` for the matrices `names` stored in it. Raises `TypeError` for an
        answer that is neither True nor False.
        """
        return self if self.where is None else replace(self, where=_Chosen(frozenset(filter(self._takes, names))))

    @property
    def names(self) -> frozenset[str]:
        """The matrices that `where` selects; empty in a rule that `asked` has not returned."""
        return self.where.names if isinstance(self.where, _Chosen) else frozenset()

    def _takes(self, name: str) -> bool:
        answer: object = self.where is not None and self.where(name)
        if not isinstance(answer, bool | np.bool_):
            raise TypeError(
                f"Fp8(where): where({name!r}) must return True or False, got {told(answer)}. Write bool(...) around "
                "what it returns."
            )
        return bool(answer)

    def gathers(self, name: str, shape: Sequence[int]) -> bool:
        """Return whether ranks send one another a leaf in float8."""
        fits = len(shape) == 2 and not any(n % ALIGNED for n in shape)
        return self.gather and fits and self._takes(name)

    def why_not(self, name: str, weight: torch.Tensor, longest: int) -> str:
        """Return why a linear layer's weight [outputs, inputs] stays in the compute dtype, "" if it does not.

        `longest`: the rows of the longest embedding table. Raises `ValueError` for a weight that `where` selects and
        whose sizes do not fit.
        """
        if self.where is not None and not self._takes(name):
            return "Fp8(where) leaves it out"
        sizes = list(weight.shape)
        if any(n % ALIGNED for n in sizes):
            if self.where is None:
                return f"its sizes {sizes} are not multiples of {ALIGNED}"
            raise ValueError(
                f"Fp8(where) selects {name!r}, a weight of {sizes}, but float8 products need sizes that are multiples "
                f"of {ALIGNED}. Pad the layer, or let where({name!r}) return False."
            )
        if self.where is None and sizes[0] == longest:
            return "a head: it has as many outputs as the longest embedding table has rows"
        return ""


def check_device(device: torch.device) -> None:
    """Raise `ValueError` for a device without float8 products. The CPU emulates them."""
    if device.type not in ("cpu", "meta") and not multiplies(device):
        refuse(_name_of(device))


def multiplies(device: torch.device) -> bool:
    """Return whether a device has float8 products."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= _FIRST


def refuse(name: str) -> NoReturn:
    """Raise `ValueError` for a device or machine without float8 products."""
    raise ValueError(
        f"precision='fp8' needs an NVIDIA GPU of compute capability {_words(_FIRST)} or newer, such as an L4, L40S, "
        f"H100 or B200; this device is {name}. Write precision='bf16'."
    )


def _name_of(device: torch.device) -> str:
    if device.type != "cuda" or torch.version.hip is not None:
        return device.type
    capability = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} of compute capability {_words(capability)}"


def _words(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
