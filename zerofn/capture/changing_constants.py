"""Refuse what would be a constant of a captured step though each call takes another value: draws from generators of
Python and NumPy, the next value of an iterator, a random identifier, torch's seed.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import pickle
import random
import sys
import threading
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import FrameType, MappingProxyType
from typing import Any

import numpy as np
import torch

from ..util.classes import of_class
from ..util.patches import Patches
from ..util.process import instead, the
from ..util.user_line import OURS, library_prefixes, of_python
from .model_settings import settings_behind

_GLOBAL = {"Python's random": random.getstate.__self__, "numpy.random": np.random.get_state.__self__}  # type: ignore[attr-defined]
_MODULES = {"Python's random": random, "numpy.random": np.random}
_WAYS_OUT = "outside the step and pass it in the batch as a tensor"
_BY_ANOTHER = " If another thread draws from it meanwhile, give that thread a generator of its own."
_UNDER = ", in a step of your own under zerofn.random.randomness(state.rng_at())"


class ChangingConstant(RuntimeError):
    """The step took a value that the next call would not take. The message says what from, and what to write.

    `here`: whether it was raised where the step took the value, or once the step was over.
    """

    here = False


def is_moving(value: Any) -> bool:
    """Whether reading a value changes it: a generator of random numbers, an iterator. A stream that is only written,
    such as a log or a notebook's output, gives a step nothing.

    >>> is_moving(random.Random(0)), is_moving(iter([1])), is_moving([1])
    (True, True, False)
    """
    if isinstance(value, io.IOBase):
        return not value.closed and value.readable()
    return is_generator(value) or (of_class(type(value), "__next__") is not None and not isinstance(value, type))


class _Watched:
    """The objects that a capture looks at beside the global generators, by what a message calls them."""

    def __init__(self, found: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.found = found


def watching(found: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Inside, `unmoved` also looks at these objects, by what a message calls them."""
    return instead(_Watched(found))


@contextlib.contextmanager
def unmoved(traces: bool = False) -> Iterator[None]:
    """Raise `ChangingConstant` if the code inside has moved a global generator or an object that is watched. With
    `traces`, name the line. Generators are set back. What other threads draw in the meantime, as libraries do that
    repeat a request, counts for nothing, and stays drawn.
    """
    with draws_noted:  # first, so that no draw of another thread lies between a position and the count of its draws
        yield from _unmoved(traces)


def _unmoved(traces: bool) -> Iterator[None]:
    found = {k: x for k, x in the(_Watched).found.items() if not any(x is y for y in _GLOBAL.values())}
    watched, drawn, mine = {**_GLOBAL, **found}, the(_Draws).by, threading.get_ident()
    begun = drawn.copy()
    before = {name: position_of(x) for name, x in watched.items()}
    accesses = {name: _access(x) for name, x in watched.items() if is_generator(x)}
    back = {name: partial(put, get()) for name, (get, put) in accesses.items()}

    def threads(name: str) -> set[int]:
        return {thread for (which, thread), num in [*drawn.items()] if which == name and num > begun[which, thread]}

    def by_others(name: str) -> bool:
        more = threads(name)
        return bool(more) and mine not in more

    def moved() -> str | None:
        return next((k for k, x in watched.items() if position_of(x) != before[k] and not by_others(k)), None)

    try:
        with _values_for_once, _lines(moved) if traces else contextlib.nullcontext(["", ""]) as lines:
            yield
        name = moved()
        if name is not None:
            other = _BY_ANOTHER if name in _GLOBAL and not threads(name) and threading.active_count() > 1 else ""
            raise ChangingConstant(_message(name, watched[name], *lines) + other)
    finally:
        for name, put in back.items():
            if not by_others(name):
                put()


def position_of(value: Any) -> Any:
    """Return what tells where a generator or an iterator is: unequal once something was taken from it."""
    if is_generator(value):
        return pickle.dumps(_access(value)[0]())
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        inner = value.gi_yieldfrom
        local = None if frame is None else [id(x) for x in frame.f_locals.values()]
        return local, getattr(frame, "f_lasti", None), position_of(inner) if is_moving(inner) else None
    with contextlib.suppress(Exception):
        return value.tell()  # a file's; none that is being iterated over has one
    if isinstance(own := getattr(value, "__dict__", None), dict) and own:
        return {k: x if isinstance(x, int | float | str | bool) else id(x) for k, x in own.items()}
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # copies of itertools' iterators are deprecated
        return [position_of(x) if is_moving(x) else id(x) if isinstance(x, list) else repr(x) for x in _parts(value)]
    return repr(value)  # that of itertools.count has the number


def _parts(iterator: Any) -> list[Any]:
    """What an iterator would be made of again: what it iterates over, and where it is."""
    made = iterator.__reduce__()
    return [*made[1], *made[2:]]


