"""A `LightningModule` while its training step is captured: what it logs is logged later, what changes is an input."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from ..deferred_values import Done, Later, refuse
from ..recording import Recording

_NOT_HERE = (
    "training_step calls self.{}(), but is captured, so the method would be called only once. Call it in "
    "on_train_batch_start or on_train_batch_end, which run for every batch."
)
_REFUSED = (
    "optimizers", "lr_schedulers", "manual_backward", "toggle_optimizer", "toggled_optimizer", "untoggle_optimizer",
    "clip_gradients", "freeze", "unfreeze",
)  # fmt: skip
_OF_METRICS = ("compute", "forward", "reset", "update")
_CONTAINERS = (
    "callback_metrics", "logged_metrics", "progress_bar_metrics", "lr_scheduler_configs", "optimizers", "fit_loop",
)  # fmt: skip
_KINDS = (bool, int, float, str, type(None))


class ModuleWatch:
    """What a module's training step reads and logs. One for a module, as long as a strategy has it.

    `reads`: what the step has read of the trainer, such as the epoch; it is captured anew when that changes.
    """

    def __init__(self) -> None:
        self.reads: dict[str, Any] = {}
        self._recording: Recording | None = None
        self._step: Any = None
        self._numbers: Sequence[int] = ()  # what the step that has run was given beside the batch
        self._held: dict[int, _Held] = {}

    @property
    def recording(self) -> Recording | None:
        """That of the training step, while it runs to be captured."""
        return self._recording

    @contextlib.contextmanager
    def during(self, module: LightningModule, recording: Recording, global_step: Tensor) -> Iterator[None]:
        """Inside, the training step runs. Metrics are called when the step has run."""
        self._recording = recording
        self._step = Later(Done(_step_of, (_Held(module),), {}), lambda: global_step)
        metrics = [x for x in module.modules() if isinstance(x, Metric | MetricCollection)]
        kinds = [type(x) for x in metrics]
        _WATCHES.update((id(x), self) for x in metrics)
        for x in metrics:
            kind: Any = type(x)
            x.__class__ = _later_class(kind)
        try:
            yield
        finally:
            for x, kind in zip(metrics, kinds, strict=True):
                x.__class__ = kind
                del _WATCHES[id(x)]
            self._recording = self._step = None

    def log(self, name: str, value: Any, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        """Log when the step has run."""
        if not isinstance(value, Tensor | Later | Metric):
            kind = "a number" if isinstance(value, int | float) else f"a {type(value).__name__}"
            raise ValueError(
                f"self.log({name!r}, ...) got {kind} in training_step, which is captured, so all steps would log the "
                "value of the first. Log a tensor that is computed from the batch, or log this value in "
                "on_train_batch_end."
            )
        self.call("log", name, value, *args, **options)

    def call(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of the module when the step has run."""
        assert self._recording is not None
        self._recording.call((), name, args, kwargs)

    def of_metric(self, metric: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Later:
        """Call a method of a metric when the step has run. Returns what it will return."""
        assert self._recording is not None
        held = self._held.setdefault(id(metric), _Held(metric))
        kind = type(metric).__name__

        def now() -> Any:
            refuse(
                f"training_step computes with the result of the metric {kind}, but metrics are called only after the "
                "compiled step has run. Use the function of torchmetrics.functional instead."
            )

        return self._recording.later(Done(_method, (held, name, *args), kwargs), now)

    # ---- what changes from batch to batch

    def step_now(self) -> Any:
        """The number of the step, an input of the captured one."""
        return self._step

    def number(self, k: int, x: Tensor) -> Later:
        """Return the k-th number that the step is given beside the batch. `x`: what stands for it."""
        return Later(Done(self._number, (k,), {}), lambda: x)

    def give(self, numbers: Sequence[int]) -> None:
        """Take the numbers of a step that has run."""
        self._numbers = numbers

    def _number(self, k: int) -> int:
        return self._numbers[k]

    def read(self, trainer: Any, name: str) -> Any:
        """Return an attribute of the trainer as the step reads it."""
        if name in _CONTAINERS:
            raise ValueError(
                f"training_step reads self.trainer.{name}, but is captured, so all steps would use the value of the "
                "first. Read it in on_train_batch_start or on_train_batch_end, or pass it in the batch."
            )
        value = getattr(trainer, name)
        if type(value) in _KINDS:
            self.reads.setdefault(name, value)
        return value

    def changed(self, trainer: Any) -> dict[str, Any]:
        """Return what differs now from what the step has read first."""
        now = {name: getattr(trainer, name) for name in self.reads}
        return {name: x for name, x in now.items() if x != self.reads[name]}


class _Held:
    """An object in a program of effects, which compares objects by identity."""

    def __init__(self, x: Any) -> None:
        self.x = x


def _step_of(held: _Held) -> int:
    return int(held.x.global_step)


def _method(held: _Held, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(held.x, name)(*args, **kwargs)


_WATCHES: dict[int, ModuleWatch] = {}  # of the metrics whose module's step is captured, by id


@functools.cache
def _later_class(kind: Any) -> Any:
    """Return a class whose objects are called later."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _WATCHES[id(self)].of_metric(self, "__call__", args, kwargs)

    def __getattribute__(self: Any, name: str) -> Any:
        if name in _OF_METRICS:
            return functools.partial(_of_metric, self, name)
        return kind.__getattribute__(self, name)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {**names, "__call__": __call__, "__getattribute__": __getattribute__})


def _of_metric(metric: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    return _WATCHES[id(metric)].of_metric(metric, name, args, kwargs)


class _Watched:
    """What a watched module does in another way while its training step is captured."""

    __zerofn_watch__: ModuleWatch

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if self.__zerofn_watch__.recording is None:
            super().log(name, value, *args, **kwargs)  # type: ignore[misc]
        else:
            self.__zerofn_watch__.log(name, value, args, kwargs)

    def log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        if self.__zerofn_watch__.recording is not None and isinstance(dictionary, Later | MetricCollection):
            self.__zerofn_watch__.call("log_dict", dictionary, *args, **kwargs)
        else:
            super().log_dict(dictionary, *args, **kwargs)  # type: ignore[misc]

    @property
    def global_step(self) -> Any:
        watch = self.__zerofn_watch__
        return super().global_step if watch.recording is None else watch.step_now()  # type: ignore[misc]

    @property
    def current_epoch(self) -> int:
        found = self.__dict__.get("_trainer")
        if found is None:
            return 0
        watch = self.__zerofn_watch__
        return int(found.current_epoch if watch.recording is None else watch.read(found, "current_epoch"))

    @property
    def trainer(self) -> Any:
        found = super().trainer  # type: ignore[misc]
        return found if self.__zerofn_watch__.recording is None else _WatchedTrainer(found, self)

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        LightningModule.trainer.fset(self, trainer)  # type: ignore[attr-defined]


def _refused(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.__zerofn_watch__.recording is not None:
            raise ValueError(f"{type(self).__name__}: {_NOT_HERE.format(name)}")
        return getattr(super(self.__zerofn_class__, self), name)(*args, **kwargs)

    return method


class _WatchedTrainer:
    """The trainer as a captured step sees it."""

    def __init__(self, trainer: Any, module: Any) -> None:
        self.__dict__.update(_trainer=trainer, _module=module)

    def __getattr__(self, name: str) -> Any:
        if name in ("global_step", "current_epoch", "logger", "loggers"):
            return getattr(self._module, name)
        return self._module.__zerofn_watch__.read(self._trainer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise ValueError(
            f"training_step sets self.trainer.{name}, but is captured, so the attribute would be set only once. Set it "
            "in on_train_batch_end, which runs for every batch."
        )


def watch(module: LightningModule) -> ModuleWatch:
    """Let a module be watched, until `unwatch`."""
    found: ModuleWatch | None = module.__dict__.get("__zerofn_watch__")
    if found is None:
        kind = type(module)
        refused = {name: _refused(name) for name in _REFUSED}
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        made = type(kind.__name__, (_Watched, kind), {**names, **refused})
        made.__zerofn_class__ = made  # type: ignore[attr-defined]
        found = ModuleWatch()
        object.__setattr__(module, "__zerofn_watch__", found)
        module.__class__ = made
    return found


def unwatch(module: LightningModule) -> None:
    """Give a module its own class back."""
    if module.__dict__.pop("__zerofn_watch__", None) is not None:
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
