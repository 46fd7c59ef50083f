"""Record most operations of a step in some microseconds each.

torch's capture takes half a millisecond an operation: it makes proxies for all arguments, hashes metadata field by
field, and detaches results and notes of them through the dispatcher. Steps repeat the same operations on the same
shapes. So here a result is made like the first one of its kind, in this capture or an earlier one of this process.
Anything less simple goes to torch, for which the tensors made here are its own.

Over 400 lines because all ways of an operation share what is known of its arguments.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from .._torch_compat import (
    Fakes,
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    bind,
    bound_node,
    is_composite,
    is_implicit,
    lower_modes,
    name_of_node,
    new_node,
    no_dispatch,
    node_of,
    num_dispatch_modes,
    outside_trace,
    storage_key,
)
from ..ops import ctc  # noqa: F401  (defines what it replaces)
from ..ops.ravel import MARKS
from ..ops.registry import ASKS_METADATA, ASKS_VALUES, LIFTS, REPLACED, SAME, VIEWS, traits_of
from ..util.nested_arguments import tensors_in, with_tensors
from ..util.process import the
from .fake_kernels import see_views_of_zeros
from .grad_mode import noted_grad_mode, with_grad_mode
from .strides import is_suspect, real_strides

aten = torch.ops.aten
KNOWN = "_zerofn_known"  # the attribute of a fake tensor
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_LOST = object()  # the answer of a way that cannot handle a call


class _Known:
    """What is known of a fake tensor: its node and trace, and what operations on it depend on."""

    __slots__ = ("device", "elem", "kind", "node", "tracer")

    def __init__(self, tracer: Any, node: Node | None, device: torch.device, elem: Tensor | None, kind: Any) -> None:
        self.tracer, self.node, self.device = tracer, node, device
        self.elem = elem  # a plain tensor on "meta" with the same memory
        self.kind = kind  # (shape, strides, dtype, device); None until somebody asks


class _Result(NamedTuple):
    """One tensor that an operation makes."""

    kind: tuple[Any, ...]
    note: Tensor  # its value in the graph, shared by all nodes of this kind


class _Kind(NamedTuple):
    """The results of an operation on arguments of one kind. `container`: None, list or tuple."""

    container: Any
    results: list[_Result | None]


class Learned:
    """What captures of this process have learned: the kinds of results, and of views, by what they were made of."""

    MOST = 1 << 14  # where a process captures ever other shapes, it begins anew

    def __init__(self) -> None:
        self.kinds: dict[Any, Any] = {}

    def keep(self, key: Any, value: Any) -> None:
        if len(self.kinds) >= self.MOST:
            self.kinds.clear()
        self.kinds[key] = value


class Shortcut(TorchDispatchMode):
    """A mode inside a capture, above its own modes."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Libraries that refuse to run under a mode need not know of this one."""
        return True

    def __init__(self, answer: Callable[[OpOverload, Any, Any], Any] = lambda *_: NotImplemented) -> None:
        """`answer(func, args, kwargs)`: what an operation says of values, if they are known."""
        super().__init__()
        self._answer = answer
        self._fakes: Fakes | None = None
        self._kinds: dict[Any, _Kind | None] = {}  # None: only torch can make it
        self.learned = the(Learned)
        # What kernels are chosen by, besides their arguments.
        self.backends = torch.backends.mkldnn.enabled, torch.are_deterministic_algorithms_enabled()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = REPLACED.get(func, func)
        way = _ways[func]
        if way is not None:
            fake, trace, functional = lower_modes()
            alone = functional is None and num_dispatch_modes() == 1 + (trace is not None)  # no mode of a user's below
            if fake is not None and alone and not torch.is_inference_mode_enabled():
                if self._fakes is None:
                    self._fakes = Fakes(fake)
                if self._fakes.mode is fake:
                    out = way(_Call(self, self._fakes, None if trace is None else trace.tracer, func), args, kwargs)
                    if out is not _LOST:
                        return out
        return _long_way(func, args, kwargs or {})


def _long_way(func: Any, args: Any, kwargs: Any) -> Any:
    """Run the operation as torch does, and forget what was known of its arguments, which it may have written."""
    with noted_grad_mode():
        out = func(*args, **kwargs)
    for x in tensors_in((args, kwargs)):
        if type(x) is FakeTensor:
            x.__dict__.pop(KNOWN, None)
    return out


