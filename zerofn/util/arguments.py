"""Arguments of public functions, looked at before anything is done with them, by the function's own annotations.

A wrong argument would otherwise be told in Python's or torch's words, by a line that the caller has not written, or
later, by a step that runs with it. What an annotation says besides the kinds below, the function looks at itself.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import numpy as np
import torch

from .errors import nearest

F = TypeVar("F", bound=Callable[..., Any])
K = TypeVar("K")


def _is_whole(x: Any) -> bool:
    return isinstance(x, Integral) and not isinstance(x, bool)


def _is_number(x: Any) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool) and x == x


def _is_path(x: Any) -> bool:
    if isinstance(x, str | os.PathLike):
        return os.fspath(x) not in ("", b"")
    return hasattr(type(x), "joinpath")  # of a place that fsspec reaches


def _is_sequence(x: Any) -> bool:
    return isinstance(x, Sequence) and not isinstance(x, str | bytes)


def _is_device(x: Any) -> bool:
    try:
        return isinstance(x, str | torch.device) and bool(torch.device(x))
    except RuntimeError:
        return False


_What = tuple[str, Callable[[Any], bool]]  # what something is, and whether a value is that
_TEXTS = ("a path", "a device")

# What stands in an annotation, with its brackets or without.
_KINDS: dict[str, _What] = {
    "None": ("None", lambda x: x is None),
    "bool": ("True or False", lambda x: isinstance(x, bool | np.bool_)),
    "int": ("a whole number", _is_whole),
    "float": ("a number", _is_number),
    "str": ("a string", lambda x: isinstance(x, str)),
    "os.PathLike": ("a path", _is_path),
    "Path": ("a path", _is_path),
    "Tensor": ("a tensor", lambda x: isinstance(x, torch.Tensor)),
    "torch.dtype": ("a torch.dtype", lambda x: isinstance(x, torch.dtype)),
    "torch.device": ("a device", _is_device),
    "nn.Module": ("a module", lambda x: isinstance(x, torch.nn.Module)),
    "Callable": ("a function", callable),
    **dict.fromkeys(("Mapping", "dict"), ("a dict", lambda x: isinstance(x, Mapping))),
    "Sequence": ("a list or tuple", _is_sequence),
    "Sequence[int]": ("a list or tuple of whole numbers", lambda x: _is_sequence(x) and all(map(_is_whole, x))),
    "Iterable": ("an iterable", lambda x: isinstance(x, Iterable) or hasattr(type(x), "__getitem__")),
}
_KINDS["Literal"] = _KINDS["str"]  # of words, as all that are written inside a signature


class _Kind(NamedTuple):
    words: str
    holds: tuple[Callable[[Any], bool], ...]


def checked(*names: str) -> Callable[[F], F]:
    """Wrap a function: raise `TypeError` for an argument that is not what its annotation says, or one too many.
    `names`: of the parameters whose kind to look at; all, if there are none.

    >>> @checked()
    ... def double(x: int) -> int:
    ...     return 2 * x
    >>> double("2")
    Traceback (most recent call last):
    TypeError: double: x must be a whole number, got '2'.
    """

    def wrap(function: F) -> F:
        parameters = inspect.signature(function).parameters.values()
        where = function.__qualname__.removesuffix(".__init__")
        known = {
            name: _instance(x) if isinstance(x, type) else _KINDS["str"]
            for name, x in inspect.unwrap(function).__globals__.items()
            if _is_plain_class(x) or _is_words(x)
        } | _KINDS
        single = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        kinds = {p.name: _kind_of(p.annotation, known) for p in single if not names or p.name in names}
        by_name = {name: kind for name, kind in kinds.items() if kind is not None}
        known_names = [p.name for p in single if p.kind is not p.POSITIONAL_ONLY]
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        by_place = [(p.name, by_name.get(p.name)) for p in single if p.kind is not p.KEYWORD_ONLY]

        @functools.wraps(function)
        def with_checks(*args: Any, **kwargs: Any) -> Any:
            for (name, kind), value in zip(by_place, args, strict=False):
                if kind is not None:
                    _check(where, name, kind, value)
            for name, value in kwargs.items():
                if name in by_name:
                    _check(where, name, by_name[name], value)
                elif not takes_any and name not in known_names:
                    raise TypeError(f"{where} has no argument {name!r}. {meant(name, known_names)}")
            return function(*args, **kwargs)

        return with_checks  # type: ignore[return-value]

    return wrap


def meant(name: str, known: Iterable[str]) -> str:
    """Return a sentence with the names that one may have meant.

    >>> meant("stag", ["stage", "mesh"]), meant("lr", ["stage", "mesh"])
    ("Did you mean 'stage'?", "Write one of 'stage', 'mesh'.")
    """
    near = nearest(name, known, cutoff=0.6)
    return f"Did you mean {' or '.join(map(repr, near))}?" if near else f"Write one of {', '.join(map(repr, known))}."


def known_arguments(function: F) -> F:
    """Wrap a function that looks at its arguments itself: a wrong keyword is answered with the one that was meant.

    >>> @known_arguments
    ... def clip(max_norm): ...
    >>> clip(max_nrom=1.0)
    Traceback (most recent call last):
    TypeError: clip has no argument 'max_nrom'. Did you mean 'max_norm'?
    """
    return checked("")(function)


def known_fields(kind: type[K]) -> type[K]:
    """Let a dataclass answer a wrong keyword with the field that was meant: a decorator above `dataclass`.

    >>> @known_fields
    ... @dataclasses.dataclass
    ... class Point:
    ...     row: int = 0
    >>> Point(rwo=1)
    Traceback (most recent call last):
    TypeError: Point has no argument 'rwo'. Did you mean 'row'?
    """
    plain: Callable[..., None] = kind.__init__
    names = [x.name for x in dataclasses.fields(kind) if x.init]  # type: ignore[arg-type]

    @functools.wraps(plain)
    def with_names(self: K, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in names:
                raise TypeError(f"{kind.__name__} has no argument {name!r}. {meant(name, names)}")
        plain(self, *args, **kwargs)

    kind.__init__ = with_names  # type: ignore[method-assign, assignment]
    return kind


def unchecked(function: F) -> F:
    """Return what stands in a function that `checked` has wrapped; any other function as it is."""
    return function.__wrapped__ if function.__code__ is _WITH_CHECKS else function  # type: ignore[attr-defined]


def check_fields(instance: Any, *names: str) -> None:
    """Raise `TypeError` if fields of a dataclass's instance are not what their annotations say. `names`: see `checked`.

    For `__post_init__`.
    """
    for field in dataclasses.fields(instance):
        kind = _kind_of_field(str(field.type)) if not names or field.name in names else None
        if kind is not None:
            _check(type(instance).__name__, field.name, kind, getattr(instance, field.name))


def _kind_of(annotation: Any, known: Mapping[str, _What]) -> _Kind | None:
    """Return what an annotation says, None if that is anything, or not known here."""
    parts = re.split(r" \| (?![^\[]*\])", annotation) if isinstance(annotation, str) else ["Any"]
    found = [_function(part) or known.get(part) or known.get(part.partition("[")[0]) for part in parts]
    if None in found:
        return None
    kinds = dict.fromkeys(x for x in found if x is not None)
    if any(words in _TEXTS for words, _ in kinds):  # which a text may be, and not every text is
        kinds = {x: None for x in kinds if x[0] != "a string"}
    words = [x for x, _ in kinds]
    return _Kind(" or ".join(filter(None, (", ".join(words[:-1]), words[-1]))), tuple(holds for _, holds in kinds))


@functools.cache
def _kind_of_field(annotation: str) -> _Kind | None:
    return _kind_of(annotation, _KINDS)


def _function(annotation: str) -> _What | None:
    """Return what `Callable[[A, B], C]` says: a function that can be called with as many arguments."""
    found = re.fullmatch(r"Callable\[\[([^\[\]]*)\], .*\]", annotation)
    if found is None:
        return None
    count = len(list(filter(None, found[1].split(", "))))

    def holds(x: Any) -> bool:
        try:
            inspect.signature(x).bind(*[None] * count)
        except TypeError:
            return False
        except ValueError:  # a builtin that tells no signature
            return callable(x)
        return True

    return f"a function of {count} argument{'' if count == 1 else 's'}", holds


def _is_plain_class(x: Any) -> bool:
    """Whether this is a class of ours or of torch's that is not a protocol: typing has classes that nothing is of."""
    return (
        isinstance(x, type) and x.__module__.startswith(("zerofn.", "torch.")) and not getattr(x, "_is_protocol", False)
    )


def _is_words(x: Any) -> bool:
    """Whether this is a `Literal` of words. Which of them is meant, the function finds out: it knows the nearest."""
    return get_origin(x) is Literal and all(isinstance(word, str) for word in get_args(x))


def _instance(kind: type) -> _What:
    return f"{'an' if kind.__name__[0] in 'AEIO' else 'a'} {kind.__name__}", lambda x: isinstance(x, kind)


def _check(where: str, name: str, kind: _Kind, value: Any) -> None:
    for holds in kind.holds:
        if holds(value):
            return
    error = ValueError if isinstance(value, Real) and value != value else TypeError  # NaN is a number of the type
    raise error(f"{where}: {name} must be {kind.words}, got {told(value)}.")


def told(value: Any) -> str:
    """Return a value for a message, in a few words.

    >>> told(torch.ones(2, 3)), told("x" * 100)[:20]
    ('a tensor of shape [2, 3]', "'xxxxxxxxxxxxxxxxxxx")
    """
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


_WITH_CHECKS = checked()(lambda: None).__code__  # all wrappers have one
