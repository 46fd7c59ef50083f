"""`Fp8`: which linear layers multiply in float8, and on which devices that is possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from ..ops.fp8_products import ALIGNED
from ..util.arguments import check_fields

_FIRST = (8, 9)  # NVIDIA's first compute capability with float8 products


@dataclass(frozen=True)
class Fp8:
    """Which linear layers multiply in float8: `Precision(fp8=Fp8(where))`, or `precision="fp8"` for the default.

    `where(name)` is asked the name of each weight that a linear layer multiplies by; both of its sizes must be
    multiples of 16. None takes every such layer but those that are as wide as the longest embedding table is long:
    heads, whose logits need their bits. Everything else computes in `Precision.compute`: other layers, attention,
    norms, embeddings and sums. `step.lower(...)` says of each weight what was decided, and why.

    `gather`: ranks send one another these weights in float8, too, at stage 3: e4m3 in blocks of 256 elements, each with
    a scale of its own, about half of bfloat16's bytes. At every stage the step then computes with the weights as they
    arrive. It needs `where`, which selects from all matrices with such sizes.

    >>> rule = Fp8(lambda name: "head" not in name)
    """

    where: Callable[[str], bool] | None = None
    gather: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.gather and self.where is None:
            raise ValueError(
                "Fp8(gather=True) needs where: it rounds weights where they are stored, before a step shows which of "
                'them are of linear layers. Write Fp8(lambda name: "layers." in name, gather=True).'
            )

    def gathers(self, name: str, shape: Sequence[int]) -> bool:
        """Return whether ranks send one another a leaf in float8."""
        fits = len(shape) == 2 and not any(n % ALIGNED for n in shape)
        return self.gather and fits and self.where is not None and bool(self.where(name))

    def why_not(self, name: str, weight: torch.Tensor, longest: int) -> str:
        """Return why a linear layer's weight [outputs, inputs] stays in the compute dtype, "" if it does not.

        `longest`: the rows of the longest embedding table. Raises `ValueError` for a weight that `where` takes and
        whose sizes do not fit.
        """
        if self.where is not None and not self.where(name):
            return "Fp8(where) leaves it out"
        sizes = list(weight.shape)
        if any(n % ALIGNED for n in sizes):
            if self.where is None:
                return f"its sizes {sizes} are no multiples of {ALIGNED}"
            raise ValueError(
                f"Fp8(where) takes {name!r}, a weight of {sizes}, and float8 products need sizes that are multiples of "
                f"{ALIGNED}: pad the layer, or let where({name!r}) return False."
            )
        if self.where is None and sizes[0] == longest:
            return "a head, as wide as the longest embedding table is long"
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
        f"H100 or B200, and this is {name}. Write precision='bf16'."
    )


def _name_of(device: torch.device) -> str:
    if device.type != "cuda" or torch.version.hip is not None:
        return device.type
    capability = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} of compute capability {_words(capability)}"


def _words(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
