"""What a captured step does to the object that it is a method of: done again after every run of the step.

A trainer's `compute_loss` and a module's `training_step` run once, to be captured. What they append to lists, and
assign or add to numbers and entries among the attributes of their host, is taken out of them: what a tensor's value
goes into becomes a result of the step, and `Effects.replay` does the rest with it on the host, in order, after every
run. So is what the `forward` of a user's modules does to them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .conditional_expressions import functions_of, may_change, named_by_users, reached, replaced, rewritten, stored_by
from .deferred_values import DeferredProgram
from .recording import FOLLOWED, WRITTEN, Recording, is_of_no_library


class Effects:
    """The effects of a method of `host`, `method`, over all its captures, and those of modules that it calls.

    `base`: the framework's class; what host's classes before it define is looked at. `replayed`: attributes of the
    host, such as "log" and "logger", of which every call is made after the step in place of while it is captured.
    `model`: the host's attribute that is a module; None for a host that is one. With its own class as `base`, the host
    is not looked at: an evaluation calls the model alone.
    `around`: other methods that a captured step calls.

        with effects.recording() as recording:
            loss = recording.plain(host.compute_loss(...))
        aux = recording.results                     # results of the step, beside its others
        ...
        effects.replay(aux_of_a_run)
    """

    def __init__(
        self,
        host: Any,
        method: str,
        base: type,
        replayed: Sequence[str] = (),
        model: str | None = None,
        around: Sequence[str] = (),
    ) -> None:
        self.host, self.method, self.replayed = host, method, frozenset(replayed)
        self._programs: dict[Any, tuple[str, DeferredProgram]] = {}
        vars(self)[WRITTEN] = frozenset(vars(self))  # no step is captured anew for what is kept here
        kinds = type(host).__mro__
        self.kinds = kinds[: kinds.index(base)]
        starts = (method, "forward") if isinstance(host, nn.Module) else (method,)
        methods = list(reached(self.kinds, starts, self.replayed))
        self.stored = _stored(methods)
        module = host if model is None else getattr(host, model)
        self._parts: list[tuple[str, nn.Module, frozenset[str]]] = []
        for name, part in module.named_modules() if isinstance(module, nn.Module) else ():
            kind: Any = type(part)
            own = _methods_of(kind) if part is not host else ()
            if own:
                self._parts.append((".".join(x for x in (model, name) if x), part, _stored(own)))
                methods += own
        self._methods = list(dict.fromkeys(methods))
        if self.kinds and not isinstance(host, nn.Module):  # whose mode a library's method sets, and a step follows
            vars(host)[WRITTEN] = vars(host).get(WRITTEN, frozenset()) | self._bookkeeping((method, *around))

    def _bookkeeping(self, starts: Sequence[str]) -> frozenset[str]:
        """Return the attributes that libraries' methods write as they go, such as a loop's counters, and that no
        function of the user's names that the step may run. No step is captured anew for them.
        """
        named = named_by_users(self.host, starts, is_of_no_library)
        methods = [
            (name, f)
            for kind in type(self.host).__mro__
            if not is_of_no_library(kind.__module__)
            for name, found in vars(kind).items()
            for f in functions_of(found)
        ]
        return frozenset(x for name, f in methods if name != "__init__" for x in stored_by(f.__code__) - named)

    @contextlib.contextmanager
    def recording(self, rounds: int = 1) -> Iterator[Any]:
        """Inside, the method runs to be captured, and the host stays as it is. `rounds`: how often in a step."""
        if not self._methods:  # the framework's own, which does nothing to it
            yield Unrecorded()
            return
        recording = Recording(self.method, self.kinds, self.replayed, rounds)
        found = {(kind, name): rewritten(f, recording.choose, recording.called) for kind, name, f in self._methods}
        back = replaced({key: f for key, f in found.items() if f is not None})
        if self.kinds:
            recording.watch(self.host, (), self.stored)
        for name, part, stored in self._parts:
            recording.watch(part, tuple((True, x) for x in name.split(".")), stored)
        try:
            with recording.mode:
                yield recording
        finally:
            recording.leave()
            back()
        self._keep(recording)
        recording.check_kept()

    def _keep(self, recording: Recording) -> None:
        program, results = recording.program()
        if not program.lines:
            return
        for x, changed, followed in recording.written():
            if followed := vars(x).get(FOLLOWED, frozenset()) | followed:
                vars(x)[FOLLOWED] = followed
            vars(x)[WRITTEN] = (vars(x).get(WRITTEN, frozenset()) | changed) - followed
        key = _key_of(program)
        name, _ = self._programs.setdefault(key, (f"effects {len(self._programs)}", program))
        recording.results[name] = results

    def replay(self, results: Mapping[str, Sequence[Tensor]], rounds: int | None = None) -> None:
        """Do to the host what the step that has run did. `rounds`: how many microbatches the results are stacks of."""
        programs = dict(self._programs.values())
        for name, found in results.items():
            program = programs[name]
            values = _with_numbers(found, program.numbers)
            for k in range(1 if rounds is None else rounds):
                program.run(self.host, values if rounds is None else [x[k] for x in values])


def _stored(methods: Iterable[tuple[type, str, Any]]) -> frozenset[str]:
    return frozenset(name for _, _, f in methods for name in stored_by(f.__code__))


@functools.cache
def _methods_of(kind: Any) -> tuple[tuple[type, str, Any], ...]:
    """Return (class, name, method) of those that the `forward` of a user's module names, if any of them may change it;
    none for a library's.
    """
    users = [x for x in kind.__mro__ if is_of_no_library(x.__module__)]
    found = tuple(reached(users, ["forward"]))
    return found if any(may_change(f.__code__) for _, _, f in found) else ()


def _with_numbers(found: Sequence[Tensor], numbers: Sequence[int]) -> list[Any]:
    """Return results of a step, with numbers where only numbers are asked: one transfer from the device for a dtype."""
    values: list[Any] = list(found)
    for dtype in {found[k].dtype for k in numbers}:
        these = [k for k in numbers if found[k].dtype is dtype]
        for k, x in zip(these, torch.stack([found[k] for k in these]).tolist(), strict=True):
            values[k] = x
    return values


def _key_of(x: Any) -> Any:
    """Return what is equal for equal programs."""
    if isinstance(x, list | tuple):
        return (type(x), *map(_key_of, x))
    if isinstance(x, dict):
        return (dict, *((k, _key_of(v)) for k, v in x.items()))
    try:
        hash(x)
    except TypeError:
        return id(x), type(x)
    return type(x), x


class Unrecorded:
    """A run of a method that is the framework's own."""

    def __init__(self) -> None:
        self.results: dict[str, tuple[Tensor, ...]] = {}

    def plain(self, out: Any) -> Any:
        """Return what the method has returned."""
        return out
