"""Values that are known once a captured step has run: what is computed from them is an expression until then."""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

import zerofn

_IN_PLACE = frozenset(
    f"__i{x}__" for x in "add sub mul truediv floordiv mod pow and or xor lshift rshift matmul".split()
)


class Traced:
    """A tensor of the step, which becomes one of its results."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Result(NamedTuple):
    """The k-th result of the step."""

    k: int


class ReadBefore(NamedTuple):
    """What was read of an object before the step wrote there; see `DeferredProgram`."""

    k: int


class At(NamedTuple):
    """The object at a path from the host: (True, name) is an attribute, (False, key) an entry."""

    path: tuple[tuple[bool, Any], ...]


class Done(NamedTuple):
    """A function's value."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Either(NamedTuple):
    """`first if test else second`."""

    test: Any
    first: Any
    second: Any


def text_of(path: Sequence[tuple[bool, Any]]) -> str:
    """Return a path as it is written in a method of the host.

    >>> text_of([(True, "metrics"), (False, "train")])
    "self.metrics['train']"
    """
    return "self" + "".join(f".{key}" if is_attribute else f"[{key!r}]" for is_attribute, key in path)


def found_at(host: Any, path: Sequence[tuple[bool, Any]]) -> Any:
    """Return what is at a path."""
    for is_attribute, key in path:
        host = getattr(host, key) if is_attribute else host[key]
    return host


class DeferredProgram(NamedTuple):
    """What a run of the step does to its host: expressions to evaluate in order, each with the slot that its value
    goes to, if any. `numbers`: the results of which only the number is asked.
    """

    lines: tuple[tuple[int | None, Any], ...]
    numbers: tuple[int, ...]

    def run(self, host: Any, results: Sequence[Any]) -> None:
        """Do it. `results`: tensors, and numbers where only those are asked."""
        slots: dict[int, Any] = {}
        for slot, expression in self.lines:
            value = _value(expression, host, results, slots)
            if slot is not None:
                slots[slot] = value


def number_of(x: Any) -> Any:
    """Return a tensor's number; `DeferredProgram.run` may have been given that already."""
    return x.item() if isinstance(x, Tensor) else x


def _value(x: Any, host: Any, results: Sequence[Any], slots: Mapping[int, Any]) -> Any:
    def value(part: Any) -> Any:
        return _value(part, host, results, slots)

    kind = type(x)
    if kind is Result:
        return results[x.k]
    if kind is ReadBefore:
        return slots[x.k]
    if kind is At:
        return found_at(host, x.path)
    if kind is Either:
        return value(x.first) if value(x.test) else value(x.second)
    if kind is Done:
        return x.function(*map(value, x.args), **{k: value(v) for k, v in x.kwargs.items()})
    return mapped(value, x)


def mapped(change: Callable[[Any], Any], x: Any) -> Any:
    """Return a new container of Python's with its entries changed; anything else as it is."""
    kind = type(x)
    if kind in (list, tuple, set):
        return kind(map(change, x))
    if kind is deque:
        return deque(map(change, x), x.maxlen)
    if kind is dict:
        return {k: change(v) for k, v in x.items()}
    if kind is slice:
        return slice(change(x.start), change(x.stop), change(x.step))
    return x


def parts_of(x: Any) -> Iterator[Any]:
    """Yield an expression's leaves, and those in containers."""
    if isinstance(x, Later):
        yield from parts_of(x.expression)
    elif type(x) is Either or type(x) in (list, tuple, set, deque):
        for part in x:
            yield from parts_of(part)
    elif type(x) is Done:
        for part in (*x.args, *x.kwargs.values()):
            yield from parts_of(part)
    elif type(x) is dict:
        for part in x.values():
            yield from parts_of(part)
    elif type(x) is slice:
        yield from parts_of((x.start, x.stop, x.step))
    else:
        yield x


class Later:
    """A number, or a tensor, that is known once the step has run.

    `now()`: what stands for it while the step is captured. It is asked for where Python or torch needs one.
    """

    __slots__ = ("__weakref__", "expression", "now")

    def __init__(self, expression: Any, now: Callable[[], Any]) -> None:
        self.expression, self.now = expression, now

    @property
    def reads_host(self) -> bool:
        """Whether it depends on what the host has."""
        return any(type(x) in (ReadBefore, At) for x in parts_of(self))

    def item(self) -> Later:
        """Return its number."""
        return apply(number_of, self)

    def detach(self) -> Later:
        """Return itself: what is kept has no gradient."""
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        return combined(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        is_lazy = self.reads_host and callable(getattr(Tensor, name, None)) and not name.endswith("_")
        if is_lazy and not name.startswith("__"):
            return lambda *args, **kwargs: combined(getattr(Tensor, name), (self, *args), kwargs)
        return getattr(self.now(), name)

    def __bool__(self) -> bool:
        return bool(self.now())

    def __float__(self) -> float:
        return float(self.now())

    def __int__(self) -> int:
        return int(self.now())

    def __index__(self) -> int:
        return operator.index(self.now())

    def __hash__(self) -> int:
        return hash(self.now())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.now())

    def __len__(self) -> int:
        return len(self.now())

    def __getitem__(self, key: Any) -> Any:
        return self.now()[key]

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        refuse(
            "the step writes in place into a tensor that is stored in an attribute. Make it a buffer, which may be "
            "written in place: self.register_buffer(name, tensor). Or assign a new tensor to the attribute."
        )

    def __str__(self) -> str:
        return format(self)

    def __repr__(self) -> str:
        return format(self)

    def __format__(self, how: str) -> str:
        traced = next((x.x for x in parts_of(self) if type(x) is Traced), None)
        if traced is None:
            return format(self.now(), how)
        return format(traced, how or "g")  # a text that says that there is no value yet, with a warning


