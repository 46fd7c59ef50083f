"""What `cpu`, `cuda` and `reference` share: the rules, the formats they take, the constants of a run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

BLOCK = 256  # elements with one scale and one seed
CPU = torch.device("cpu")
UNIT = 2048  # elements; pieces start at a multiple
GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class Rule:
    """`number`: the library's; `hyper`: what `rates_of` reads."""

    number: int
    num_moments: int
    hyper: tuple[str, ...]


RULES = {
    "adamw": Rule(0, 2, ("b1", "b2", "eps")),
    "adam": Rule(0, 2, ("b1", "b2", "eps")),
    "lion": Rule(1, 1, ("b1", "b2")),
    "sgd": Rule(2, 0, ()),
    "sgd_momentum": Rule(3, 1, ("momentum", "nesterov")),
}


def rates_of(rule: str, rate: float, decay: float, hyper: dict[str, Any], count: int) -> dict[str, float]:
    """The constants `zf_rates` of rules.h, in double: whoever takes them rounds them to float32, where torch does."""
    b1 = float(hyper.get("momentum", hyper.get("b1", 0.0)))
    b2 = float(hyper.get("b2", 0.0))
    constants = {"rate": -rate, "shrink": 1.0, "l2": decay, "b1": b1, "c1": 1 - b1, "b2": b2, "c2": 1 - b2}
    constants |= {"root": 1.0, "eps": hyper.get("eps", 0.0), "quick": 1.0, "near": 0.0}
    constants["nesterov"] = int(hyper.get("nesterov", False))
    if rule in ("adamw", "lion"):
        constants |= {"shrink": 1 - rate * decay, "l2": 0.0}
    if rule in ("adamw", "adam"):
        root = math.sqrt(1 - b2**count)
        rate = -(rate / (1 - b1**count))
        constants |= {"rate": rate, "root": root, "quick": 0.703952253 * rate * root, "near": hyper["eps"] * root}
    return constants


def moment_format(moment: Sequence[Tensor]) -> int:
    """0: fp32; 1: bf16; 2: 8-bit codes and their scales."""
    return 2 if len(moment) == 2 else int(moment[0].dtype == torch.bfloat16)


def check_tensors(
    rule: str, p: Sequence[Tensor], g: Tensor, moments: Sequence[Sequence[Tensor]], device: torch.device = CPU
) -> None:
    """Raise `ValueError` for an unknown rule or a wrong size, `TypeError` for a dtype, device or layout."""
    if rule not in RULES:
        raise ValueError(f"update_: there is no rule {rule!r}; the rules are {', '.join(RULES)}.")
    size = g.numel()
    check_tensor("update_: g", g, GRADIENTS, size, device)
    if len(p) not in (1, 2):
        raise ValueError(f"update_: p must be [fp32] or [bfloat16, int16], and {len(p)} tensors came.")
    for x, dtype in zip(p, [torch.float32] if len(p) == 1 else [torch.bfloat16, torch.int16], strict=True):
        check_tensor("update_: p", x, (dtype,), size, device)
    if len(moments) != RULES[rule].num_moments:
        raise ValueError(f"update_: {rule} has {RULES[rule].num_moments} moments, and {len(moments)} came.")
    for moment in moments:
        if len(moment) == 2:
            check_tensor("update_: codes", moment[0], (torch.uint8,), size, device)
            check_tensor("update_: scales", moment[1], (torch.float32,), num_blocks(size), device)
        elif len(moment) == 1:
            check_tensor("update_: a moment", moment[0], (torch.float32, torch.bfloat16), size, device)
        else:
            raise ValueError(f"update_: a moment must be [x] or [codes, scales], and {len(moment)} tensors came.")
    formats = {moment_format(moment) for moment in moments}
    if len(formats) > 1:
        raise ValueError("update_: m and v must be in one format, fp32, bf16 or 8-bit; two came.")


def check_tensor(
    what: str, x: Tensor, dtypes: Sequence[torch.dtype], size: int | None = None, device: torch.device = CPU
) -> None:
    """Raise `TypeError` unless `x` is contiguous, on `device` and of one of `dtypes`; `ValueError` for its size."""
    if x.dtype not in dtypes:
        raise TypeError(f"{what} must be {' or '.join(map(str, dtypes))}, and {x.dtype} came.")
    if x.device != device or not x.is_contiguous():
        place = "the CPU" if device == CPU else device
        raise TypeError(f"{what} must be contiguous and on {place}; this one is on {x.device}, strides {x.stride()}.")
    if size is not None and x.numel() != size:
        raise ValueError(f"{what} must have {size} elements, and {x.numel()} came.")


def check_run_lists(
    size: int,
    starts: Sequence[int],
    stops: Sequence[int],
    rates: Sequence[float],
    decays: Sequence[float],
    factors: Sequence[float],
    offset: int,
) -> None:
    """Raise `ValueError` unless the runs are in order, apart and inside [0, size)."""
    if not len(starts) == len(stops) == len(rates) == len(decays):
        lengths = [len(x) for x in (starts, stops, rates, decays)]
        raise ValueError(f"update_: starts, stops, rates and decays must be equally long, and they are {lengths}.")
    end = 0
    for start, stop in zip(starts, stops, strict=True):
        if not end <= start <= stop <= size:
            raise ValueError(
                f"update_: runs must be in order, apart and inside [0, {size}); [{start}, {stop}) came "
                f"after one that ends at {end}."
            )
        end = stop
    if len(factors) > 2:
        raise ValueError(f"update_: at most two factors, and {len(factors)} came; multiply some of them first.")
    if offset < 0 or offset % UNIT:
        raise ValueError(f"update_: offset must be a multiple of {UNIT}, and {offset} came.")


def num_blocks(size: int) -> int:
    """How many scales `size` elements have."""
    return -(-size // BLOCK)