class _Call:
    """One call of an operation."""

    __slots__ = ("fakes", "func", "key", "owner", "tensors", "tracer")

    def __init__(self, owner: Shortcut, fakes: Fakes, tracer: Any, func: OpOverload) -> None:
        self.owner, self.fakes, self.tracer, self.func = owner, fakes, tracer, func
        self.key: list[Any] = []
        self.tensors: list[Tensor] = []

    def known(self, x: Tensor) -> _Known | None:
        """Return what is known of an argument; None if torch must see it."""
        if self.tracer is None:  # outside a trace `x.data = y` may change a tensor unseen
            return _Known(None, None, x.device, None, None) if self.fakes.simple(x) else None
        found = x.__dict__.get(KNOWN)
        if found is not None and found.tracer is self.tracer:
            return found
        node = bound_node(self.tracer, x)
        if node is None or not self.fakes.simple(x):
            return None
        found = x.__dict__[KNOWN] = _Known(self.tracer, node, x.device, None, None)
        return found

    def read(self, args: Any) -> Any:
        """Return arguments with nodes for tensors, and append their kinds to `key`. `_LOST` for anything else."""
        out: list[Any] = []
        key = self.key
        for x in args:
            cls = type(x)
            if cls is FakeTensor:
                known = self.known(x)
                if known is None:
                    return _LOST
                if known.kind is None:
                    known.kind = _kind_of(x, known.device)
                key.append(known.kind)
                self.tensors.append(x)
                out.append(known.node)
            elif cls in _PLAIN:
                key.append(cls)  # otherwise 1, 1.0 and True are equal keys
                key.append(x)
                out.append(x)
            elif cls is list or cls is tuple:
                key.append(cls)
                key.append(len(x))
                inner = self.read(x)
                if inner is _LOST:
                    return _LOST
                out.append(inner if cls is list else tuple(inner))
            else:
                return _LOST
        return out

    def made(self, elem: Tensor, device: torch.device, kind: Any, node: Node | None) -> Tensor:
        """Return the tensor that `node` makes."""
        x = self.fakes.of(elem, device)
        if node is not None:
            x.__dict__[KNOWN] = _Known(self.tracer, node, device, elem, kind)
            bind(self.tracer, x, node)
        return x

    def note(self, args: Any, kwargs: Any, val: Any) -> Node | None:
        """Add a node, if there is a trace."""
        if self.tracer is None:
            return None
        node = new_node(self.tracer.graph, self.func, tuple(args), kwargs, _name_of(self.func))
        node.meta["val"] = val
        return with_grad_mode(node)

    def item(self, node: Node | None, k: int, val: Tensor) -> Node | None:
        """Add a node for one of several results."""
        if node is None:
            return None
        one = new_node(self.tracer.graph, operator.getitem, (node, k), {}, "getitem")
        one.meta["val"] = val
        return one


def _kind_of(x: Tensor, device: torch.device) -> tuple[Any, ...]:
    return tuple(x.shape), x.stride(), x.dtype, device


def _detach(call: _Call, args: Any, kwargs: Any) -> Any:
    """Return another tensor with the same node."""
    x = args[0]
    known = call.known(x) if type(x) is FakeTensor and len(args) == 1 and not kwargs else None
    if known is None:
        return _LOST
    with no_dispatch():
        elem = known.elem = call.fakes.elem(x) if known.elem is None else known.elem
        return call.made(elem, known.device, known.kind, known.node)


def _view(call: _Call, args: Any, kwargs: Any) -> Any:
    """Make a view of the first argument's memory, as on "meta"."""
    x: Any = args[0] if args else None
    known = call.known(x) if type(x) is FakeTensor else None
    if known is None or any(isinstance(a, Tensor) or type(a) not in _PLAIN and not _is_ints(a) for a in args[1:]):
        return _LOST
    if kwargs and any(type(a) not in _PLAIN for a in kwargs.values()):
        return _LOST
    with no_dispatch():
        elem = known.elem = call.fakes.elem(x) if known.elem is None else known.elem
        try:
            made = call.func(elem, *args[1:], **(kwargs or {}))
        except Exception:
            return _LOST  # torch says what is wrong
        several = made if isinstance(made, list | tuple) else [made]
        if not all(type(m) is Tensor for m in several):
            return _LOST
        notes = [call.fakes.of(m, known.device) for m in several]
        whole = notes[0] if several is not made else type(made)(notes)
        node = call.note((known.node, *args[1:]), kwargs or {}, whole)
        if several is not made:
            return call.made(made, known.device, None, node)
        return type(made)(
            [call.made(m, known.device, None, call.item(node, k, notes[k])) for k, m in enumerate(several)]
        )


