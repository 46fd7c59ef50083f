"""Randomness as a pure function: inside `randomness(key)` a draw depends on `(key, position)`.

A dispatch mode below autograd, so that derivative formulas remain, replaces each random ATen
operation by one of `draws`, given the key and the position: a counter of the draws since entry. So
eager and captured code draw the same bits, and recomputation draws what was drawn before, since in
here `torch.get_rng_state` and `set_rng_state`, which `torch.utils.checkpoint` calls, read and set
the position (see `rng_state`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .._torch_compat import (
    REJECTION_SAMPLERS,
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    dispatch_modes,
    is_composite,
    schema_arguments,
)
from ..util.patches import Patches
from ..util.user_line import user_line
from . import draws
from .draws import key as key
from .rng_state import virtual_rng_state

aten = torch.ops.aten

Bound = dict[str, Any]  # an operation's arguments by name, defaults filled in


@contextmanager
def randomness(key: Tensor | None) -> Iterator[None]:
    """Inside, this thread's random operations are functions of `key` and of the number of earlier ones.

    `key`: an int64 scalar on the CPU, as `fold_in` returns; with None a random operation raises
    `RuntimeError`, naming the operation and the line. No generator is advanced. Take gradients
    inside as well, so that segments under `torch.utils.checkpoint` are recomputed with the same
    draws; autograd then runs in this thread. Raises `TypeError` for anything but a key.

    >>> with randomness(key(0)):
    ...     torch.rand(2)
    tensor([0.4134, 0.1763])
    """
    if key is not None:
        draws.check_scalar(key, "randomness", "the key")
    mode = _Randomness(key)
    with torch.autograd.set_multithreading_enabled(False), virtual_rng_state(mode), _samplers, mode:
        yield


def _as_one_draw(sampler: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a rejection sampler that is one draw where draws are functions of a key."""

    @functools.wraps(sampler)
    def draw(tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None) -> Tensor:
        modes = _current()
        if not modes:
            return sampler(tensor, mean, std, a, b, generator=generator)
        at = modes[0].next_draw(aten.normal_.default, generator)
        with torch.no_grad():
            return draws.fill_(tensor, "trunc_normal", *at, (mean, std, a, b))

    return draw


_samplers = Patches(lambda: [(module, name, _as_one_draw) for module, name in REJECTION_SAMPLERS])


class _Randomness(TorchDispatchMode):
    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        # torch.compile, and flex_attention, which uses it, refuse to run under other modes. What
        # they compile is traced without this mode and run under it, so it draws from the key.
        return True

    def __init__(self, key: Tensor | None) -> None:
        super().__init__()
        self.key = key
        self.place: tuple[int, str] | None = None  # of a rank along an axis
        self.position = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = _rules[func]
        if rule is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return rule(self, func, args, kwargs or {})

    def next_draw(self, func: OpOverload, generator: Any = None) -> tuple[Tensor, int]:
        """The key and position of a new draw."""
        if self.key is None:
            raise RuntimeError(
                f"{func.name()}{_where()} is random, but has no key. Write state.value_and_grad(loss_fn)(...), or "
                "zerofn.value_and_grad(loss_fn, rng=state.rng_at()). If the module should not draw, put it into eval "
                "mode."
            )
        if generator is not None:
            raise RuntimeError(
                f"{func.name()}{_where()} was called with a torch.Generator, whose state is not part of the step. "
                "Leave generator=... out: draws come from the step's key."
            )
        return self.counted(self.key if self.place is None else draws.fold_in_rank(self.key, *self.place))

    def counted(self, key: Tensor) -> tuple[Tensor, int]:
        """Return `key` and the position of a new draw, and count it."""
        self.position += 1
        return key, self.position - 1


def current_draw() -> tuple[Tensor, int] | None:
    """Return the key and position of a new draw here, and count it; None without `randomness` or its key."""
    return next((mode.counted(mode.key) for mode in _current() if mode.key is not None), None)


def draw_by_place(place: tuple[int, str] | None) -> None:
    """From here on, draws are functions of a place as well, (rank, name of the axis): where a rank has a slice of what
    is drawn for. None: not.

    Inside `places_kept`, and nothing without `randomness`.
    """
    for mode in _current():
        mode.place = place


@contextmanager
def places_kept() -> Iterator[None]:
    """Inside, `draw_by_place` may be called; behind, draws are functions of what they were before."""
    before = [(mode, mode.place) for mode in _current()]
    try:
        yield
    finally:
        for mode, place in before:
            mode.place = place


