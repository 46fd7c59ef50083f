"""What `cpu`, `cuda` and `reference` share: what a rule is, the formats they take, the constants of a run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

BLOCK = 256  # elements with one scale and one seed
CPU = torch.device("cpu")
UNIT = 2048  # elements; shards start at a multiple
GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class Rule:
    """An update rule of the kernels, declared where its operation is defined.

    `number`: its place in `ZF_RULES` of `csrc/rules.h`. `update(written, g, count, lr, factor, finite, starts, stops,
    rates, decays, **hyper)`: the same in torch's operations on flat tensors, in place. `lossy(p, *moments, g,
    constants)`: in place, where moments in fewer bits have arithmetic of their own; `constants`: `rates_of`, rounded to
    float32. `decoupled`: the decay shrinks the parameter; otherwise it is added to the gradient. `corrected`: for
    moments that start at zero (Kingma and Ba 2015, section 3).
    """

    number: int
    num_moments: int
    update: Callable[..., None]
    lossy: Callable[..., None] | None = None
    decoupled: bool = False
    corrected: bool = False


RULES: dict[str, Rule] = {}


def rates_of(rule: str, rate: float, decay: float, hyper: dict[str, Any], count: int) -> dict[str, float]:
    """The constants `zf_rates` of rules.h, in double: whoever takes them rounds them to float32, where torch does."""
    b1 = float(hyper.get("b1", 0.0))
    b2 = float(hyper.get("b2", 0.0))
    constants = {"rate": -rate, "shrink": 1.0, "l2": decay, "b1": b1, "c1": 1 - b1, "b2": b2, "c2": 1 - b2}
    constants |= {"root": 1.0, "eps": hyper.get("eps", 0.0), "quick": 1.0, "near": 0.0}
    constants["nesterov"] = int(hyper.get("nesterov", False))
    if RULES[rule].decoupled:
        constants |= {"shrink": 1 - rate * decay, "l2": 0.0}
    if RULES[rule].corrected:
        root = math.sqrt(1 - b2**count)
        rate = -(rate / (1 - b1**count))
        constants |= {"rate": rate, "root": root, "quick": 0.703952253 * rate * root, "near": hyper["eps"] * root}
    return constants


# What the kernels take stored, as the dtypes of its parts; of a moment, its place here is the library's number.
MASTERS = ((torch.float32,), (torch.bfloat16, torch.int16))
MOMENTS = ((torch.float32,), (torch.bfloat16,), (torch.uint8, torch.float32))


def is_split(p: Sequence[Tensor]) -> bool:
    """Whether a master is stored in two halves."""
    return _dtypes(p) == MASTERS[1]


def moment_format(moment: Sequence[Tensor]) -> int:
    """0: fp32; 1: bf16; 2: 8-bit codes and their scales. Raises `ValueError` for other dtypes."""
    return MOMENTS.index(_dtypes(moment))


def pair(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Parts as the kernels take them: two, the second None where there is one."""
    first, second = (*parts, None)[:2]
    assert first is not None
    return first, second


def _dtypes(parts: Sequence[Tensor]) -> tuple[torch.dtype, ...]:
    return tuple([x.dtype for x in parts])


def check_tensors(
    rule: str, p: Sequence[Tensor], g: Tensor, moments: Sequence[Sequence[Tensor]], device: torch.device = CPU
) -> None:
    """Raise `ValueError` for an unknown rule or a wrong size, `TypeError` for a dtype, device or layout."""
    if rule not in RULES:
        raise ValueError(f"update_: there is no rule {rule!r}; the rules that were imported are {', '.join(RULES)}.")
    size = g.numel()
    check_tensor("update_: g", g, GRADIENTS, size, device)
    _check_parts("p", p, MASTERS, [size, size], device)
    if len(moments) != RULES[rule].num_moments:
        raise ValueError(f"update_: {rule} has {RULES[rule].num_moments} moments, got {len(moments)}.")
    for moment in moments:
        _check_parts("a moment", moment, MOMENTS, [size, num_blocks(size)], device)
    if len(set(map(_dtypes, moments))) > 1:
        raise ValueError("update_: m and v must be in one format, fp32, bf16 or 8-bit; got two formats.")


def _check_parts(
    what: str,
    parts: Sequence[Tensor],
    known: Sequence[tuple[torch.dtype, ...]],
    sizes: Sequence[int],
    device: torch.device,
) -> None:
    """Check parts against those of `known` that are as many; `sizes`: of the first and the second part."""
    possible = [dtypes for dtypes in known if len(dtypes) == len(parts)]
    if not possible:
        forms = " or ".join(f"[{', '.join(str(x).removeprefix('torch.') for x in dtypes)}]" for dtypes in known)
        raise ValueError(f"update_: {what} must be {forms}, got {len(parts)} tensors.")
    for k, (x, size) in enumerate(zip(parts, sizes, strict=False)):
        check_tensor(f"update_: part {k} of {what}", x, [dtypes[k] for dtypes in possible], size, device)


def check_tensor(
    what: str, x: Tensor, dtypes: Sequence[torch.dtype], size: int | None = None, device: torch.device = CPU
) -> None:
    """Raise `TypeError` unless `x` is contiguous, on `device` and of one of `dtypes`; `ValueError` for its size."""
    if x.dtype not in dtypes:
        raise TypeError(f"{what} must be {' or '.join(map(str, dtypes))}, got {x.dtype}.")
    if x.device != device or not x.is_contiguous():
        place = "the CPU" if device == CPU else device
        raise TypeError(f"{what} must be contiguous and on {place}; this one is on {x.device}, strides {x.stride()}.")
    if size is not None and x.numel() != size:
        raise ValueError(f"{what} must have {size} elements, got {x.numel()}.")


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
        raise ValueError(f"update_: starts, stops, rates and decays must be equally long, got {lengths}.")
    end = 0
    for start, stop in zip(starts, stops, strict=True):
        if not end <= start <= stop <= size:
            raise ValueError(
                f"update_: runs must be in order, apart and inside [0, {size}), got [{start}, {stop}) "
                f"after one that ends at {end}."
            )
        end = stop
    if len(factors) > 2:
        raise ValueError(f"update_: at most two factors, got {len(factors)}; multiply some of them first.")
    if offset < 0 or offset % UNIT:
        raise ValueError(f"update_: offset must be a multiple of {UNIT}, got {offset}.")


def num_blocks(size: int) -> int:
    """How many scales `size` elements have."""
    return -(-size // BLOCK)