def _passed(call: _Call, args: Any, kwargs: Any) -> Any:
    """Return the same memory with a node of its own: of an operation of ours that marks a value, or waits for it."""
    x: Any = args[0] if args else None
    known = call.known(x) if type(x) is FakeTensor else None
    if known is None or any(type(a) not in _PLAIN for a in (*args[1:], *(kwargs or {}).values())):
        return _LOST
    with no_dispatch():
        elem = known.elem = call.fakes.elem(x) if known.elem is None else known.elem
        made = elem.view_as(elem)
        node = call.note((known.node, *args[1:]), kwargs or {}, call.fakes.of(made, known.device))
        return call.made(made, known.device, known.kind, node)


def _reshape(call: _Call, args: Any, kwargs: Any) -> Any:
    """Make a view like the first of its kind: in dims of size 1, fake tensors and "meta" choose other strides."""
    known = call.known(args[0]) if args and type(args[0]) is FakeTensor else None
    if known is None or kwargs or len(args) != 2 or not _is_ints(args[1]):
        return _LOST
    x = args[0]
    if known.kind is None:
        known.kind = _kind_of(x, known.device)
    key = (call.func, known.kind, tuple(args[1]))
    kind = call.owner.learned.kinds.get(key, _LOST)
    if kind is _LOST:
        with contextlib.nullcontext() if call.tracer is None else outside_trace():
            out = call.func(*args)
        seen = type(out) is FakeTensor and call.fakes.simple(out) and storage_key(out) == storage_key(x)
        kind = _kind_of(out, known.device) if seen and out.storage_offset() == x.storage_offset() else None
        call.owner.learned.keep(key, kind)
    if kind is None:
        return _LOST
    with no_dispatch():
        elem = known.elem = call.fakes.elem(x) if known.elem is None else known.elem
        made = elem.as_strided(kind[0], kind[1])
        node = call.note((known.node, args[1]), {}, call.fakes.of(made, known.device))
        return call.made(made, known.device, kind, node)


def _parts(call: _Call, args: Any, kwargs: Any) -> Any:
    """Decompose a composite operation, as torch's capture does below autograd."""
    with call.owner:
        out = call.func.decompose(*args, **(kwargs or {}))
    return _LOST if out is NotImplemented else out


def _device(call: _Call, args: Any, kwargs: Any) -> Any:
    """Return the device, which autograd asks for a dozen times a tensor."""
    return args[0].device if type(args[0]) is FakeTensor else _LOST


def _ask(call: _Call, args: Any, kwargs: Any) -> Any:
    """Return what is asked of values that are known."""
    out = call.owner._answer(call.func, args, kwargs or {})
    return _LOST if out is NotImplemented else out


def _is_ints(x: Any) -> bool:
    return type(x) in (list, tuple) and all(type(i) is int for i in x)


def _fresh(call: _Call, args: Any, kwargs: Any) -> Any:
    """Make a result in new memory like the first one on arguments of the same kind."""
    call.key += (call.func, torch.get_default_dtype(), call.owner.backends)
    given = call.read(args)
    if given is _LOST:
        return _LOST
    named: dict[str, Any] = {}
    if kwargs:
        call.key += kwargs
        values = call.read(kwargs.values())
        if values is _LOST:
            return _LOST
        named = dict(zip(kwargs, values, strict=True))
    key = tuple(call.key)
    kinds = call.owner._kinds
    if key not in kinds:
        results = call.owner.learned.kinds.get(key)
        if results is None:
            with contextlib.nullcontext() if call.tracer is None else outside_trace():
                out = call.func(*args, **(kwargs or {}))
            strides = real_strides(call.func, args, kwargs or {}, out) if is_suspect(call.func, call.tensors) else []
            results = _learned(call, out, strides)
            if results is not None and not traits_of(call.func).opaque:
                call.owner.learned.keep(key, results)
        kinds[key] = results and _noted(call, *results)
    kind = kinds[key]
    return _LOST if kind is None else _again(call, kind, given, named)