def _current() -> list[_Randomness]:
    """The innermost `randomness` here, if any."""
    return [x for x in dispatch_modes() if isinstance(x, _Randomness)][-1:]


def _where() -> str:
    """The user's line, as ` (model.py:12, in forward)`."""
    line = user_line()
    return "" if line is None else f" ({line.file}:{line.number}, in {line.function})"


# ---- which rule an operation has: None for all that do not draw

Rule = Callable[[_Randomness, Any, Any, Any], Any]


class _Rules(dict[Any, "Rule | None"]):
    """`rules[func]`, found once for each operation: this lookup is all that others pay."""

    def __missing__(self, func: Any) -> Rule | None:
        rule = self[func] = _find_rule(func)
        return rule


_rules = _Rules()


def _find_rule(func: Any) -> Rule | None:
    if func is torch.ops.prim.device.default:
        return _device_of
    if not isinstance(func, OpOverload):  # a higher-order operator
        return None
    if is_composite(func):  # seen whole only in inference mode; its parts may draw
        return _by_parts
    if torch.Tag.nondeterministic_seeded not in func.tags or _name(func).endswith("_backward"):
        return None  # attention's backward passes are tagged, but read what the forward pass drew
    arguments = schema_arguments(func)
    writes_out = any(a.is_out for a in arguments)
    if func.namespace != "aten" or (writes_out and all(a.name != "size" for a in arguments)):
        return _refuse
    if _name(func).startswith("rrelu_with_noise"):
        return _rrelu
    if _DROPOUT_NAMES & {a.name for a in arguments}:
        return _dropout
    if func in draws.KEYED:
        return _keyed
    if _name(func) == "randperm":
        return _randperm
    if _distribution(func) not in _DISTRIBUTIONS:
        return _refuse
    kinds = {a.name: str(a.type) for a in arguments}
    tensors = [x for x in ("p", "mean", "std", "high") if kinds.get(x) == "Tensor"]
    return _of_shape if not tensors else _TENSOR_RULES.get(_distribution(func), _refuse)


def _name(func: OpOverload) -> str:
    return func.name().partition("::")[2].partition(".")[0]


def _distribution(func: OpOverload) -> str:
    return _name(func).removesuffix("_").removesuffix("_like").removesuffix("_functional")


def _bind(func: OpOverload, args: Any, kwargs: Any) -> Bound:
    arguments = schema_arguments(func)
    bound = {a.name: a.default_value for a in arguments}
    bound.update(zip(bound, args, strict=False))
    bound.update(kwargs)
    return bound


def _device_of(mode: _Randomness, func: OpOverload, args: Any, kwargs: Any) -> Any:
    """Autograd asks a dozen times a fake tensor, which knows it."""
    return args[0].device if type(args[0]) is FakeTensor else func(*args)


def _by_parts(mode: _Randomness, func: OpOverload, args: Any, kwargs: Any) -> Any:
    with mode:
        out = func.decompose(*args, **kwargs)
    return func(*args, **kwargs) if out is NotImplemented else out


def _refuse(mode: _Randomness, func: OpOverload, args: Any, kwargs: Any) -> Any:
    mode.next_draw(func)  # without a key, that is the first thing to say
    raise NotImplementedError(
        f"{func.name()}{_where()} cannot draw from a key. Write it with torch.rand, randn, randint, bernoulli or "
        "multinomial, and without out=."
    )


# ---- one draw of a shape: torch.rand, rand_like, uniform_, bernoulli(x, p), dropout's mask, ...


_DISTRIBUTIONS: dict[str, Callable[[Bound], tuple[str, tuple[Any, ...]]]] = {
    "rand": lambda a: ("uniform", (0.0, 1.0)),
    "randn": lambda a: ("normal", (0.0, 1.0)),
    "randint": lambda a: ("randint", (a.get("low", 0), a["high"])),
    "random": lambda a: ("randint", (a.get("from", 0 if "to" in a else None), a.get("to"))),
    "uniform": lambda a: ("uniform", (a["from"], a["to"])),
    "normal": lambda a: ("normal", (a["mean"], a["std"])),
    "bernoulli": lambda a: ("bernoulli", (a["p"],)),
    "exponential": lambda a: ("exponential", (a["lambd"],)),
    "geometric": lambda a: ("geometric", (a["p"],)),
    "log_normal": lambda a: ("log_normal", (a["mean"], a["std"])),
    "cauchy": lambda a: ("cauchy", (a["median"], a["sigma"])),
}


