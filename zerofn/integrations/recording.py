"""One run of a host's method that is captured: what it reads and does, noted, while the host stays as it is."""

from __future__ import annotations

import functools
import gc
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from .asked_numbers import Asks
from .conditional_expressions import stored_by
from .deferred_values import (
    At,
    DeferredProgram,
    Done,
    Either,
    Later,
    ReadBefore,
    apply,
    has_later,
    is_traced,
    lowered,
    mapped,
    refuse,
    taken_from,
    text_of,
)
from .recording_containers import ALL, Path, is_recorder, kind_of, known_of, recorder

_OF_MODULES = frozenset(vars(nn.Module()))
# Attributes: the names of those whose changes between steps lead to no other capture, and of those whose changes do.
WRITTEN, FOLLOWED = "_zerofn_written", "_zerofn_followed"


class Recording:
    """One run of a method. `results`: tensors that the step must return, for `Effects.replay`.

    `kinds`: classes whose methods it reaches. `replayed`: see `Effects`. `rounds`: how often the method runs in a step.
    """

    def __init__(self, method: str, kinds: Sequence[type], replayed: frozenset[str], rounds: int = 1) -> None:
        self.results: dict[str, tuple[Tensor, ...]] = {}
        self.mode = Asks()
        self._method, self._kinds, self._replayed, self._rounds = method, kinds, replayed, rounds
        self._missing: set[tuple[Path, str]] = set()  # attributes of modules that were None
        self._stored: dict[int, frozenset[str]] = {}  # attributes that the methods of what is watched assign, by id
        self._lines: list[tuple[int | None, Any]] = []
        self._slots = 0
        self._read: dict[Path, set[Any]] = {}
        self._written: dict[Path, set[Any]] = {}
        self._paths: dict[int, Path] = {}  # of objects that are watched, by id
        self._objects: list[tuple[Any, type]] = []  # and what their classes were
        self._owners: dict[Path, Any] = {}  # the host, and modules
        self._followed: set[tuple[Path, str]] = set()  # attributes of modules whose changes lead to other captures
        self._now: dict[tuple[int, str], Any] = {}  # attributes that were written, or containers that stand for others

    # ---- the classes of objects

    def watch(self, x: Any, path: Path, stored: frozenset[str] | None = None) -> None:
        """Follow an object's attributes. `stored`: those that the step may assign; None: all that its class does."""
        kind: Any = type(x)
        try:
            x.__class__ = _watched_class(kind)
        except TypeError:  # written in C, or with slots
            return
        self._paths[id(x)] = path
        if stored is not None:
            self._owners[path] = x
        self._stored[id(x)] = _stored_by_class(kind) if stored is None else stored
        self._objects.append((x, kind))
        _RECORDINGS[id(x)] = self

    def leave(self) -> None:
        """Give objects their classes back."""
        for x, kind in self._objects:
            _RECORDINGS.pop(id(x), None)
            x.__class__ = kind

    def check_kept(self) -> None:
        """Raise for a number that something else has kept than what is watched: it would have that of the capture."""
        self._lines.clear()
        self._now.clear()
        for _ in range(2):  # a second one for what the first has freed the holders of
            if any(x() is not None for x, _ in self.mode.taken):
                gc.collect()
        for x, line in self.mode.taken:
            if x() is not None:
                refuse(
                    f"{self._method} reads a tensor's value at {line} and passes it to an object outside the module, "
                    "which would receive the value only once, while the step is captured. Store the value in an "
                    "attribute, `self.losses.append(loss.item())`, and pass it on in a callback."
                )

    def _is_users(self, x: Any) -> bool:
        """Whether an object may be changed by the method: it is of a class beside the host's, or of no library."""
        kind = type(x)
        if (
            isinstance(x, nn.Module | Tensor | type)
            or type(kind.__setattr__) is FunctionType
            or not hasattr(x, "__dict__")
        ):
            return False
        roots = {k.__module__.partition(".")[0] for k in self._kinds}
        return kind.__module__.partition(".")[0] in roots or is_of_no_library(kind.__module__)

    # ---- what is read

    def attribute(self, x: Any, name: str, get: Callable[[], Any]) -> Any:
        """Return an attribute as the method reads it."""
        path, key = self._paths[id(x)], (True, name)
        if (id(x), name) in self._now:
            value = self._now[id(x), name]
            if kind_of(value) is not None and not is_recorder(value):
                value = self._now[id(x), name] = recorder(value, self, (*path, key))
            return value
        value = get()
        if name in self._replayed and not path and value is not None:
            return _Calls(self, (*path, key), lambda: value)
        if (kind_of(value) is not None) and name not in _OF_MODULES:
            value = self._now[id(x), name] = recorder(value, self, (*path, key))
        elif self._may_store(x, name):
            return self._later(path, key, value)
        elif id(value) not in self._paths and name in getattr(x, "__dict__", ()) and self._is_users(value):
            self.watch(value, (*path, key))
        return value

    def _may_store(self, x: Any, name: str) -> bool:
        return not _is_of_module(x, name, None) and name in self._stored[id(x)]

    def entry(self, path: Path, key: Any, value: Any, put: Callable[[Any], None]) -> Any:
        """Return a container's entry as the method reads it."""
        if kind_of(value) is not None:
            value = recorder(value, self, (*path, (False, key)))
            put(value)
            return value
        if is_recorder(value) or is_traced(value) or isinstance(value, Later):
            return value
        return self._later(path, (False, key), value)

    def got(self, path: Path, key: Any, default: Any, value: Any) -> Later:
        """Return what `get` of a dict gives the method."""
        return self._slot(
            Done(_call, (At(path), "get", key, default), {}), lambda: self._concrete(path, (False, key), value)
        )

    def _later(self, path: Path, key: Any, value: Any) -> Any:
        if isinstance(value, int | float | Tensor) and not isinstance(value, bool):
            return self._slot(At((*path, key)), lambda: self._concrete(path, key, value))
        return self._concrete(path, key, value)

    def _slot(self, expression: Any, now: Callable[[], Any]) -> Later:
        self._slots += 1
        self._lines.append((self._slots - 1, expression))
        return Later(ReadBefore(self._slots - 1), now)

    def _concrete(self, path: Path, key: Any, value: Any) -> Any:
        if value is None:
            self._missing.add(self._place(path, key))
        self.read(path, key)
        return value

    def read(self, path: Path, key: Any) -> None:
        """Note that the step continues with what it finds."""
        key = key if key is ALL or type(key) is tuple else (False, key)
        self._read.setdefault(path, set()).add(key)
        self._compare(path, key, self._written.get(path, set()))

    # ---- what is written

    def write(self, path: Path, key: Any, new: bool = False) -> None:
        """Note what is written. `new`: an entry that was not there."""
        key = key if key is ALL or type(key) is tuple and len(key) == 2 else (False, key)
        self._written.setdefault(path, set()).update({key, ALL} if new else {key})
        self._compare(path, key, self._read.get(path, set()))
        if new and ALL in self._read.get(path, set()):
            self._refuse(path, ALL)

    def _compare(self, path: Path, key: Any, others: set[Any]) -> None:
        if key in others or (others and key is ALL) or (ALL in others):
            self._refuse(path, ALL if ALL in others else key)

    def _refuse(self, path: Path, key: Any) -> None:
        """Raise for what the host reads and changes. Changes of a module's lead to other captures, but between the
        microbatches of one step there is none: only a cache that is filled may change there.
        """
        if (place := self._place(path, key))[0] and (self._rounds == 1 or place in self._missing):
            self._followed.add(place)
            return
        what = text_of(path if key is ALL else (*path, key))
        if place[0]:
            refuse(
                f"{self._method} reads {what} and changes it. The method is captured once for the {self._rounds} "
                "microbatches of a step, so all of them would use the value that the first one reads. Change the value "
                "in a callback, store it as a tensor in a buffer, or train without gradient accumulation."
            )
        refuse(
            f"{self._method} reads {what} and changes it. The method runs only once, when it is captured, so later "
            "steps would use the value of that time; appending, assigning and adding are repeated at every step, "
            "reading is not. Read the value in a callback, or pass it in the batch. For a value that each step fills, "
            "reads and clears, use a local or global variable."
        )

    def call(self, path: Path, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note a call of a method of what is at a path."""
        self._lines.append((None, Done(_call, (At(path), name, *args), dict(kwargs))))

    def later(self, expression: Any, now: Callable[[], Any]) -> Later:
        """Note what is called when the step has run, and return its value. `now`: see `Later`."""
        found = self._slot(expression, now)
        self._lines.append((None, found.expression))  # called even if nobody asks for its value
        return found

    def assign(self, x: Any, name: str, value: Any) -> None:
        """Note an assignment."""
        path = self._paths[id(x)]
        if is_recorder(value) and known_of(value).path == (*path, (True, name)):
            return  # `self.losses += [x]`, which has extended it
        self.write(path, (True, name))
        self._now[id(x), name] = value
        self._lines.append((None, Done(setattr, (At(path), name, value), {})))

    # ---- choices

    def choose(self, test: Any, first: Callable[[], Any], second: Callable[[], Any]) -> Any:
        """Return `first() if test else second()`, later where `test` is known later."""
        if is_traced(test):
            test = test.item()
        if not isinstance(test, Later):
            return first() if test else second()
        before = len(self._lines)
        found = first(), second()
        if any(slot is None for slot, _ in self._lines[before:]):
            refuse(
                f"{self._method} branches on a value that is not known while it is captured. Make both branches call "
                "the same method with different values: `self.x.append(a if condition else b)`."
            )
        return Later(Either(test, *found), lambda: torch.where(*map(_as_tensor, (test, *found))))

    def called(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return a number's function, later where the number is known later."""
        if function in (float, int, bool) and len(args) == 1 and is_traced(args[0]):
            args = (args[0].item(),)
        for x in args:
            if is_recorder(x):
                iter(x)
        if has_later([*args, *kwargs.values()]) and _is_of_numbers(function):
            return apply(function, *args, **kwargs)
        return function(*args, **kwargs)

    # ---- the end

    def plain(self, out: Any) -> Any:
        """Return what the method has returned, with tensors for numbers that are known later."""
        if isinstance(out, Later):
            return taken_from(out)
        return mapped(self.plain, out)

    def program(self) -> tuple[DeferredProgram, tuple[Tensor, ...]]:
        """Return (what to do after each run, the results that takes)."""
        return lowered(self._lines, lambda x: At(known_of(x).path) if is_recorder(x) else x)

    def written(self) -> Iterator[tuple[Any, frozenset[str], frozenset[str]]]:
        """Yield (the host or a module, those of its attributes that the step changes and does not go on with, and those
        that it reads, too).
        """
        places = {self._place(path, key) for path, keys in self._written.items() for key in keys} - self._followed
        for owner, x in self._owners.items():
            changed, followed = (frozenset(name for at, name in y if at == owner) for y in (places, self._followed))
            yield x, changed, followed

    def _place(self, path: Path, key: Any) -> tuple[Path, str]:
        """Return (where the host or module is that has what is at a path, by which attribute)."""
        whole = path if key is ALL else (*path, key)
        owner = max((x for x in self._owners if x == whole[: len(x)] and x != whole), key=len)
        return owner, whole[len(owner)][1]


class _Calls:
    """An attribute of the host whose calls are made after the step. `value()`: what is there now."""

    def __init__(self, recording: Recording, path: Path, value: Callable[[], Any]) -> None:
        self._recording, self._path, self._value = recording, path, value

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for isinstance
        return type(self._value())

    def __getattr__(self, name: str) -> _Calls:
        return _Calls(self._recording, (*self._path, (True, name)), lambda: getattr(self._value(), name))

    def __len__(self) -> int:
        return len(self._value())

    def __getitem__(self, key: Any) -> _Calls:
        return _Calls(self._recording, (*self._path, (False, key)), lambda: self._value()[key])

    def __iter__(self) -> Iterator[_Calls]:
        return map(self.__getitem__, range(len(self)))

    def __bool__(self) -> bool:
        return bool(self._value())

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._recording.call(self._path[:-1], self._path[-1][1], args, kwargs)


def _call(x: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(x, name)(*args, **kwargs)


def _as_tensor(x: Any) -> Any:
    x = taken_from(x) if isinstance(x, Later) else x
    return x if isinstance(x, Tensor) else torch.tensor(x)


def _is_of_numbers(function: Any) -> bool:
    module = getattr(function, "__module__", None) or "numpy"  # a ufunc has none
    return module.partition(".")[0] in ("builtins", "math", "numpy", "statistics")


@functools.cache
def is_of_no_library(module: str) -> bool:
    """Whether a Python module, by name, is the user's."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if module == "__main__" or file is None:
        return module == "__main__"
    ours = module.partition(".")[0] == __name__.partition(".")[0]
    return not ours and "site-packages" not in file and not file.startswith(sysconfig.get_paths()["stdlib"])


@functools.cache
def _stored_by_class(kind: Any) -> frozenset[str]:
    methods = (f for k in kind.__mro__ for f in vars(k).values() if isinstance(f, FunctionType))
    return frozenset(name for f in methods for name in stored_by(f.__code__))


_RECORDINGS: dict[int, Recording] = {}  # of the objects that are watched, by id


@functools.cache
def _watched_class(kind: Any) -> Any:
    """Return a class whose objects tell their recording what is read and written of them."""

    def __getattribute__(self: Any, name: str) -> Any:
        get = functools.partial(kind.__getattribute__, self, name)
        recording = _RECORDINGS.get(id(self))
        if recording is None or name.startswith("__") or name in (WRITTEN, FOLLOWED):
            return get()
        return recording.attribute(self, name, get)

    def __setattr__(self: Any, name: str, value: Any) -> None:
        recording = _RECORDINGS.get(id(self))
        if recording is None or _is_of_module(self, name, value) or hasattr(getattr(kind, name, None), "__set__"):
            kind.__setattr__(self, name, value)
        else:
            recording.assign(self, name, value)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), {**names, "__getattribute__": __getattribute__, "__setattr__": __setattr__})


def _is_of_module(x: Any, name: str, value: Any) -> bool:
    """Whether an attribute is a parameter, a buffer or a part of a module, which are the state's."""
    if not isinstance(x, nn.Module):
        return False
    return (
        name == "training"
        or isinstance(value, nn.Module | nn.Parameter)
        and not is_traced(value)  # a parameter that the step is lent, and may keep
        or any(name in vars(x)[of] for of in ("_parameters", "_buffers", "_modules"))
    )
