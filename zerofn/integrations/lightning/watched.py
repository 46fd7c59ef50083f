"""A `LightningModule` while its training step is captured: what it logs is collected, what changes is an input."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

import zerofn

_NOT_HERE = (
    "training_step calls self.{}(), and is captured: it would be called once, and not again. Do it in "
    "on_train_batch_start or on_train_batch_end, which run at every batch."
)


class Watch:
    """What a module's training step logs and reads. One for a module, as long as a strategy has it.

    `calls`: every (name, options) that `self.log` was called with; a captured step returns their values by number.
    `reads_epoch`: whether the step has read the epoch, of which it is captured anew.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.reads_epoch = False
        self._logged: dict[str, Tensor] | None = None
        self._global_step: Tensor | None = None

    @property
    def capturing(self) -> bool:
        """Whether the training step runs now, to be captured."""
        return self._logged is not None

    @contextlib.contextmanager
    def recording(self, global_step: Tensor) -> Iterator[dict[str, Tensor]]:
        """Inside, the training step runs. Yields what it logs: number among `calls` -> value."""
        self._logged, self._global_step = {}, global_step
        try:
            yield self._logged
        finally:
            self._logged = self._global_step = None

    def log(self, name: str, value: Any, options: dict[str, Any]) -> None:
        """Take what `self.log` got."""
        if isinstance(value, Mapping):
            raise ValueError(f"self.log({name!r}, ...) got a dict; a captured step logs a tensor at a time.")
        if not isinstance(value, Tensor):
            kind = "a number" if isinstance(value, int | float) else f"a {type(value).__name__}"
            raise ValueError(
                f"self.log({name!r}, ...) got {kind} in training_step, which is captured: it would stay what it was "
                "then. Log a tensor that is computed from the batch, or log it in on_train_batch_end."
            )
        call = (name, options)
        if call not in self.calls:
            self.calls.append(call)
        assert self._logged is not None
        self._logged[str(self.calls.index(call))] = value.detach()

    def replay(self, module: LightningModule, logged: Mapping[str, Tensor]) -> None:
        """Log the values of a step that has run."""
        for number in sorted(logged, key=int):
            name, options = self.calls[int(number)]
            module.log(name, logged[number], **options)

    def step_now(self) -> Tensor:
        """The number of the step, an input of the captured one."""
        assert self._global_step is not None
        return self._global_step


class _Watched:
    """What a watched module does in another way while its training step is captured."""

    _zerofn_watch: Watch

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if not self._zerofn_watch.capturing:
            super().log(name, value, *args, **kwargs)  # type: ignore[misc]
            return
        if args:
            raise ValueError(f"self.log({name!r}, ...): give its options by name.")
        self._zerofn_watch.log(name, value, kwargs)

    @property
    def global_step(self) -> Any:
        watch = self._zerofn_watch
        return watch.step_now() if watch.capturing else super().global_step  # type: ignore[misc]

    @property
    def current_epoch(self) -> int:
        if self._zerofn_watch.capturing:
            self._zerofn_watch.reads_epoch = True
        found = self.__dict__.get("_trainer")
        return 0 if found is None else int(found.current_epoch)

    @property
    def trainer(self) -> Any:
        found = super().trainer  # type: ignore[misc]
        return _WatchedTrainer(found, self) if self._zerofn_watch.capturing else found

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        LightningModule.trainer.fset(self, trainer)  # type: ignore[attr-defined]


def _refused(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._zerofn_watch.capturing:
            raise ValueError(f"{type(self).__name__}: {_NOT_HERE.format(name)}")
        return getattr(super(self._zerofn_class, self), name)(*args, **kwargs)

    return method


_REFUSED = ("optimizers", "lr_schedulers", "manual_backward", "toggle_optimizer", "print")


class _WatchedTrainer:
    """The trainer as a captured step sees it."""

    def __init__(self, trainer: Any, module: Any) -> None:
        self._trainer, self._module = trainer, module

    def __getattr__(self, name: str) -> Any:
        if name in ("global_step", "current_epoch"):
            return getattr(self._module, name)
        return getattr(self._trainer, name)


def watch(module: LightningModule) -> Watch:
    """Let a module be watched, until `unwatch`."""
    found: Watch | None = module.__dict__.get("_zerofn_watch")
    if found is None:
        kind = type(module)
        refused = {name: _refused(name) for name in _REFUSED}
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        made = type(kind.__name__, (_Watched, kind), {**names, **refused})
        made._zerofn_class = made  # type: ignore[attr-defined]
        found = Watch()
        object.__setattr__(module, "_zerofn_watch", found)
        module.__class__ = made
    return found


def unwatch(module: LightningModule) -> None:
    """Give a module its own class back."""
    if module.__dict__.pop("_zerofn_watch", None) is not None:
        module.__class__ = type(module).__mro__[2]


def as_batch(x: Any) -> Any:
    """Return a batch as a tree that a compiled step takes: mappings of any kind become dicts."""
    if isinstance(x, Mapping):
        return {k: as_batch(v) for k, v in x.items()}
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*map(as_batch, x))
    if isinstance(x, list | tuple):
        return type(x)(map(as_batch, x))
    return x


def computes(precision: str | None) -> torch.dtype | None:
    """Return the dtype in which a module computes, None for its own."""
    return {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def floats_to(x: Any, dtype: torch.dtype | None) -> Any:
    """Return a tree whose floating-point tensors have a dtype, if one is given."""
    if dtype is None:
        return x
    return zerofn.tree_map(lambda v: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v, x)