def _of_shape(mode: _Randomness, func: OpOverload, args: Any, kwargs: Any) -> Tensor:
    a = _bind(func, args, kwargs)
    name, params = _DISTRIBUTIONS[_distribution(func)](a)
    if "out" in a and list(a["out"].shape) != list(a["size"]):
        return _refuse(mode, func, args, kwargs)
    at = mode.next_draw(func, a.get("generator"))
    if "out" in a:  # the seeds of compiled code
        return draws.fill_(a["out"], name, *at, params)
    if "size" in a:
        return draws.fill(name, *at, a["size"], params, _dtype(a), _device(a))
    like = a["self"]
    if _name(func).endswith("_"):
        return draws.fill_(like, name, *at, params)
    options = {x: a.get(x) for x in ("dtype", "device")}
    dtype, device = options["dtype"] or like.dtype, options["device"] or like.device
    if like.is_contiguous() and a.get("memory_format") in _ROW_MAJOR:
        return draws.fill(name, *at, like.shape, params, dtype, device)
    # Drawn in logical order, so that the memory format of `like` does not change the draw.
    out = torch.empty_like(like, **options, memory_format=a.get("memory_format"))
    return draws.fill_(out, name, *at, params)


_ROW_MAJOR = (None, torch.preserve_format, torch.contiguous_format)


def _dtype(a: Bound) -> torch.dtype:
    dtype = a.get("dtype")
    if isinstance(dtype, int):  # a schema's default: 4 is int64
        return torch.int64
    return dtype or torch.get_default_dtype()


def _device(a: Bound) -> torch.device:
    return torch.device(a.get("device") or "cpu")


# ---- draws that depend on the values of a tensor


def _normal(mode: _Randomness, func: OpOverload, args: Any, kwargs: Any) -> Tensor:
    a = _bind(func, args, kwargs)
    mean, std = a["mean"], a["std"]
    like = mean + std  # for the shape, dtype and device
    at = mode.next_draw(func, a["generator"])
    return draws.fill("normal", *at, like.shape, (0.0, 1.0), like.dtype, like.device) * std + mean


def _bernoulli(mode: _Randomness, func: OpOverload, args: Any, kwargs: Any) -> Tensor:
    a = _bind(func, args, kwargs)
    out, p = a["self"], a["p"].expand(a["self"].shape)
    at = mode.next_draw(func, a["generator"])
    drawn = draws.KEYED[aten.bernoulli.default](*at, p)
    return out.copy_(drawn) if _name(func).endswith("_") else drawn.to(out.dtype)


_TENSOR_RULES: dict[str, Rule] = {"normal": _normal, "bernoulli": _bernoulli}


def _keyed(mode: _Randomness, func: OpOverload, args: Any, kwargs: Any) -> Any:
    a = _bind(func, args, kwargs)
    at = mode.next_draw(func, a.pop("generator", None))
    named = {x.name: a.pop(x.name) for x in schema_arguments(func) if x.kwarg_only and x.name in a}
    return draws.KEYED[func](*at, *a.values(), **named)


def _randperm(mode: _Randomness, func: OpOverload, args: Any, kwargs: Any) -> Tensor:
    a = _bind(func, args, kwargs)
    at = mode.next_draw(func, a.get("generator"))
    return draws.permutation(*at, a["n"], _dtype(a), _device(a))


# ---- random only with some arguments


_DROPOUT_NAMES = {"dropout_p", "dropout", "train"}


def _dropout(mode: _Randomness, func: OpOverload, args: Any, kwargs: Any) -> Any:
    """Attention, recurrent networks on a GPU, native_dropout."""
    a = _bind(func, args, kwargs)
    if a.get("train") is False or a.get("dropout_p", a.get("dropout")) == 0:
        return func(*args, **kwargs)
    return (_keyed if func in draws.KEYED else _refuse)(mode, func, args, kwargs)


def _rrelu(mode: _Randomness, func: OpOverload, args: Any, kwargs: Any) -> Any:
    a = _bind(func, args, kwargs)
    if not a["training"]:
        return func(*args, **kwargs)
    x, noise, range_ = a["self"], a["noise"], (float(a["lower"]), float(a["upper"]))
    at = mode.next_draw(func, a["generator"])
    slope = draws.fill("uniform", *at, x.shape, range_, x.dtype, x.device)
    slope = torch.where(x <= 0, slope, 1.0)
    if _name(func).endswith("_functional"):
        return x * slope, slope
    noise.copy_(slope)
    return x.mul_(slope) if _name(func).endswith("_") else x * slope