def apply(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Later:
    """Return a function's value as one that is known later."""
    return Later(
        Done(function, args, kwargs), lambda: function(*map(now_of, args), **{k: now_of(v) for k, v in kwargs.items()})
    )


def now_of(x: Any) -> Any:
    """Return a value with what stands in the captured step for what is known later, in containers, too."""
    if type(x) is slice and any(type(part) is Traced for part in parts_of(x)):
        refuse(
            "the step slices with a number that it reads from a tensor, which has no value while the step is captured. "
            "Index with a tensor instead: `i = (self.at + torch.arange(n)) % size` and `self.queue[i] = x`."
        )
    return x.now() if isinstance(x, Later) else mapped(now_of, x)


def has_later(x: Any) -> bool:
    """Whether any part of a value is known later."""
    if type(x) in (list, tuple, set, deque):
        return any(map(has_later, x))
    if type(x) is dict:
        return any(map(has_later, x.values()))
    if type(x) is slice:
        return any(map(has_later, (x.start, x.stop, x.step)))
    return isinstance(x, Later)


def _operators() -> None:
    """Give `Later` Python's operators. With a tensor that has a gradient it is a part of the step's computation."""
    pairs = ("add sub mul truediv floordiv mod pow and or xor lshift rshift matmul").split()

    def binary(function: Callable[..., Any], turned: bool) -> Callable[..., Any]:
        def method(self: Later, other: Any) -> Any:
            args = (other, self) if turned else (self, other)
            return combined(function, args, {})

        return method

    def unary(function: Any) -> Callable[..., Any]:
        return lambda self, *args: combined(function, (self, *args), {})

    for name in pairs:
        function = getattr(operator, f"{name}_" if name in ("and", "or") else name)
        setattr(Later, f"__{name}__", binary(function, False))
        setattr(Later, f"__r{name}__", binary(function, True))
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(Later, f"__{name}__", binary(getattr(operator, name), False))
    alone: dict[str, Any] = {
        "neg": operator.neg, "pos": operator.pos, "abs": operator.abs, "invert": operator.invert, "round": round,
        "floor": math.floor, "ceil": math.ceil, "trunc": math.trunc,
    }  # fmt: skip
    for name, function in alone.items():
        setattr(Later, f"__{name}__", unary(function))


_operators()


def combined(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what a function makes of arguments of which some are known later.

    Numbers of the step's alone remain numbers. A tensor of the step's own goes on in the step, unless the host's values
    take part, and no gradient does: `self.total + loss.detach()` is added when the step has run. What is written into a
    tensor of the step's own, such as a buffer, is written in the step.
    """
    leaves = list(parts_of([*args, *kwargs.values()]))
    values = [x for x in leaves if isinstance(x, Tensor)]
    reads_host = any(type(x) in (ReadBefore, At) for x in leaves)
    written = isinstance(args[0] if args else None, Tensor) and writes(function, kwargs)
    if written or any(x.requires_grad for x in values) or (values and not reads_host):
        return function(*map(now_of, args), **{k: now_of(v) for k, v in kwargs.items()})
    return apply(function, *args, **kwargs)


def writes(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function of torch's writes to its first argument, or to `out`."""
    name = getattr(function, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__") or name == "__setitem__"
    return in_place or kwargs.get("out") is not None or name in _IN_PLACE


def taken_from(x: Later) -> Any:
    """Return the tensor that a number was taken from; what stands for it now if it is another value."""
    known = x.expression
    return known.args[0].x if type(known) is Done and type(known.args[0]) is Traced else x.now()


def lowered(
    lines: Sequence[tuple[int | None, Any]], place: Callable[[Any], Any]
) -> tuple[DeferredProgram, tuple[Tensor, ...]]:
    """Return (the program of some lines, the results it takes). `place(x)`: where the host has what stands for it."""
    results: dict[int, Tensor] = {}
    tensors: set[int] = set()
    numbers: set[int] = set()

    def result(x: Tensor, uses: set[int]) -> Result:
        results.setdefault(id(x), x)
        k = list(results).index(id(x))
        uses.add(k)
        return Result(k)

    def lower(x: Any) -> Any:
        kind = type(x := place(x))
        if kind is Later:
            return lower(x.expression)
        if isinstance(x, Traced | Tensor):
            return result(x.x if isinstance(x, Traced) else x, tensors)
        if kind is Done:
            if x.function is number_of and type(x.args[0]) is Traced:
                return Done(number_of, (result(x.args[0].x, numbers),), {})
            return Done(x.function, tuple(map(lower, x.args)), {k: lower(v) for k, v in x.kwargs.items()})
        if kind is Either:
            return Either(*map(lower, x))
        return x if kind in (At, ReadBefore) else mapped(lower, x)

    found = [(slot, lower(x)) for slot, x in lines]
    used = {part.k for _, x in found for part in parts_of(x) if type(part) is ReadBefore}
    kept = tuple((slot, x) for slot, x in found if slot is None or slot in used)
    return DeferredProgram(kept, tuple(sorted(numbers - tensors))), tuple(x.detach() for x in results.values())


def refuse(sentence: str) -> NoReturn:
    """Raise for what the step does to its host and cannot be done after it. The line is added where it is caught."""
    raise zerofn.CaptureError(sentence)


def is_traced(x: Any) -> bool:
    """Whether a tensor has no value yet."""
    return isinstance(x, Tensor) and type(x) not in (Tensor, torch.nn.Parameter)
