"""A module's shapes without its weights.

While `build()` runs, every parameter that a module registers is replaced by one on the `meta` device, so the real one
is freed at once (the idea of accelerate's `init_empty_weights`). Everything else is computed as always. Draws on meta
tensors do not advance a generator, so they are recorded, and made up for if a real draw follows: a random buffer has
the bits of the plain build.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from .._torch_compat import REJECTION_SAMPLERS, TorchDispatchMode, tree_map
from ..memory.host_allocator import map_large_blocks
from ..memory.turns import refuse_while_capturing
from ..ops.registry import ASKS_VALUES
from ..util.arguments import checked
from ..util.user_line import user_place
from .effects import is_random, tensors
from .materialize import record
from .quantised import quantised_refused, refuse_quantised

log = logging.getLogger("zerofn")

_LARGE = 1 << 30  # bytes
M = TypeVar("M", bound=nn.Module)


@checked()
def skeleton(build: Callable[[], M], *, device: torch.device | str | None = None) -> M:
    """Return the module that `build()` makes, with its real buffers, but with parameters that have shapes and no
    values.

    Parameters are on the `meta` device, with their dtypes, strides, `requires_grad` and class; tied ones stay one
    object. Buffers, and tensors that are plain attributes, have the values of a plain `build()` with the generators'
    current states. `device`: the device to move buffers to, "cuda" for steps on a GPU. At most one real parameter
    exists at a time. The states of the generators do not change. `build` is called a second time if a buffer is
    computed from a parameter (a running copy of a weight, for example). For use with `torch.func.functional_call`.

    Raises `TypeError` if `build()` does not return a module or makes quantised parameters, `RuntimeError` if a
    parameter is still lazy, or if building reads the value of a parameter.

    >>> module = skeleton(lambda: nn.Linear(2, 3))
    >>> module.weight.shape, module.weight.device
    (torch.Size([3, 2]), device(type='meta'))
    >>> params = {"weight": torch.ones(3, 2), "bias": torch.zeros(3)}
    >>> torch.func.functional_call(module, params, torch.ones(1, 2))
    tensor([[2., 2., 2.]])
    """
    if isinstance(build, nn.Module):
        raise TypeError(
            f"skeleton takes a function that makes the module, got the {type(build).__name__} itself, whose weights "
            "already exist. Write zerofn.skeleton(build), without calling build."
        )
    refuse_while_capturing("zerofn.skeleton")
    map_large_blocks()
    with _forked_generators():
        with _meta_parameters() as (twins, draws), _explained():
            module = build()
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"skeleton's function must return a torch.nn.Module; it returned a "
                f"{type(module).__name__}. Write skeleton(lambda: MyModel(config))."
            )
        _replace_the_rest(module, twins)
    buffers = module.named_buffers(remove_duplicate=False)
    if not module.training:
        log.warning(
            "skeleton: %s is in evaluation mode, as from_pretrained returns it: dropout is off and batch norm uses its "
            "running statistics. If you train it, call .train() on the skeleton.",
            type(module).__name__,
        )
    missing = [name for name, buffer in buffers if buffer.is_meta or draws.seeded_inside()]
    if missing:
        _fill_buffers(module, missing, build)
    if device is not None:
        _buffers_to(module, torch.device(device))
    return module


def _buffers_to(module: nn.Module, device: torch.device) -> None:
    """Move the buffers of a module, whose parameters may have no values; shared ones stay so."""
    moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # with the old ones, so that no other gets an id of theirs
    for part in module.modules():
        for name, x in part._buffers.items():
            if x is not None:
                _, part._buffers[name] = moved.setdefault(id(x), (x, x.to(device)))


_NO_VALUES = (
    "and a skeleton has none. Compute it from the sizes; or use the module itself, build(), in functional_call: its "
    "own parameters stay unused."
)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Say what is wrong where torch says that a parameter is on a different device from what it meets."""
    try:
        yield
    except RuntimeError as error:
        if _NO_VALUES in str(error) or not re.search(r"device.*\bmeta\b|\bmeta\b.*device", str(error)):
            raise
        raise RuntimeError(f"building the module computes with the values of a parameter, {_NO_VALUES}") from error


class _Twins:
    """Real parameter -> its meta twin, the same one each time, and never keeping the real one."""

    def __init__(self) -> None:
        self._twins: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def of(self, param: nn.Parameter) -> nn.Parameter:
        if param not in self._twins:
            refuse_quantised(type(param))
            twin = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            twin.__class__ = type(param)
            twin.__dict__.update(param.__dict__)
            self._twins[param] = twin
        return self._twins[param]


_building = threading.RLock()  # the patches below are global


@contextlib.contextmanager
def _meta_parameters() -> Iterator[tuple[_Twins, _SkippedDraws]]:
    """Inside, this thread's modules register meta twins instead of parameters."""
    with _building:
        thread, twins = threading.get_ident(), _Twins()
        register = nn.Module.register_parameter
        samplers = [(module, name, getattr(module, name)) for module, name in REJECTION_SAMPLERS]

        @functools.wraps(register)
        def register_twin(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
            register(self, name, param)
            if param is not None and threading.get_ident() == thread and _is_real(param):
                self._parameters[name] = twins.of(param)

        draws = _SkippedDraws()
        try:
            nn.Module.register_parameter = register_twin  # type: ignore[method-assign]
            for module, name, sampler in samplers:
                setattr(module, name, draws.noting(sampler))
            with draws, _AssignedData(), quantised_refused:
                yield twins, draws
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]
            for module, name, sampler in samplers:
                setattr(module, name, sampler)


def _is_real(param: nn.Parameter) -> bool:
    return not param.is_meta and not nn.parameter.is_lazy(param)