def _sent(call: _Call, args: Any, kwargs: Any) -> Any:
    """As `_fresh`, for a transfer. torch would run that of a constant to know the result, but other ranks may not be
    there.
    """
    return _fresh(call, with_tensors(args, lambda x: _without_value(call, x)), kwargs)


def _without_value(call: _Call, x: Tensor) -> Tensor:
    """Return a fake tensor without its constant value, for the same node."""
    node = None if call.tracer is None else node_of(call.tracer, x)
    if node is None or type(x) is not FakeTensor or x.constant is None:
        return x
    with no_dispatch():
        return call.made(call.fakes.elem(x), x.device, None, node)


def _noted(call: _Call, container: Any, results: Sequence[Any]) -> _Kind:
    """Return results of these kinds, with values for the nodes of this capture."""
    with no_dispatch():
        notes = [x and _Result(x, call.fakes.of(_empty(x), x[3])) for x in results]
    return _Kind(container, notes)


def _empty(kind: Any) -> Tensor:
    shape, strides, dtype, _ = kind
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _again(call: _Call, kind: _Kind, args: Any, kwargs: dict[str, Any]) -> Any:
    """Make the results of an operation like the first of its kind."""
    first = kind.results[0]
    if kind.container is None:
        assert first is not None
        node = call.note(args, kwargs, first.note)
        with no_dispatch():
            return _like(call, first, node)
    node = call.note(args, kwargs, kind.container([x and x.note for x in kind.results]))
    with no_dispatch():
        return kind.container(
            [None if x is None else _like(call, x, call.item(node, k, x.note)) for k, x in enumerate(kind.results)]
        )


def _like(call: _Call, result: _Result, node: Node | None) -> Tensor:
    return call.made(_empty(result.kind), result.kind[3], result.kind, node)


def _learned(call: _Call, out: Any, strides: Sequence[tuple[int, ...] | None]) -> tuple[Any, list[Any]] | None:
    """Return what an operation makes, its container and kinds; None if shapes alone do not determine it. `strides`: of
    results that are promised others, see `real_strides`.
    """
    container = type(out) if isinstance(out, list | tuple) else None
    if container not in (None, list, tuple):
        return None
    several = out if container is not None else [out]
    if not several or not any(type(x) is FakeTensor for x in several) or container is None and out is None:
        return None
    results: list[Any] = []
    places = {storage_key(x) for x in call.tensors}
    for x, other in zip_longest(several, strides):
        if x is None:
            results.append(None)
            continue
        if type(x) is not FakeTensor or not call.fakes.simple(x) or storage_key(x) in places or x.storage_offset():
            return None
        places.add(storage_key(x))
        kind = _kind_of(x, x.device)
        if other is not None:
            kind = (kind[0], other, *kind[2:])
        with no_dispatch():
            if _empty(kind).untyped_storage().nbytes() != x.untyped_storage().nbytes():
                return None
        results.append(kind)
    return container, results


# ---- which way an operation goes: None for all that only torch knows

_Way = Callable[[_Call, Any, Any], Any]
_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}


class _Ways(dict[Any, "_Way | None"]):
    """`ways[func]`, found once for each operation."""

    def __missing__(self, func: Any) -> _Way | None:
        return self.setdefault(func, _find_way(func))


_ways = _Ways()
_name_of = functools.cache(name_of_node)


def _find_way(func: Any) -> _Way | None:
    if func is torch.ops.prim.device.default:
        return _device
    if func is aten._efficientzerotensor.default:  # its result is not a plain tensor
        see_views_of_zeros()
        return None
    if not isinstance(func, OpOverload) or func.namespace not in ("aten", "prims", "zerofn"):
        return None
    if func in ASKS_VALUES:
        return _ask
    if func in SAME:
        return _detach
    if func in VIEWS:
        return _reshape
    if is_composite(func):
        return None if func in ASKS_METADATA else _parts
    if _TAGS & set(func.tags) or func in LIFTS or func._schema.is_mutable or is_implicit(func):
        return None
    if traits_of(func).collective:
        return _sent
    if func.is_view:
        return _passed if func in MARKS or traits_of(func).passes_on else _view
    return _fresh
