"""A recording in words, one line a call: what ranks compare, whose initialisations must be the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .._torch_compat import OpOverload
from ..ops.same import checksum
from .call_log import BufferView, LoggedCall, Version, closure
from .rng_marks import Restore

_SHOWN = 4  # values of a constant


def described(
    calls: Sequence[LoggedCall], versions: Sequence[Version], leaves: Sequence[tuple[str, BufferView]]
) -> list[str]:
    """Return what a recording draws and computes for its leaves, with their names. Call it before the replay.

    Equal lines give equal values, if the default generators are in equal states. What has no part in that is left
    out: devices' numbers, addresses, and calls that no leaf and no draw needs.
    """
    return list(_Describer(versions, leaves).lines(calls, leaves))


class _Describer:
    def __init__(self, versions: Sequence[Version], leaves: Sequence[tuple[str, BufferView]]) -> None:
        self._versions = versions
        self._names: dict[int, str] = {}
        for name, region in reversed(leaves):
            self._names[region.version] = name
        self._constants: dict[int, BufferView] = {}

    def lines(self, calls: Sequence[LoggedCall], leaves: Sequence[tuple[str, BufferView]]) -> Iterator[str]:
        last_writes = [self._versions[region.version].last_write for _, region in leaves]
        random = [i for i, call in enumerate(calls) if call.is_random]
        for i in sorted(closure(list(calls), random + [w for w in last_writes if w is not None])):
            yield self._call(calls[i])
        for name, region in leaves:
            yield f"{name} is {self._told(region)}"
        for region in self._constants.values():
            yield f"{self._name(region)} is given: {self._values(region)}"

    def _call(self, call: LoggedCall) -> str:
        if isinstance(call.func, Restore):
            given = call.func.source
            return (
                f"a generator is now{_in_state(given) if isinstance(given, torch.Tensor) else ' in a state of before'}"
            )
        name = call.func.name() if isinstance(call.func, OpOverload) else getattr(call.func, "__name__", "a sampler")
        arguments = [self._told(x) for x in call.args] + [f"{k}={self._told(x)}" for k, x in call.kwargs.items()]
        made = ", ".join(self._told(x) for x in call.outputs if x is not None)
        return f"{made + ' = ' if made else ''}{name.removeprefix('aten::')}({', '.join(arguments)})"

    def _told(self, x: Any) -> str:
        if isinstance(x, BufferView):
            plain = x.stride == torch.empty(x.size, device="meta").stride()
            place = "" if plain and not x.offset else f" strides {list(x.stride)} from {x.offset}"
            return f"{self._name(x)} {list(x.size)}{place} {str(x.dtype).removeprefix('torch.')}{' conj' * x.conj}"
        if isinstance(x, list | tuple):
            return f"[{', '.join(map(self._told, x))}]"
        if isinstance(x, torch.device):
            return x.type
        if isinstance(x, torch.Generator):
            return f"a generator{'' if _is_default(x) else _in_state(x.get_state())}"
        plain = x is None or isinstance(x, bool | int | float | complex | str | torch.dtype)
        return repr(x) if plain or isinstance(x, torch.layout | torch.memory_format) else type(x).__name__

    def _name(self, region: BufferView) -> str:
        if self._versions[region.version].constant is not None:
            self._constants.setdefault(region.version, region)
        return self._names.setdefault(region.version, f"value {len(self._names)}")

    def _values(self, region: BufferView) -> str:
        storage = self._versions[region.version].constant
        assert storage is not None
        octets, size = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage), region.dtype.itemsize
        if octets.is_meta:
            return "shapes alone"
        shown = octets[: min(_SHOWN, len(octets) // size) * size]
        rest = "" if len(shown) == len(octets) else f", ... {checksum(octets)}"
        return f"{', '.join(map(str, shown.view(region.dtype).tolist()))}{rest}"


def _in_state(state: torch.Tensor) -> str:
    """Return the seed, which a state begins with, and what else differs if the state does."""
    return f" in the state {checksum(state)} of seed {int(state[:8].view(torch.int64))}"


def _is_default(generator: torch.Generator) -> bool:
    if generator.device.type == "cpu":
        return generator is torch.default_generator
    module = getattr(torch, generator.device.type, None)
    return any(generator is x for x in getattr(module, "default_generators", ()))