class _SkippedDraws(TorchDispatchMode):
    """Draws on meta tensors are noted; before a draw on real ones they are made, into scratch."""

    def __init__(self) -> None:
        super().__init__()
        self._skipped: list[Callable[[], Any]] = []
        self._state = _state()
        self._num_draws = 0
        self._seeded = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in ASKS_VALUES and any(t.is_meta for t in tensors((args, kwargs))):
            raise RuntimeError(f"{user_place()}: building the module asks for the value of a parameter, {_NO_VALUES}")
        if is_random(func):
            device = kwargs.get("device")
            on_meta = any(t.is_meta for t in tensors((args, kwargs)))
            if on_meta or (device is not None and torch.device(device).type == "meta"):
                self._note(func, args, kwargs)
            else:
                self._catch_up()
                out = func(*args, **kwargs)
                self._state = _state()
                return out
        return func(*args, **kwargs)

    def seeded_inside(self) -> bool:
        """Whether a state was set between draws: then what was skipped cannot be made up for."""
        return self._num_draws > 0 and self._seeded

    def _meet(self) -> None:
        self._num_draws += 1
        self._seeded = self._seeded or self._state != _state()
        self._state = _state()

    def noting(self, sampler: Callable[..., Any]) -> Callable[..., Any]:
        """`sampler`, which on a meta tensor returns without any draw, noted as a whole."""

        @functools.wraps(sampler)
        def note(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor.is_meta:
                self._note(sampler, (tensor, *args), kwargs)
                return tensor
            return sampler(tensor, *args, **kwargs)

        return note

    def _note(self, func: Any, args: Any, kwargs: Any) -> None:
        self._meet()
        # Shapes alone are kept: a draw's parameters are numbers, its tensors only say how many.
        shapes = tree_map(lambda x: _Scratch(x) if isinstance(x, torch.Tensor) else x, (args, kwargs))
        self._skipped.append(lambda: _draw(func, *shapes))

    def _catch_up(self) -> None:
        self._meet()
        skipped, self._skipped = self._skipped, []
        for draw in skipped:
            draw()


def _state() -> bytes:
    return torch.get_rng_state().numpy().tobytes()


class _Scratch:
    """Memory to draw into, laid out as a meta tensor is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._geometry = (tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    def make(self) -> torch.Tensor:
        size, stride, dtype = self._geometry
        return torch.empty_strided(size, stride, dtype=dtype, device="cpu")


def _draw(func: Any, args: Any, kwargs: Any) -> None:
    args, kwargs = tree_map(lambda x: x.make() if isinstance(x, _Scratch) else x, (args, kwargs))
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("cpu")
    func(*args, **kwargs)


_MOVES = (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda)


class _AssignedData(TorchFunctionMode):
    """`param.data = real` and `param.to("cpu")` on a meta twin: torch refuses to change a tensor's device that way. And
    large memory that nobody has written is on meta from the beginning: the experts of one layer may be more than a
    machine can promise.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        setter, kwargs = torch.Tensor.data.__set__, dict(kwargs or {})  # type: ignore[attr-defined]
        if func == setter and args[0].is_meta and not args[1].is_meta:
            args = (args[0], args[1].detach().to("meta"))
        if func in _MOVES and args[0].is_meta:
            form = {"memory_format": kwargs.pop("memory_format")} if kwargs.get("memory_format") else {}
            dtype = func(torch.empty(0, dtype=args[0].dtype), *args[1:], **kwargs).dtype
            func, args, kwargs = torch.Tensor.to, (args[0], dtype), form
        if func is torch.empty and _is_large(args, kwargs):
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def _is_large(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether `torch.empty` is asked for more than `_LARGE` bytes of this machine's memory."""
    size = kwargs["size"] if "size" in kwargs else args[0] if args and not isinstance(args[0], int) else args
    dtype, device = kwargs.get("dtype") or torch.get_default_dtype(), kwargs.get("device") or torch.get_default_device()
    return torch.device(device).type == "cpu" and "out" not in kwargs and math.prod(size) * dtype.itemsize > _LARGE


def _replace_the_rest(module: nn.Module, twins: _Twins) -> None:
    """Twins for parameters that were put into `_parameters` without registration."""
    for prefix, part in module.named_modules():
        for name, param in part._parameters.items():
            if param is not None and nn.parameter.is_lazy(param):
                raise RuntimeError(
                    f"parameter {prefix}.{name} has no shape yet, because its layer is lazy. Pass sizes to the layer: "
                    "write `nn.Linear` instead of `nn.LazyLinear`."
                )
            if param is not None and _is_real(param):
                part._parameters[name] = twins.of(param)


def _fill_buffers(module: nn.Module, names: list[str], build: Callable[[], nn.Module]) -> None:
    """Real values for buffers that came out on `meta`, because they were made from parameters."""

    def buffers() -> dict[str, torch.Tensor]:
        return {n: b for n, b in build().named_buffers(remove_duplicate=False) if n in names}

    order = sorted(names)
    with _forked_generators():
        replay = record(buffers, lambda tree: ([tree[n] for n in order], _Keys(order)))
        olds = [module.get_buffer(name) for name in order]
        new: dict[int, torch.Tensor] = {}  # one for each old one, so that shared ones stay so
        for index, value in replay.run():
            path, _, name = order[index].rpartition(".")
            buffer = new.setdefault(id(olds[index]), value.clone())
            module.get_submodule(path)._buffers[name] = buffer


class _Keys:
    """The treedef of a dict with these keys."""

    def __init__(self, keys: list[str]) -> None:
        self.keys = keys

    def unflatten(self, leaves: list[Any]) -> dict[str, Any]:
        return dict(zip(self.keys, leaves, strict=True))


@contextlib.contextmanager
def _forked_generators() -> Iterator[None]:
    """Random draws inside leave torch's generators as they were."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        yield
