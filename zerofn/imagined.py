"""Planning for machines that are not there.

Inside a machine that is imagined a state's tensors are fake, shapes without memory; no drive is touched and no other
rank is asked.
Fake CUDA tensors cannot be differentiated without a GPU. So an accelerator that is not there is stood for by the device
"cpu", for which torch has every operation that it has for a GPU, and its host's memory by "meta".
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ._torch_compat import FakeTensorMode

_current: ContextVar[Imagined | None] = ContextVar("imagined", default=None)
_rehearsal: ContextVar[Rehearsal | None] = ContextVar("rehearsal", default=None)


@contextlib.contextmanager
def inside(variable: ContextVar[Any], value: object) -> Iterator[None]:
    """Inside, a variable has a value."""
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)


@dataclass(frozen=True)
class Imagined:
    """`accelerator`: whether models compute on a device with memory of its own. `dram`, `link`: bytes a second that a
    rank has of its host's memory, and between host and device."""

    accelerator: bool
    dram: float
    link: float
    mode: FakeTensorMode = field(default_factory=lambda: FakeTensorMode(allow_non_fake_inputs=True), compare=False)

    def __call__(self) -> contextlib.AbstractContextManager[None]:
        """Inside, this machine is imagined."""
        return inside(_current, self)

    def zeros(self, size: int | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor without memory."""
        with self.mode:
            return torch.zeros(size, dtype=dtype, device=device)

    def like(self, x: Tensor) -> Tensor:
        """A tensor without memory, of the shape, strides and dtype of `x`, where models compute; a number is 0."""
        if not x.dim():
            return torch.zeros((), dtype=x.dtype)
        with self.mode:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")


class Rehearsal:
    """A script that runs to see what it would train: `zerofn.shard` notes what it is given and makes a state without
    memory, and the first call of the compiled step named `name` ends the script; without a name, of one that is given
    that state. Other compiled functions return ones."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.init: Any = None
        self.state: Any = None
        self.passed: list[Callable[..., Any]] = []  # other functions that were called
        self.options: dict[str, Any] = {}

    def __call__(self) -> contextlib.AbstractContextManager[None]:
        """Inside, scripts are rehearsed."""
        return inside(_rehearsal, self)

    def come_to(self, step: Callable[..., Any], state: Any, batch: Any) -> None:
        """Raise `Reached` where this is the step that is looked for."""
        if self.name == getattr(step, "__name__", "") or not self.name and state is self.state:
            raise Reached(self, step, batch)
        if self.passed.count(step) and state is self.state:
            names = ", ".join(sorted({repr(getattr(x, "__name__", x)) for x in self.passed}))
            raise ValueError(f"the script calls no compiled step {self.name!r}; it calls {names}.")
        self.passed.append(step)


class Reached(BaseException):
    """A rehearsal has come to the step: `init` and `options` as `shard` was given them, `step`, and its `batch`."""

    def __init__(self, rehearsal: Rehearsal, step: Callable[..., Any], batch: Any) -> None:
        super().__init__("the rehearsed script has come to its step")
        self.init, self.options, self.step, self.batch = rehearsal.init, rehearsal.options, step, batch


def rehearsing() -> Rehearsal | None:
    """The rehearsal that goes on."""
    return _rehearsal.get()


def imagining() -> Imagined | None:
    """The machine that is imagined; None where things are what they are."""
    return _current.get()


def host() -> torch.device:
    """The device that host memory is."""
    machine = imagining()
    return torch.device("meta" if machine is not None and machine.accelerator else "cpu")


def is_host(device: torch.device) -> bool:
    """Whether a device is the host, and its memory host memory."""
    return device.type == host().type