def is_generator(value: Any) -> bool:
    """Whether a value is a generator of random numbers, Python's or NumPy's."""
    numpys = isinstance(value, np.random.Generator | np.random.RandomState | np.random.BitGenerator)
    return numpys or (isinstance(value, random.Random) and not isinstance(value, random.SystemRandom))


def _access(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Return what gets a generator's state, and what sets it."""
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if isinstance(generator, np.random.RandomState):
        return partial(generator.get_state, legacy=False), generator.set_state
    bits = getattr(generator, "bit_generator", generator)
    return lambda: bits.state, partial(setattr, bits, "state")


def _message(name: str, value: Any, line: str, settings: str) -> str:
    if is_generator(value):
        draw = f"Draw {_WAYS_OUT}, or draw with torch{_UNDER}."
        return (
            f"the step draws from {name}{line}: the drawn values would be constants of the captured step."
            f"{settings or f' {draw}'}"
        )
    return (
        f"the step takes the next value of {name}{line}, a {type(value).__name__}: it would be a constant of the "
        f"captured step. Take it {_WAYS_OUT}. If it is a counter, store it in the state."
    )


class _Draws:
    """How often threads have drawn from a global generator while something was captured, by its name and the thread."""

    def __init__(self) -> None:
        self.by: Counter[tuple[str, int]] = Counter()


def _noted(name: str) -> Callable[[Any], Any]:
    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def draws(*args: Any, **kwargs: Any) -> Any:
            drawn, mine = the(_Draws).by, (name, threading.get_ident())
            drawn[mine] += 1
            try:
                return original(*args, **kwargs)
            finally:
                drawn[mine] += 1  # again, for whoever began to watch while it drew

        return draws

    return wrap


def _functions_of(module: types.ModuleType, generator: Any) -> list[str]:
    """Return the functions of a module that are methods of its global generator, but for those that only read it."""
    own = (name for name, x in vars(module).items() if getattr(x, "__self__", None) is generator)
    return [name for name in own if name not in ("getstate", "get_state")]


draws_noted = Patches(
    lambda: [
        (module, name, _noted(which))
        for which, module in _MODULES.items()
        for name in _functions_of(module, _GLOBAL[which])
    ]
)


# --- functions whose value is another one at each call, or after a seed ----------------------------------------------


def _refused(name: str) -> Callable[[Any], Any]:
    def wrap(original: Any) -> Any:
        def refuses(*args: Any, **kwargs: Any) -> Any:
            if _asked_by_user(sys._getframe(1)):
                error = ChangingConstant(
                    f"the step calls {name}: its value would be a constant of the captured step. Call it {_WAYS_OUT}, "
                    f"or draw with torch{_UNDER}."
                )
                error.here = True
                raise error
            return original(*args, **kwargs)

        return refuses

    return wrap


def _asked_by_user(frame: FrameType | None) -> bool:
    """Whether the user's code called, itself or through modules of Python's that draw for it."""
    while frame is not None and frame.f_globals.get("__name__") in ("uuid", "secrets", "random"):
        frame = frame.f_back
    return frame is not None and not _of_library(frame.f_code.co_filename)


def _of_library(file: str) -> bool:
    return file.startswith((OURS, *library_prefixes())) or of_python(file)


_values_for_once = Patches(
    lambda: [
        (os, "urandom", _refused("os.urandom, secrets or uuid")),
        (random, "_urandom", _refused("secrets or random.SystemRandom")),
        (torch, "initial_seed", _refused("torch.initial_seed()")),
        (torch.random, "initial_seed", _refused("torch.initial_seed()")),
    ]
)


@contextlib.contextmanager
def _lines(moved: Callable[[], str | None]) -> Iterator[list[str]]:
    """Inside, find the user's line at which something moves: ' at file:line', and what a model's settings have to do
    with it. Slow: it looks at every line.
    """
    found = ["", ""]
    last: list[tuple[FrameType, int]] = []
    passed_by = functools.cache(_of_library)  # which is asked at every call

    def tell() -> None:
        if last and not found[0] and moved() is not None:
            found[:] = f" at {last[0][0].f_code.co_filename}:{last[0][1]}", settings_behind(last)

    def look(frame: FrameType, event: str, _: Any) -> Any:
        if passed_by(frame.f_code.co_filename):
            return None
        tell()
        if event == "line" and last and last[0][0] is frame:
            last[0] = frame, frame.f_lineno  # its callers stand where they stood
        elif event in ("line", "call"):
            last[:] = _callers(frame)
        elif event == "return":  # the caller goes on in its line
            last[:] = itertools.dropwhile(lambda x: passed_by(x[0].f_code.co_filename), _callers(frame.f_back))
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        yield found
    finally:
        sys.settrace(before)
        tell()


def _callers(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back
